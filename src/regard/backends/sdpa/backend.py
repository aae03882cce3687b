"""Sdpa: torch's own fused kernels, for the calls that they compute exactly as defined here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.backends.base import (
    Backend,
    Example,
    ForwardResult,
    Plan,
    PlanInputs,
    Result,
    TrainingPlan,
    recorded_backward,
    why_leaks,
)
from regard.backends.sdpa.fused import FusedCall, fused_forward
from regard.backends.streaming.backward import Cotangents
from regard.call.problem import Problem
from regard.core.positions import Positions
from regard.core.region import Frame
from regard.core.shapes import repeat_heads, with_head_axis
from regard.core.tracing import data_unavailable
from regard.masks.algebra import Everything, Mask, View
from regard.masks.dense import Dense
from regard.masks.positional import Causal
from regard.masks.ragged import Lengths
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@dataclass(frozen=True)
class Sdpa(Backend):
    """torch.nn.functional.scaled_dot_product_attention, on `devices`: scaled dot products under a simple mask.

    torch's function gives no log-sum-exp, lets NaN and infinities leak out of masked places, and its paths differ in
    rows that see nothing; this backend refuses calls in which one of these matters. The backward reads what the forward
    found; the forward runs again for a call with a dense mask or lengths, and where torch has no fused kernel.

    >>> Sdpa()
    Sdpa()
    """

    devices: tuple[str, ...] = ("cuda",)

    def why_not(self, problem: Problem, lse: bool) -> str | None:
        frame = problem.frame
        if frame.device.type not in self.devices:
            return f"it serves {', '.join(self.devices)} tensors; these are on {frame.device.type}"
        if lse or problem.sink is not None:
            return "it gives no log-sum-exp, which a State or a sink needs"
        if len(problem.score.parts) > 1 or type(problem.similarity) is not ScaledDot:
            return f"it has only the scaled dot product, not {problem.score!r}"
        if isinstance(problem.similarity.scale, Tensor):
            return "its scale is a number, not a tensor"
        if problem.dropout is not None:
            return "its dropout is not a function of the seed alone"
        if 0 in problem.q.shape or 0 in problem.k.shape or 0 in problem.v.shape:
            return "an axis is empty"
        return _why_not_mask(problem.mask, frame, problem)

    def forward(self, problem: Problem) -> Result:
        with torch.no_grad():
            return _sdpa(problem)

    def plan(self, example: Example, training: bool) -> Plan | TrainingPlan | None:
        mask, placed = example.problem.mask, example.positions is not None
        alike = {(t.dtype, t.shape[: -3 if t.dim() > 3 else -2]) for t in example.given}
        simple = type(mask) is Everything or (type(mask) is Causal and not placed)
        if not simple or len(alike) > 1 or (training and placed):
            return None
        return _SdpaTrainingPlan(example) if training else _SdpaPlan(example)

    def forward_for_backward(self, problem: Problem) -> ForwardResult:
        if type(problem.mask) in (Everything, Causal):
            q, k, v = problem.q, problem.k, problem.v
            found = fused_forward(q, k, v, type(problem.mask) is Causal, _scale(problem))
            if found is not None:
                return ForwardResult(*found)
        return super().forward_for_backward(problem)

    def backward(
        self, problem: Problem, forward: ForwardResult, cotangents: Cotangents, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        kernel, g_out = forward.kernel, cotangents[0]
        if not isinstance(kernel, FusedCall):
            return recorded_backward(_sdpa, problem, cotangents, needs)
        found = kernel.gradients(g_out, problem.q, problem.k, problem.v, forward.out, forward.saved)
        return tuple(g if need else None for g, need in zip(found, needs, strict=False)) + (None,) * (len(needs) - 3)


def _why_not_mask(mask: Mask, frame: Frame, problem: Problem) -> str | None:
    if type(mask) is Everything:  # by type, not isinstance: a subclass may mean something else
        return None
    if type(mask) is Causal:
        if frame.nq != frame.nk or not _same_positions(frame.positions):
            return "its is_causal compares indices and needs as many keys as queries, at the same positions"
    elif not isinstance(mask, Dense) and not (isinstance(mask, Lengths) and mask.queries is None):
        return f"{mask!r} would have to be written out, {frame.nq} × {frame.nk}"
    elif data_unavailable(*mask.tensors()):
        return "in a graph nobody knows whether the mask leaves a query without a key"
    elif bool(View(mask, frame).empty_rows().any()):
        return "the mask leaves a query without a key, which its paths answer differently"
    return why_leaks((problem.q, problem.k, problem.v), problem.accumulate)


def _same_positions(positions: Positions) -> bool:
    """Whether query i stands where key i does and later ones behind it, by content: the caller may have made them."""
    if positions.span is not None:
        return positions.span.q == positions.span.k
    q, k = positions.q, positions.k
    if data_unavailable(q, k) or q.shape != k.shape:
        return False
    return bool((q == k).all() & (q.diff(dim=-1) > 0).all())


def _sdpa(problem: Problem) -> Result:
    mask, frame = problem.mask, problem.frame
    allowed = None if type(mask) in (Everything, Causal) else View(mask, frame).dense()
    out = _fused(problem.q, problem.k, problem.v, allowed, type(mask) is Causal, _scale(problem))
    return out, out.new_full(out.shape[:-1], torch.nan)


def _scale(problem: Problem) -> float | None:
    similarity = problem.similarity
    assert isinstance(similarity, ScaledDot) and not isinstance(similarity.scale, Tensor)
    return similarity.scale


def _fused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """torch's function on (*batch, h, n, d); allowed: (*batch, h, nq, nk)."""
    k, v = repeat_heads(k, q.shape[-3]), repeat_heads(v, q.shape[-3])
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal, scale=scale)


class _SdpaCalls:
    """Calls of one structure: every query sees all keys, or those up to its own."""

    of_lengths = False

    def __init__(self, example: Example) -> None:
        problem = example.problem
        self.scale, self.causal = _scale(problem), type(problem.mask) is Causal
        self.accumulate = problem.accumulate

    def serves(self, call: PlanInputs) -> bool:
        """What only numbers and lengths tell is looked at in each call."""
        if not call.nq or not call.nk:
            return False
        return not self.causal or not (call.nq != call.nk or why_leaks((call.q, call.k, call.v), self.accumulate))

    def remember(self, call: PlanInputs, score: Score, sink: Tensor | float | None, outlines: tuple[Any, ...]) -> None:
        """The shorter way is the native kernels' alone."""


class _SdpaPlan(_SdpaCalls):
    """Those without gradients."""

    def run(self, call: PlanInputs) -> Tensor | None:
        """See base.Plan."""
        if not self.serves(call):
            return None
        q, k, v = (with_head_axis(t) for t in (call.q, call.k, call.v))
        return _fused(q, k, v, None, self.causal, self.scale).reshape(*call.q.shape[:-1], call.v.shape[-1])


class _SdpaTrainingPlan(_SdpaCalls):
    """Those that will be differentiated, where torch takes a kernel whose backward is known."""

    def run_for_backward(self, call: PlanInputs) -> ForwardResult | None:
        """See base.TrainingPlan."""
        if not self.serves(call):
            return None
        q, k, v = (with_head_axis(t.detach()) for t in (call.q, call.k, call.v))
        with torch.no_grad():
            found = fused_forward(q, k, v, self.causal, self.scale)
        if found is None:
            return None
        out, saved, kernel = found
        return ForwardResult(out.reshape(*call.q.shape[:-1], call.v.shape[-1]), saved, kernel)

    def run_with_stats(self, call: PlanInputs) -> None:
        """torch's function gives none."""

    def backward(
        self, forward: ForwardResult, given: Sequence[Tensor], leaves: Sequence[Tensor], g_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        """See base.TrainingPlan."""
        q, k, v, out, g_out = (with_head_axis(t.detach()) for t in (*given, forward.out, g_out))
        with torch.no_grad():
            found = forward.kernel.gradients(g_out, q, k, v, out, forward.saved)
        return tuple(g.reshape(t.shape) for g, t in zip(found, given, strict=True))

    def backward_of_saved(self, kernel: Any, saved: tuple[Tensor, ...], cotangent: Tensor) -> None:
        """There is no shorter way."""
