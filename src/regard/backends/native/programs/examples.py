"""Texts of scores and masks that are described by constants: recorded for examples of the sizes that may change.

The texts of all examples must be the same, else a graph would hold a number of one call. torch.compile has a guard for
a branch by a size, but none for the least of a size and a number: few and many queries and keys are among the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.programs.code import NotLowered
from regard.backends.native.programs.graph import NotTraced
from regard.backends.native.programs.lower import lower
from regard.backends.native.programs.recorder import PortableRecorder
from regard.backends.native.programs.structure import graph_of, key_of
from regard.backends.native.programs.text import RecordedModifier, write_graph
from regard.backends.native.programs.trace import trace, trace_mask
from regard.backends.native.programs.trace_features import trace_features
from regard.call.described import CHANGES, Sizes, example
from regard.core.errors import Unsupported
from regard.core.functions import Unknown
from regard.core.region import Frame
from regard.core.tracing import constant_in_graphs, unwatched

NO = "no: "  # what begins the reason why there is no text
REFUSED = "refused: "  # what begins the reason why the call is refused


@constant_in_graphs
def text_of(kind: str, values: tuple[Any, ...], frame: tuple[Any, ...]) -> str:
    """What is recorded of a "mask", "modifiers" or "features", or NO or REFUSED and why there is nothing.

    Both are described by call/described.py.
    """
    with unwatched():
        try:
            return _text(kind, values, frame)
        except (NotTraced, NotLowered) as why:
            return NO + str(why)
        except Unsupported as why:
            return REFUSED + str(why)
        except Exception as error:  # what Python raises where it runs the function for an example
            return f"{NO}{type(error).__name__} was raised while it was recorded for a graph"


_MANY = tuple((n, n + 2, n + 4) for n in (1 << 20, 1 << 16, 1 << 12, 1 << 9))
_MOST_ELEMENTS = 1 << 22


def _text(kind: str, values: tuple[Any, ...], frame: tuple[Any, ...]) -> str:
    """Raises NotTraced, NotLowered, Unsupported, and what functions raise."""
    sizes = Sizes()
    items, made_frame = example(values, frame, sizes, _of_zeros)
    text = _recorded(kind, items, made_frame)
    if kind == "modifiers":
        held = [t for stage in items for t in stage.tensors()]
        recorded = RecordedModifier(text, tuple(held))
        lower(graph_of((recorded,), made_frame), made_frame, held, (False,) * len(held))
    try:
        key_of(items)  # what has a key reads numbers and functions alone: torch guards not all of the rest
    except Unknown:
        raise NotTraced("it reads what may change without that torch.compile notices") from None
    others = [Sizes(53, 59, 61)]
    if sizes.changing:
        many = [Sizes(*n) for n in _MANY]
        others += [one for one in many if max(map(one.most_elements, values)) <= _MOST_ELEMENTS][:1]
    if any(_recorded(kind, *example(values, frame, one, _of_ones)) != text for one in others):
        raise NotTraced(CHANGES)
    if sizes.changing and _of_few(kind, values, frame) not in (text, None):
        raise NotTraced(CHANGES)
    return text


def _of_few(kind: str, values: tuple[Any, ...], frame: tuple[Any, ...]) -> str | None:
    """What is recorded for few queries and keys; None if it cannot run there: a table may be too short."""
    try:
        return _recorded(kind, *example(values, frame, Sizes(5, 6, 7), _of_ones))
    except Exception:
        return None


def _of_zeros(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.zeros((), dtype=dtype, device="cpu").expand(shape)


def _of_ones(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.ones((), dtype=dtype, device="cpu").expand(shape)


def _recorded(kind: str, items: tuple[Any, ...], frame: Frame) -> str:
    if kind == "mask":
        return write_graph(trace_mask(items[0], frame, PortableRecorder))
    if kind == "features":
        return write_graph(trace_features(items[0], frame, PortableRecorder))
    return write_graph(trace(items, frame, torch.float32, PortableRecorder))
