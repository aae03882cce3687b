"""A problem as the few operands that the native kernels read. A new mask touches nothing here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

import regard.backends.native.abi as abi
from regard.backends.native.abi import AXES
from regard.backends.native.ffi import DTYPE_CODES
from regard.backends.native.modifiers.distance import MOST, place
from regard.backends.native.modifiers.table import ModifierOperands, lower_modifiers, why_not_modifiers
from regard.core.problem import Problem
from regard.scores.activations import Activation, LeakyReLU, Sigmoid, Tanh
from regard.scores.additive import Additive
from regard.scores.algebra import by_head, by_row
from regard.scores.similarity import Bilinear, Cosine, Distance, Dot, ScaledDot

ACTIVATIONS: dict[type, int] = {  # by type, not isinstance: a subclass may mean something else
    Tanh: abi.ACTIVATIONS["REGARD_TANH"],
    Sigmoid: abi.ACTIVATIONS["REGARD_SIGMOID"],
    LeakyReLU: abi.ACTIVATIONS["REGARD_LEAKY_RELU"],
}


@dataclass(frozen=True, eq=False)
class KernelArgs(ModifierOperands):
    """The operands and numbers of one call, before it has addresses: see abi.CallArguments.

    q (*batch, h, nq, dk), k and v (*batch, hk, nk, ...), one dtype. Other operands have the axes (*batch, h, ...), 1
    where they are shared, or are None where the call has no such thing. Those of modifiers: modifiers/.
    start, stop   int32 (.., nq, 1): the keys that each query sees; or, instead, a rule:
    first, last   query i sees the keys from first + i up to, but without, last + i
    shifts        int64 (*batch, 1): added to first and last
    key_counts, query_counts  int64 (*batch, 1): only so many keys are seen, only so many queries see any
    q_documents, k_documents  int64 (*batch, n): seen are the keys with the query's number; also beside start and stop
    allowed       booleans (.., nq, nk)
    tiles, bits   int32 (.., R, C): -1 hides a tile, -2 shows it, else the number of its bits; int64 (n, keys of a tile)
    mask_text     a mask that is none of these, in a graph: see mask_text.py; mask_0, ... are positions and its tensors
    q_at, k_at    int64 (*batch, n): positions, where modifiers or dropout ask for them
    sink          float32 (.., 1, 1): logits that take mass and add nothing
    invariant     whether a row's bits must not depend on the other rows
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    start: Tensor | None = None
    stop: Tensor | None = None
    first: int | None = None
    last: int | None = None
    shifts: Tensor | None = None
    key_counts: Tensor | None = None
    query_counts: Tensor | None = None
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    allowed: Tensor | None = None
    tiles: Tensor | None = None
    bits: Tensor | None = None
    mask_text: str = ""
    mask_0: Tensor | None = None
    mask_1: Tensor | None = None
    mask_2: Tensor | None = None
    mask_3: Tensor | None = None
    mask_4: Tensor | None = None
    mask_5: Tensor | None = None
    mask_6: Tensor | None = None
    mask_7: Tensor | None = None
    q_at: Tensor | None = None
    k_at: Tensor | None = None
    sink: Tensor | None = None
    seed: int = 0
    threshold: int = 0
    keep: float = 1.0
    invariant: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(*batch, heads, nq) of the call."""
        return tuple(self.q.shape[:-1])

    def tensors(self) -> dict[str, Tensor]:
        """The operands that are there."""
        found = ((name, getattr(self, name)) for name in _OPERANDS)
        return {name: t for name, t in found if t is not None}


_OPERANDS = tuple(f.name for f in fields(KernelArgs) if "Tensor" in str(f.type))


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
    if type(similarity) not in (Dot, ScaledDot, Bilinear, Cosine):
        return f"its scores begin with a dot product, not with {similarity!r}"
    return None


def _unknown(activation: Activation) -> str:
    return f"its hidden layers have tanh, the sigmoid or a leaky ReLU, not {activation!r}"


def lower(problem: Problem, mask: dict[str, Any]) -> KernelArgs:
    """A problem as the kernels read it; mask: what lower_mask says of its mask."""
    q, k, v, scale = _similarity_operands(problem)
    operands: dict[str, Any] = {**mask, **lower_modifiers(problem), **_dropout(problem)}
    sink = None if problem.sink is None else problem.sink.float()[..., None, None]
    return KernelArgs(q, k, v, scale, **operands, sink=sink)


def _similarity_operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries and keys whose dot product, times the scale, is the similarity, and values; of Additive a, c and v."""
    similarity, q, k, v = problem.similarity, problem.q, problem.k, problem.v
    if isinstance(similarity, Additive):
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


def _dropout(problem: Problem) -> dict[str, Any]:
    drop = problem.dropout
    if drop is None:
        return {}
    assert drop.seed is not None
    return {"seed": drop.seed, "threshold": drop.threshold, "keep": drop.scale, **place(problem)}
