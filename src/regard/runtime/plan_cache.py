"""The cache of plans: calls of a structure seen before skip all but the kernel, forward and backward.

outline.py says what a structure is. Kept are the plans that a backend makes (see Backend.plan). They serve no
transforms; with gradients they are TrainingPlans, which find those of q, k, v and of tensors of the score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from regard.backends.base import Backend, Example, ForwardResult, Plan, PlanInputs, TrainingPlan
from regard.backends.native.direct import direct, shortcut
from regard.backends.native.ragged import RaggedPlan
from regard.core.deferred import DeferredRows
from regard.core.dropout import Dropout, undrawn
from regard.core.functions import with_bound
from regard.core.int8_rows import Int8Rows
from regard.core.positions import Positions
from regard.core.shapes import with_head_axis
from regard.core.state import RowStats
from regard.core.tracing import unseen_by_hooks, watched
from regard.masks.algebra import Mask
from regard.runtime.autograd import BackwardInputs, apply_untransformed, differentiable_backward
from regard.runtime.binding import BoundCall
from regard.runtime.dispatch import choose, readable
from regard.runtime.outline import AttentionArguments, Leaves, Structure, structure_of
from regard.scores.algebra import Score, Similarity

_MOST = 256  # structures kept
_plans: dict[Any, _Known | _ByLength | RaggedPlan | None] = {}  # ragged ones by the keys of one_list.py
_shortcut: Callable[..., Any] | None = None  # serves calls of remembered plans, once there is one
_UNSEEN: Any = object()


@dataclass(frozen=True, eq=False)
class _Known:
    """A structure that has a plan. prepares: whether the similarity does something to q and k before."""

    plan: Plan | TrainingPlan
    prepares: bool


class _Seed:
    """Dropout whose seed is drawn when a plan asks for it: not for a call that is refused, or runs without a plan."""

    def __init__(self, dropout: Dropout) -> None:
        self.dropout = dropout

    def __call__(self) -> int:
        self.dropout = self.dropout.seeded()
        return cast(int, self.dropout.seed) & (2**64 - 1)


class _ByLength(dict[tuple[int, int], "_Known | None"]):
    """A structure that has a plan for each number of queries and keys."""


def attend(
    q: Any,
    k: Any,
    v: Any,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Any,
    dropout: Dropout | None,
    backend: Backend | None,
) -> Tensor | None:
    """The output of a call whose structure has a plan; None where the call must run without a plan."""
    # in this order: a graph that has read `_shortcut` would be made anew once there is one
    if not is_compiling() and _shortcut is not None and dropout is None and backend is None:
        found = _shortcut(q, k, v, score, mask, positions, sink)
        if type(found) is Tensor:
            return found
        if found is not None:
            plan, out, row_stats, kernel, read = found
            arguments = AttentionArguments(None, None, None, score, mask, positions, sink, None)
            return _record(plan, ForwardResult(out, (row_stats,), kernel), arguments, None, (q, k, v, *read))
    described = structure_of(q, k, v, score, mask, positions, sink, dropout, backend)
    if described is None:
        return None
    structure, leaves = described
    arguments = AttentionArguments(q, k, v, score, mask, positions, sink, dropout)
    found = _plan_for(structure, arguments, leaves)
    if found is None:
        return None
    known, call = found
    if structure.needs is None:
        plan = cast(Plan, known.plan)
        out = plan.run(call)
        if out is not None and not known.prepares and backend is None:
            plan.remember(call, score, sink, structure.outlines)
        return out
    plan = cast(TrainingPlan, known.plan)
    forward = plan.run_for_backward(call)
    if forward is None:
        return None
    if not known.prepares and call.seed is None and backend is None:
        plan.remember(call, score, sink, structure.outlines)
    # what the backward does not save: q and k from before they were prepared
    before = tuple(t.detach() for t in (q, k)) if known.prepares else (None, None)
    drawn = None if call.seed is None else cast(_Seed, call.seed).dropout
    bound = with_bound(score), with_bound(mask)  # a second derivative computes the scores again
    arguments = AttentionArguments(before[0], before[1], None, *bound, positions, sink, drawn)
    return _record(plan, forward, arguments, backend, (call.q, call.k, call.v, *leaves))


def attend_with_stats(arguments: AttentionArguments, backend: Backend | None) -> tuple[Tensor, RowStats] | None:
    """The same in the accumulation dtype, with the statistics of each row; None where there are gradients too."""
    described = structure_of(*arguments, backend)
    if described is None or described[0].needs is not None:
        return None
    structure, leaves = described
    found = _plan_for(structure._replace(stats=True), arguments, leaves)
    return None if found is None else cast(TrainingPlan, found[0].plan).run_with_stats(found[1])


def _plan_for(structure: Structure, arguments: AttentionArguments, leaves: Leaves) -> tuple[_Known, PlanInputs] | None:
    """The plan of a structure, made where there is none yet, and what it runs; None where there can be none."""
    known: Any = _plans.get(structure, _UNSEEN)
    if isinstance(known, _ByLength):
        known = known.get((leaves.nq, leaves.nk), _UNSEEN)
    if known is None:
        return None
    q, k, v, score, mask, positions, _, dropout = arguments
    seed = None if dropout is None or dropout.p == 0 else _Seed(dropout)
    if known is _UNSEEN:
        known = _learn(structure, arguments, leaves)
        if known is None:
            return None
    if known.prepares:
        q, k = cast(Similarity, score.stages[0]).prepare(with_head_axis(q), with_head_axis(k))
    return known, PlanInputs(q, k, v, leaves, leaves.nq, leaves.nk, mask, positions, seed)


def _record(
    plan: TrainingPlan,
    forward: ForwardResult,
    arguments: AttentionArguments,
    backend: Backend | None,
    tensors: tuple[Tensor, ...],
) -> Tensor:
    """The output of a call that a plan made, with its gradients."""
    out = forward.out.to(tensors[2].dtype)
    positions = arguments.positions
    if positions is not None and positions.span is None:  # autograd notices when they are changed before the backward
        tensors = (*tensors, *positions.tensors())
    planned, saved = _Planned(plan, forward, arguments, backend, tensors), (forward.out, *forward.saved)
    (recorded,) = apply_untransformed(planned, (out,), saved, *tensors)  # plans serve no transforms
    return recorded


def ragged_plan(key: Any) -> RaggedPlan | None:
    """A plan for ragged sequences that was kept."""
    return cast("RaggedPlan | None", _plans.get(key))


def keep(key: Any, known: _Known | _ByLength | RaggedPlan | None) -> None:
    """Keeps a plan, or that there is none; in the place of all others where they are many."""
    if len(_plans) >= _MOST:
        clear()
    _plans[key] = known


def plans() -> list[Plan | TrainingPlan | RaggedPlan]:
    """Every plan that is kept."""
    kept = list(_plans.values())  # at once: another thread may add one
    found = (list(known.values()) if isinstance(known, _ByLength) else [known] for known in kept)
    return [known.plan if isinstance(known, _Known) else known for each in found for known in each if known is not None]


def clear() -> None:
    """Forgets all plans."""
    _plans.clear()
    if _shortcut is not None:
        direct().forget()


def _learn(structure: Structure, arguments: AttentionArguments, leaves: Leaves) -> _Known | None:
    """Makes the plan of a structure, and keeps it; None is kept too."""
    fixed = arguments if arguments.dropout is None else arguments._replace(dropout=undrawn(arguments.dropout))
    with unseen_by_hooks():  # they would see the preparation of q and k, which is of no call
        known = _planned(BoundCall(*fixed), arguments, leaves, structure)
    if known is not None:
        global _shortcut
        _shortcut = shortcut()
    if known is None or not known.plan.of_lengths:
        keep(structure, known)
        return known
    found = _plans.get(structure)
    if not isinstance(found, _ByLength):  # another thread may have found no plan for another length
        found = _ByLength()
        keep(structure, found)
    if len(found) >= _MOST:
        found.clear()
    found[leaves.nq, leaves.nk] = known
    return known


def _planned(call: BoundCall, arguments: AttentionArguments, leaves: Leaves, structure: Structure) -> _Known | None:
    """The plan of the structure of a call; None where there can be none."""
    problem, (q, k, v) = call.problem, arguments[:3]
    frame, similarity = problem.frame, problem.similarity
    prepares = similarity.prepares()
    if prepares and (isinstance(k, Int8Rows) or any(with_head_axis(t).shape[:-3] != frame.batch for t in (q, k))):
        return None
    q, k = (problem.q, problem.k) if prepares else (q, k)
    with torch.no_grad():
        backend = choose(problem, structure.backend, lse=False)
        needs = tuple(structure.needs is not None and t.requires_grad for t in (q, k, v, *leaves))
        if readable(problem, backend) is not problem or (True in needs and isinstance(k, DeferredRows)):
            return None  # what is written out, each call writes out
        shape = *frame.batch, frame.heads, frame.nq, problem.dv
        out = call.layout.restore(torch.empty(shape, dtype=problem.v.dtype, device=frame.device), 2)
        spent = len(similarity.tensors()) if prepares else 0
        of_pairs = frozenset(leaves.of_pairs)
        example = Example(problem, (q, k, v), tuple(leaves), of_pairs, spent, needs, out, arguments.positions)
        plan = backend.plan(example, training=structure.stats or structure.needs is not None)
    return None if plan is None else _Known(plan, prepares)


class _Planned:
    """A call that a plan made, to autograd."""

    def __init__(
        self,
        plan: TrainingPlan,
        forward: ForwardResult,
        arguments: AttentionArguments,
        backend: Backend | None,
        tensors: tuple[Tensor, ...],
    ) -> None:
        self.plan, self.kernel, self.arguments, self.backend = plan, forward.kernel, arguments, backend
        self.strides = [t.stride() for t in tensors[3:]]

    def constants(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ()

    def backward_of_saved(
        self, saved: tuple[Tensor, ...], cotangents: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...] | None:
        if self.strides and ([t.stride() for t in saved[3:-2]] != self.strides or self._moved(saved[:-2])):
            return None
        found = self.plan.backward_of_saved(self.kernel, saved, cotangents[0])
        return None if found is None else self._of_all(found)

    def backward(self, given: BackwardInputs) -> tuple[Tensor | None, ...]:
        if watched() or self._moved(given.tensors):  # who watches sees no kernel
            return self._by_operations(given)
        q, k, v, *leaves = given.tensors
        if [t.stride() for t in leaves] != self.strides:  # hooks on what is saved have laid it out anew
            leaves = list(map(_laid, leaves, self.strides))
        out, *saved = given.saved
        forward = ForwardResult(out, tuple(saved), self.kernel)
        found = self.plan.backward(forward, (q, k, v), leaves, given.cotangents[0])
        return self._by_operations(given) if found is None else self._of_all(found)

    def _moved(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether hooks gave copies of the positions for those which the call's struct and frame still read."""
        places = self.arguments.positions
        if places is None or places.span is not None:
            return False
        return any(a.data_ptr() != b.data_ptr() for a, b in zip(tensors[-2:], places.tensors(), strict=True))

    def _of_all(self, found: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and the leaves; positions, which may follow them, have none."""
        return *found, *(None,) * (3 + len(self.strides) - len(found))

    def _by_operations(self, given: BackwardInputs) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            return self.differentiable(given)

    def differentiable(self, given: BackwardInputs) -> tuple[Tensor | None, ...]:
        (q, k, v, *_), needs = given.tensors, given.needs
        # the gradients are those of what the similarity prepared
        prepares = self.arguments.q is not None
        arguments = self.arguments if prepares else self.arguments._replace(q=q, k=k)
        places = arguments.positions
        if places is not None and places.span is None:  # as they were saved: the caller's may have changed since
            arguments = arguments._replace(positions=places.with_tensors(iter(given.tensors[-2:])))
        call = BoundCall(*arguments._replace(v=v))
        problem = replace(call.problem, q=q, k=k) if prepares else call.problem
        frame = problem.frame
        g_out = given.cotangents[0].to(problem.accumulate)
        g_out = g_out.reshape(*frame.batch, frame.heads, frame.nq, problem.dv)
        every = (*needs, *(False for _ in problem.tensors()[len(needs) :]))
        with call.precision():
            found = differentiable_backward(choose(problem, self.backend, lse=False), problem, (g_out, None), every)
        shaped = (None if g is None else g.reshape(t.shape) for g, t in zip(found, (q, k, v), strict=False))
        return (*shaped, *found[3 : len(needs)])


def _laid(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    if t.stride() == strides:
        return t
    once = t[tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)]  # of what was expanded
    return torch.empty_strided(once.shape, strides, dtype=t.dtype, device="cpu").copy_(once).expand(t.shape)
