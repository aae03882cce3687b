"""OnnxAttention: a call as one node of the standard operator Attention, for models that are exported to ONNX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.backends.base import Backend, Differentiable, why_leaks
from regard.call.problem import Problem
from regard.core.state import RowStats
from regard.core.tracing import data_unavailable
from regard.masks.algebra import Everything, View
from regard.masks.positional import Causal
from regard.scores.algebra import Modifier, Score
from regard.scores.modifiers import SoftCap
from regard.scores.similarity import Dot, ScaledDot


@dataclass(frozen=True)
class OnnxAttention(Backend):
    """The operator Attention of ONNX, opset 23 and later: scaled dot products, then a soft cap or numbers to add.

    torch.onnx.export makes one node of it; run directly, torch's own definition of the operator answers. A causal mask
    alone, over as many keys as queries, is its is_causal; any other mask, slopes and tables are written out, a number a
    pair.
    See regard.compat.onnx.export, which puts it in place. Source: onnx/defs/nn, onnx 1.23.

    >>> q = torch.randn(2, 4, 5, 8)
    >>> torch.allclose(rg.attention(q, q, q, mask=rg.Causal(), backend=OnnxAttention()), rg.attention(
    ...     q, q, q, mask=rg.Causal()), atol=1e-6)
    True
    """

    recorded: ClassVar[bool] = True

    def why_not(self, problem: Problem, lse: bool) -> str | None:
        parts = problem.score.parts
        caps = [stage for stage in parts[1:] if type(stage) is SoftCap]  # by type: a subclass may mean something else
        if lse or problem.sink is not None:
            return "ONNX's Attention gives no log-sum-exp, which a State or a sink needs"
        if problem.dropout is not None:
            return "ONNX's Attention has no dropout; export in eval mode"
        if problem.dv != problem.q.shape[-1]:
            return f"torch exports the operator for values as wide as queries, {problem.q.shape[-1]}, not {problem.dv}"
        if len(problem.frame.batch) != 1:
            return f"ONNX's Attention has one batch axis; these tensors have {len(problem.frame.batch)}"
        if type(parts[0]) not in (Dot, ScaledDot) or isinstance(getattr(parts[0], "scale", None), Tensor):
            return f"ONNX's Attention has the dot product, scaled by a number, not {parts[0]!r}"
        if any(type(stage) is not SoftCap and not _adds(stage) for stage in parts[1:]):
            return f"ONNX's Attention has a soft cap and numbers to add, not {problem.score!r}"
        if caps and (len(parts) > 2 or isinstance(caps[0].cap, Tensor) or type(problem.mask) is not Everything):
            return "opset 23 caps masked scores, later ones do not: a soft cap is a number, and alone"
        if type(problem.mask) is Everything or data_unavailable(*problem.tensors()):
            return None
        return why_leaks((problem.q, problem.k, problem.v), problem.accumulate)

    def differentiable(self, problem: Problem) -> Differentiable:
        from torch.onnx.ops import attention

        similarity, *stages = problem.score.parts
        scale = similarity.scale if isinstance(similarity, ScaledDot) else 1.0
        assert not isinstance(scale, Tensor)
        cap, added, at = 0.0, None, problem.frame.region()
        for stage in stages:
            if isinstance(stage, SoftCap):
                assert not isinstance(stage.cap, Tensor)
                cap = stage.cap
            else:
                assert isinstance(stage, Modifier)
                added = stage.modify(problem.q.new_zeros(1, 1, 1, 1) if added is None else added, at)
        span, mask, view = problem.frame.positions.span, problem.mask, View(problem.mask, problem.frame)
        # rows that see nothing; in an export nobody knows them, and runtimes answer them in their own ways
        known = type(mask) is not Everything and not data_unavailable(*problem.tensors())
        empty = view.empty_rows()[..., None] if known else None
        # torch's definition of the operator takes is_causal or numbers, not both
        causal = type(mask) is Causal and added is None and span is not None and span.q == span.k
        if not causal and type(mask) is not Everything:
            allowed = view.dense() if empty is None else view.dense() | empty
            # booleans are the operator's own form of a mask
            added = allowed if added is None else torch.where(allowed, added, -torch.inf)
        out = attention(problem.q, problem.k, problem.v, added, is_causal=causal, scale=scale, softcap=cap)[0]
        out = out if empty is None else out.masked_fill(empty, 0)
        unknown = out.new_full(out.shape[:-1], torch.nan)
        return out, RowStats(unknown, unknown)


def _adds(stage: Score) -> bool:
    return isinstance(stage, Modifier) and stage.adds
