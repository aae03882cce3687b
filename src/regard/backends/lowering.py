"""Lowering: a problem as the few operands that the native kernels read. A new mask touches nothing here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from regard.backends.library import AXES, CODES
from regard.backends.masking import full, lower_mask
from regard.problem import Problem
from regard.scores.activations import Activation, LeakyReLU, Sigmoid, Tanh
from regard.scores.additive import Additive
from regard.scores.algebra import Score
from regard.scores.buckets import ClippedBuckets, T5Buckets, T5CausalBuckets
from regard.scores.modifiers import Alibi, Bias, RelativeBias, SoftCap
from regard.scores.similarity import Bilinear, Cosine, Distance, Dot, ScaledDot
from regard.shapes import branchless

ACTIVATIONS: dict[type, int] = {Tanh: 0, Sigmoid: 1, LeakyReLU: 2}  # as in native/activation.h; by type, as below
_MOST = 1 << 31  # keys, and distances, are 32-bit numbers inside a block


@dataclass(frozen=True, eq=False)
class Lowered:
    """What the kernels are told of one call: regard_call of native/args.h, before it has addresses.

    q (*batch, h, nq, dk), k and v (*batch, hk, nk, ...), one dtype. Other operands have the axes (*batch, h, ...), 1
    where they are shared, or are None where the call has no such thing:
    start, stop   int32 (.., nq, 1): the keys that each query sees
    allowed       booleans (.., nq, nk)
    tiles, bits   int32 (.., R, C): -1 hides a tile, -2 shows it, else the number of its bits; int64 (n, keys of a tile)
    bias          (.., nq, nk), added to the scores
    slopes        float32 (h,) or (1,): what a step of distance costs
    offsets       float32 (h or 1, nq + nk - 1 and some): what is added for a distance i - j, from -(nk - 1) on
    q_at, k_at    int64 (*batch, n): positions, where slopes or dropout ask for them
    sink          float32 (.., 1, 1): logits that take mass and add nothing
    invariant     whether a row's bits must not depend on the other rows
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    cap: float = 0.0
    start: Tensor | None = None
    stop: Tensor | None = None
    allowed: Tensor | None = None
    tiles: Tensor | None = None
    bits: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    offsets: Tensor | None = None
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
        found = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: t for name, t in found if isinstance(t, Tensor)}


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot be told a problem, as a clause; None if they can."""
    frame = problem.frame
    if problem.dtype not in CODES:
        return f"dtype {str(problem.dtype).removeprefix('torch.')}; it has float32, bfloat16, float16"
    if len(frame.batch) > AXES:
        return f"{len(frame.batch)} batch axes; it has {AXES}"
    if max(frame.nq, frame.nk) >= _MOST:
        return "2^31 queries or keys, or more"
    return _why_not_similarity(problem) or _why_not_modifiers(problem)


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


def _why_not_modifiers(problem: Problem) -> str | None:
    seen: list[type] = []
    for stage in problem.score.parts[1:]:
        why = _why_not_modifier(stage, problem)
        if why is None and type(stage) is SoftCap and seen:
            why = "its soft cap comes first"
        if why is None and type(stage) in seen:
            why = f"it takes one {type(stage).__name__}"
        if why is not None:
            return why
        seen.append(type(stage))
    return None


def _why_not_modifier(stage: Score, problem: Problem) -> str | None:
    # by type, not isinstance: a subclass may mean something else
    if type(stage) is SoftCap:
        if not isinstance(stage.cap, Tensor) or (stage.cap.numel() == 1 and not branchless(stage.cap)):
            return None
        return "its soft cap is one number"
    if type(stage) is RelativeBias:
        if type(stage.buckets) not in (T5Buckets, T5CausalBuckets, ClippedBuckets):
            return f"its relative biases depend on the distance alone, not on {stage.buckets!r}"
        consecutive = problem.frame.positions.consecutive
        return None if consecutive else "its relative biases need positions that count up by one"
    if type(stage) is Alibi:
        if stage.coordinates is not None:
            return "its slopes count positions, not coordinates"
        return None if near(problem) else "positions lie 2^31 or more apart"
    return None if type(stage) is Bias else f"it has no step {stage!r}"


def near(problem: Problem) -> bool:
    """Whether all distances between positions are 32-bit numbers."""
    q, k = problem.frame.positions.q, problem.frame.positions.k
    if not q.numel() or not k.numel() or branchless(q, k):
        return True
    return max(int(q.max()), int(k.max())) - min(int(q.min()), int(k.min())) < _MOST


def lower(problem: Problem, tile: tuple[int, int] | None) -> Lowered:
    """A problem for kernels with tiles of so many queries and keys; None where nobody may look at values."""
    return lower_dots(problem, lower_mask(problem, tile))


def lower_dots(problem: Problem, mask: dict[str, Tensor]) -> Lowered:
    """The same where what lower_mask says of its mask is known."""
    q, k, scale = _dot_operands(problem)
    return lower_around(problem, mask, q, k, problem.v.to(q.dtype), scale)


def lower_around(
    problem: Problem, mask: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0
) -> Lowered:
    """The same with these queries, keys and values."""
    told: dict[str, Any] = {**mask, **_modifiers(problem), **_dropout(problem)}
    sink = None if problem.sink is None else problem.sink.float()[..., None, None]
    return Lowered(q, k, v, scale, **told, sink=sink)


def _dot_operands(problem: Problem) -> tuple[Tensor, Tensor, float]:
    """Queries and keys whose dot product, times the scale, is the similarity."""
    similarity, q, k = problem.similarity, problem.q, problem.k
    dtype = torch.promote_types(q.dtype, k.dtype)
    q, k = q.to(dtype), k.to(dtype)
    if isinstance(similarity, Distance):
        found = similarity.as_dot(q, k)
        assert found is not None
        return *found, 1.0
    if not isinstance(similarity, ScaledDot):
        return q, k, 1.0
    if isinstance(similarity.scale, Tensor):
        scale = similarity.scale
        return q.float() * (scale[..., None, None] if scale.dim() else scale).float(), k.float(), 1.0
    return q, k, max(q.shape[-1], 1) ** -0.5 if similarity.scale is None else similarity.scale


def _modifiers(problem: Problem) -> dict[str, Any]:
    frame = problem.frame
    told: dict[str, Any] = {}
    for stage in problem.score.parts[1:]:
        if isinstance(stage, SoftCap):
            told["cap"] = float(stage.cap)
        elif isinstance(stage, Alibi):
            told |= {"slopes": stage.slopes.float().reshape(-1).contiguous(), **_positions(problem)}
        elif isinstance(stage, Bias):
            bias = full(frame.lift(stage.bias))
            told["bias"] = bias if bias.dtype in CODES else bias.float()
        elif isinstance(stage, RelativeBias):
            index = relative_buckets(problem, stage)
            # the kernel loads whole vectors
            told["offsets"] = torch.nn.functional.pad(stage.table.float()[index].T.contiguous(), (0, 64))
    return told


def relative_buckets(problem: Problem, stage: RelativeBias) -> Tensor:
    """The bucket of each distance i - j of indices, from -(nk - 1) on: (nq + nk - 1,)."""
    frame = problem.frame
    ahead = torch.arange(frame.nq + frame.nk - 1) - (frame.nk - 1)
    ahead = ahead + (frame.positions.q[0] - frame.positions.k[0])
    return stage.buckets.index(ahead, torch.zeros_like(ahead))


def _dropout(problem: Problem) -> dict[str, Any]:
    drop = problem.dropout
    if drop is None:
        return {}
    assert drop.seed is not None
    return {"seed": drop.seed, "threshold": drop.threshold, "keep": drop.scale, **_positions(problem)}


def _positions(problem: Problem) -> dict[str, Tensor]:
    at = problem.frame.positions
    return {"q_at": at.q.long().contiguous(), "k_at": at.k.long().contiguous()}
