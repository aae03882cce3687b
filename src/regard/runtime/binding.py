"""BoundCall: the arguments of one call made a Problem, run, and its results turned back into what the caller has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.backends.base import Backend
from regard.call.arguments import Layout, build_problem
from regard.call.problem import Problem
from regard.core.deferred import kept_alike
from regard.core.dropout import Dropout
from regard.core.dtypes import autocast, exact
from regard.core.errors import ShapeError
from regard.core.functions import with_bound
from regard.core.positions import Positions
from regard.core.shapes import broadcasts, listed, repeat_heads
from regard.core.state import RowStats
from regard.core.tracing import functorch, scripted, untransformed
from regard.core.value import calls_functions_of_others
from regard.masks.algebra import Mask
from regard.runtime.autograd import attend, attend_with_stats
from regard.runtime.dispatch import Explanation, choose, explanation, readable
from regard.scores.algebra import Modifier, Score, Similarity, modified
from regard.scores.elementwise import Elementwise
from regard.scores.fields import number
from regard.scores.similarity import Custom


class BoundCall:
    """The arguments of one call, as tensors and checked as a Problem, and the way back to what the caller has."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        score: Score,
        mask: Mask,
        positions: Positions | None,
        sink: Tensor | float | None,
        dropout: Dropout | None,
        like: Any = None,
    ) -> None:
        self._like = q if like is None else like
        compiling = torch.compiler.is_compiling()
        if compiling or not untransformed((q, k, v)):
            q = arrays.tensor(q, "q")
            if not kept_alike(k, v):
                k, v = arrays.tensor(k, "k"), arrays.tensor(v, "v")
        self._device = q.device.type
        self._autocast = autocast(self._device)
        if self._autocast:
            q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
        with self.precision():
            problem, layout = build_problem(q, k, v, score, mask, positions, dropout)
        if scripted():
            problem = problem.with_tensors(tuple(_of_this_shape(t) for t in problem.tensors()))
        problem = problem if sink is None else replace(problem, sink=_sink(number(sink, "sink"), problem))
        if torch.is_grad_enabled():
            _refuse_hidden_parameters(problem)
            if not compiling and (functorch() or any(t.requires_grad for t in problem.tensors())):
                problem = replace(problem, score=with_bound(problem.score), mask=with_bound(problem.mask))
        self.problem: Problem = problem
        self.layout: Layout = layout

    def precision(self) -> AbstractContextManager[Any]:
        """Sums are kept in the accumulation dtype whatever autocast says."""
        return exact(self._device) if self._autocast else nullcontext()

    def answer(self, result: Tensor) -> Any:
        """A result in the kind of array that the caller has."""
        return result if isinstance(self._like, Tensor) else arrays.answer_like(self._like)(result)

    def output(self, backend: Backend | None) -> Any:
        """What `attention` returns, in the caller's axes, dtype and kind of array."""
        with self.precision():
            return self.answer(self.layout.restore(self.run(backend).to(self.problem.dtype), 2))

    def explain(self, backend: Backend | None) -> Explanation:
        """How `output` would run."""
        return explanation(self.problem, backend, lse=False)

    def run(self, backend: Backend | None) -> Tensor:
        """out (*batch, h, nq, dv) in the accumulation dtype."""
        chosen = choose(self.problem, backend, lse=False)
        return attend(chosen, readable(self.problem, chosen))

    def run_with_stats(self, backend: Backend | None) -> tuple[Tensor, RowStats]:
        """The same, and the statistics of each row, the sink included."""
        chosen = choose(self.problem, backend, lse=True)
        return attend_with_stats(chosen, readable(self.problem, chosen))


def as_autocast(t: Tensor) -> Tensor:
    """As torch's own attention does: under autocast, float tensors take its dtype; float64 stays."""
    device = t.device.type
    if not t.dtype.is_floating_point or t.dtype == torch.float64:
        return t
    if not autocast(device):
        return t
    return t.to(torch.get_autocast_dtype(device))


def _of_this_shape(t: Tensor) -> Tensor:
    """The same tensor in a TorchScript trace, which then raises RuntimeError for one of another shape.

    A trace holds the slices of one length: of a longer input it would leave out the rest.
    """
    # reshape compares how many numbers there are, expand_as compares the axes
    return t.expand_as(t.reshape([int(n) for n in t.shape]))


def _sink(sink: float | Tensor, problem: Problem) -> Tensor:
    """A sink's logits as (*batch, h)."""
    frame = problem.frame
    where = sink.device if isinstance(sink, Tensor) else frame.device
    logit = torch.as_tensor(sink, dtype=problem.accumulate, device=where)
    if logit.device != frame.device:
        raise ValueError(f"sink is on {logit.device}, q on {frame.device}; move it with .to(...).")
    full = (*frame.batch, frame.heads)
    if not broadcasts(logit.shape, full):
        raise ShapeError(f"sink has shape {listed(logit.shape)}; expected a logit a head, ({frame.heads},), or {full}.")
    return logit.expand(full)


def _refuse_hidden_parameters(problem: Problem) -> None:
    """A tensor that requires a gradient, and that code of others reaches by itself, would get none, silently."""
    stages = problem.score.parts
    empty = 0 in problem.q.shape or 0 in problem.k.shape
    if empty or not any(map(_may_hide, stages)):
        return
    at = problem.frame.region(slice(0, 1), slice(0, 1))
    q, k = (t[..., :1, :].detach().to(problem.accumulate) for t in (problem.q, problem.k))
    k = repeat_heads(k, problem.frame.heads)
    score = problem.score.with_tensors(iter([t.detach() for t in problem.score_tensors])).local(at)
    s = q.new_zeros(())
    with torch.enable_grad():
        for stage, part in zip(stages, score.parts, strict=True):
            if isinstance(part, Similarity):
                s = part.compare(q, k, at)
            elif isinstance(part, Modifier):
                s = modified(s, part, at)
            if s.requires_grad:
                raise ValueError(_way_to_show(stage))


def _may_hide(stage: Score) -> bool:
    """Whether a stage is computed by code that is not regard's, and whose tensors nobody has looked for.

    flex_attention finds those of a function of single pairs.
    """
    of_flex = isinstance(stage, Modifier) and stage.of_pair() is not None
    return not of_flex and calls_functions_of_others(stage)


def _way_to_show(stage: Score) -> str:
    """The sentence about a stage that uses a tensor which none of its fields shows."""
    name = type(stage).__name__
    if isinstance(stage, (Custom, Elementwise)):
        return (
            f"score {name}(fn): fn uses a tensor that requires a gradient and that regard cannot see. "
            f"Pass it along: {name}(lambda q, k, w: ..., tensors=(w,))."
        )
    kind = "Similarity" if isinstance(stage, Similarity) else "Modifier"
    return (
        f"score {stage!r} uses a tensor that requires a gradient and that regard cannot see: it would get none. "
        f"Make it a field: @dataclass(frozen=True) class {name}({kind}): w: Tensor. "
        "regard sees tensors, and tuples of them, in fields of frozen dataclasses, not in modules, lists or closures."
    )
