"""A problem as the operands that the native kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import regard.backends.native.abi as abi
from regard.backends.native.abi import AXES
from regard.backends.native.call_operands import NUMBERS, OF_MASK, PAIRS, PLACED
from regard.backends.native.ffi import DTYPE_CODES
from regard.backends.native.modifiers.distance import MOST, position_operands
from regard.backends.native.modifiers.program import in_graph
from regard.backends.native.modifiers.table import lower_modifiers, why_not_modifiers
from regard.backends.native.products import why_no_product
from regard.backends.native.programs.features import why_no_program_of_features
from regard.backends.native.similarity_text import write_similarity
from regard.call.problem import Problem
from regard.core.int8_rows import Int8Rows
from regard.core.tracing import data_unavailable, watched
from regard.scores.activations import Activation, LeakyReLU, Sigmoid, Tanh
from regard.scores.additive import Additive
from regard.scores.elementwise import Elementwise
from regard.scores.fields import by_head
from regard.scores.finite import by_row
from regard.scores.similarity import Bilinear, Cosine, Distance, Dot, ScaledDot

ACTIVATIONS: dict[type, int] = {  # by type, not isinstance: a subclass may mean something else
    Tanh: abi.ACTIVATIONS["REGARD_TANH"],
    Sigmoid: abi.ACTIVATIONS["REGARD_SIGMOID"],
    LeakyReLU: abi.ACTIVATIONS["REGARD_LEAKY_RELU"],
}


@dataclass(frozen=True, eq=False)
class KernelArgs:
    """The operands and numbers of one call, before it has addresses: see abi.CallArguments.

    q (*batch, h, nq, dk), k and v (*batch, hk, nk, ...), one dtype; k and v are int8 where they have scales.
    operands   those that the call has, by their names in call_operands.OPERANDS
    numbers    those that are not as call_operands.NUMBERS says, by name
    shape      (*batch, heads, nq) of the call
    mask_text  a mask that is no operand yet, in a graph: see mask_text.py; mask_0, ... are its positions and tensors
    score_text modifiers that are no program yet, in a graph: see programs/text.py
    similarity_text  a similarity that is no dot product, in a graph: see similarity_text.py. The tensors of the
               similarity, and then those of the modifiers, are program_0, ...
    """

    q: Tensor
    k: Tensor
    v: Tensor
    operands: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    mask_text: str = ""
    score_text: str = ""
    similarity_text: str = ""
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.q.shape[:-1]))

    def number(self, name: str) -> Any:
        """One of call_operands.NUMBERS."""
        return self.numbers.get(name, NUMBERS[name].default)

    def mask_to_keep(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The mask's operands and numbers, for a backward that does not lower the mask again.

        None of tile maps that take more memory than queries and keys, nor of a program, whose operands are modifiers'
        too.
        """
        tensors = {name: self.operands[name] for name in OF_MASK if name in self.operands}
        if bytes_of_pairs(tensors) > self.q.nbytes + self.k.nbytes or "mask_code" in tensors:
            return {}, {}
        return tensors, {name: self.numbers[name] for name in OF_MASK if self.numbers.get(name) is not None}

    def with_operands(self, **changed: Tensor) -> KernelArgs:
        """The same call with other tensors in the place of some operands, or more of them."""
        return replace(self, operands={**self.operands, **changed})

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v and the operands that are there."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.operands}


TEXTS = "mask_text", "score_text", "similarity_text"


def bytes_of_pairs(operands: Mapping[str, Any]) -> int:
    """What a mask takes that was written out pair by pair, as a map of tiles and their bits."""
    return sum(operands[one.name].nbytes for one in PAIRS if one.name in operands and not one.leaf)


def kernel_args(q: Tensor, k: Tensor, v: Tensor, found: Mapping[str, Any]) -> KernelArgs:
    """The arguments of a call from its operands, numbers and, in a graph, the texts of its parts, by name."""
    operands = {name: x for name, x in found.items() if isinstance(x, Tensor)}
    numbers = {name: x for name, x in found.items() if name in NUMBERS}
    return KernelArgs(q, k, v, operands, numbers, **{name: found[name] for name in TEXTS if name in found})


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot compute a problem, as a clause; None if they can."""
    frame = problem.frame
    if problem.dtype not in DTYPE_CODES:
        return f"dtype {str(problem.dtype).removeprefix('torch.')}; it has float32, bfloat16, float16"
    if len(frame.batch) > AXES:
        return f"{len(frame.batch)} batch axes; it has {AXES}"
    if max(frame.nq, frame.nk) >= MOST:
        return "2^31 queries or keys, or more"
    return _why_not_similarity(problem) or why_not_modifiers(problem)


def _why_not_similarity(problem: Problem) -> str | None:
    similarity = problem.similarity
    if type(similarity) is Distance:
        far = similarity.as_dot(problem.q, problem.k) is None
        return "points lie so far apart that their distances, as dot products, would lose digits" if far else None
    if type(similarity) is Additive:
        return None if type(similarity.activation) in ACTIVATIONS else _unknown(similarity.activation)
    if type(similarity) is Elementwise:
        return _why_not_elementwise(problem)
    if type(similarity) not in (Dot, ScaledDot, Bilinear, Cosine):
        why = why_no_product(problem)
        return f"its scores begin with a dot product, not with {similarity!r}" + ("" if why is None else f": {why}")
    return None


def _why_not_elementwise(problem: Problem) -> str | None:
    if in_graph(problem):
        text = write_similarity(problem)
        return f"it records no {problem.similarity!r} in a graph: {text}" if isinstance(text, str) else None
    if data_unavailable(*problem.tensors()) or watched():
        return "a transform or a mode sees the call, whose function of features it would run on these numbers alone"
    if 0 in (*problem.frame.shape, problem.q.shape[-1]):
        return f"{problem.similarity!r} has no pairs or no features"
    why = why_no_program_of_features(problem)
    return None if why is None else f"it has no program for {problem.similarity!r}: {why}"


def _unknown(activation: Activation) -> str:
    return f"its hidden layers have tanh, the sigmoid or a leaky ReLU, not {activation!r}"


def lower(
    problem: Problem, mask: dict[str, Any], invariant: bool = False, score: dict[str, Any] | None = None
) -> KernelArgs:
    """A problem as the kernels read it. mask: what lower_mask says of its mask; score: in a graph, texts of the score,
    as score_as_text writes them, in the place of operands.
    """
    q, k, v, scale = _similarity_operands(problem)
    score = lower_modifiers(problem) if score is None else score
    found = {**with_places(mask, problem), **score, "scale": scale, "invariant": invariant}
    drop = problem.dropout
    if drop is not None:
        found |= {"seed": drop.seed, "threshold": drop.threshold, "keep": drop.scale}
        found |= position_operands(problem.frame.positions)
    if problem.sink is not None:
        found["sink"] = problem.sink.float()[..., None, None]
    if isinstance(k, Int8Rows) and isinstance(v, Int8Rows):
        found |= {"k_scales": k.scales, "v_scales": v.scales}
        k, v = k.numbers, v.numbers
    return kernel_args(q, k, v, found)


def with_places(mask: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """What lower_mask says of a mask, and the positions of the call where the kernels compare it with them."""
    return mask if PLACED.isdisjoint(mask) else {**mask, **position_operands(problem.frame.positions)}


def _similarity_operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries and keys whose dot product, times the scale, is the similarity, and values.

    Of Additive a, c and v; of Elementwise queries and keys as they are, in float32.
    """
    similarity, q, k, v = problem.similarity, problem.q, problem.k, problem.v
    if isinstance(similarity, (Additive, Elementwise)):
        return q.float(), k.float(), v, 1.0
    dtype, scale = torch.promote_types(q.dtype, k.dtype), 1.0
    q, k = q.to(dtype), k.to(dtype)
    if isinstance(similarity, Distance):
        found = similarity.as_dot(q, k)
        assert found is not None
        q, k = found
    elif isinstance(similarity, ScaledDot):
        factor = similarity.scale
        if isinstance(factor, Tensor):
            q, k = by_row(q.float(), lambda row: row * by_head(factor, row)), k.float()
        else:
            scale = max(q.shape[-1], 1) ** -0.5 if factor is None else factor
    return q, k, v.to(q.dtype), scale
