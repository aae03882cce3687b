"""regard: exact attention with any score function, in linear memory, that lets you look inside."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from regard import nn as nn
from regard import sources as sources
from regard.api import attention as attention
from regard.api import attention_scores as attention_scores
from regard.api import attention_state as attention_state
from regard.api import attention_weights as attention_weights
from regard.api import explain as explain
from regard.backends.flex import Flex as Flex
from regard.backends.native.backend import Native as Native
from regard.backends.reference import Reference as Reference
from regard.backends.sdpa.backend import Sdpa as Sdpa
from regard.backends.streaming.tiled import Tiled as Tiled
from regard.core.dropout import Dropout as Dropout
from regard.core.elsewhere import NAMES as _NAMES
from regard.core.errors import ShapeError as ShapeError
from regard.core.errors import Unsupported as Unsupported
from regard.core.mkl import choose_functions as _choose_functions
from regard.core.positions import Positions as Positions
from regard.core.positions import head as head
from regard.core.positions import tail as tail
from regard.core.state import State as State
from regard.core.wrong_calls import no_name as _no_name
from regard.core.wrong_calls import public_names as _public_names
from regard.inspect import facts as facts
from regard.inspect import heads as heads
from regard.inspect.differentiable import entropy as entropy
from regard.inspect.differentiable import max_score as max_score
from regard.inspect.lint.lint import lint as lint
from regard.inspect.look import look as look
from regard.inspect.monitor import monitor as monitor
from regard.inspect.record import record as record
from regard.inspect.report.report import Report as Report
from regard.inspect.rollout import rollout as rollout
from regard.masks.algebra import Cover as Cover
from regard.masks.algebra import Everything as Everything
from regard.masks.algebra import Mask as Mask
from regard.masks.dense import Dense as Dense
from regard.masks.dense import Where as Where
from regard.masks.positional import Causal as Causal
from regard.masks.positional import Dilated as Dilated
from regard.masks.positional import Prefix as Prefix
from regard.masks.positional import Window as Window
from regard.masks.ragged import Documents as Documents
from regard.masks.ragged import Lengths as Lengths
from regard.masks.retained import Retained as Retained
from regard.scores.activations import LeakyReLU as LeakyReLU
from regard.scores.activations import Sigmoid as Sigmoid
from regard.scores.activations import Tanh as Tanh
from regard.scores.additive import Additive as Additive
from regard.scores.algebra import Modifier as Modifier
from regard.scores.algebra import Score as Score
from regard.scores.algebra import Similarity as Similarity
from regard.scores.buckets import Buckets as Buckets
from regard.scores.buckets import ClippedBuckets as ClippedBuckets
from regard.scores.buckets import DifferenceBuckets as DifferenceBuckets
from regard.scores.buckets import GridBuckets as GridBuckets
from regard.scores.buckets import T5Buckets as T5Buckets
from regard.scores.buckets import T5CausalBuckets as T5CausalBuckets
from regard.scores.clamp import Clamp as Clamp
from regard.scores.distance_penalty import LogDistance as LogDistance
from regard.scores.elementwise import Elementwise as Elementwise
from regard.scores.modifiers import Alibi as Alibi
from regard.scores.modifiers import Bias as Bias
from regard.scores.modifiers import RelativeBias as RelativeBias
from regard.scores.modifiers import SoftCap as SoftCap
from regard.scores.power_distance import PowerDistance as PowerDistance
from regard.scores.similarity import Bilinear as Bilinear
from regard.scores.similarity import Cosine as Cosine
from regard.scores.similarity import Custom as Custom
from regard.scores.similarity import Distance as Distance
from regard.scores.similarity import Dot as Dot
from regard.scores.similarity import ScaledDot as ScaledDot
from regard.scores.temperature import Temperature as Temperature
from regard.sequences.packed import Packed as Packed
from regard.sequences.packed import pack as pack
from regard.sequences.packed import unpack as unpack
from regard.sources.attention_over import attention_over as attention_over
from regard.sources.explain_over import explain_over as explain_over
from regard_command.version import __version__ as __version__

if TYPE_CHECKING:
    from regard import compat as compat
    from regard import parallel as parallel
    from regard import testing as testing
    from regard.compat.torch.patch import patch as patch

__all__ = [
    "Additive",
    "Alibi",
    "Bias",
    "Bilinear",
    "Buckets",
    "Causal",
    "Clamp",
    "ClippedBuckets",
    "Cosine",
    "Cover",
    "Custom",
    "Dense",
    "DifferenceBuckets",
    "Dilated",
    "Distance",
    "Documents",
    "Dot",
    "Dropout",
    "Elementwise",
    "Everything",
    "Flex",
    "GridBuckets",
    "LeakyReLU",
    "Lengths",
    "LogDistance",
    "Mask",
    "Modifier",
    "Native",
    "Packed",
    "Positions",
    "PowerDistance",
    "Prefix",
    "Reference",
    "RelativeBias",
    "Report",
    "Retained",
    "ScaledDot",
    "Score",
    "Sdpa",
    "ShapeError",
    "Sigmoid",
    "Similarity",
    "SoftCap",
    "State",
    "T5Buckets",
    "T5CausalBuckets",
    "Tanh",
    "Temperature",
    "Tiled",
    "Unsupported",
    "Where",
    "Window",
    "attention",
    "attention_over",
    "attention_scores",
    "attention_state",
    "attention_weights",
    "entropy",
    "explain",
    "explain_over",
    "facts",
    "head",
    "heads",
    "lint",
    "look",
    "max_score",
    "monitor",
    "nn",
    "pack",
    "patch",
    "record",
    "rollout",
    "sources",
    "tail",
    "unpack",
]

_choose_functions()


_ON_DEMAND = ("compat", "parallel", "testing")  # modules that are loaded when they are asked for


def __dir__() -> list[str]:
    """The public names: what completion shows after `rg.`."""
    return ["__version__", *__all__, *_ON_DEMAND]


def __getattr__(name: str) -> object:
    """What is loaded when it is asked for: patch, and modules."""
    if name in _ON_DEMAND:
        return _import_module(f"{__name__}.{name}")
    if name != "patch":
        parts = {"nn": nn, "facts": facts, "heads": heads, "sources": sources}
        inside = [each for part, module in parts.items() for each in _public_names(vars(module), f"{part}.")]
        raise _no_name(__name__, name, [*__all__, *inside], _NAMES)
    from regard.compat.torch.patch import patch

    globals()[name] = patch
    return patch
