"""Backend: where a problem runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from regard.backends.streaming.backward import Cotangents, backward
from regard.backends.streaming.tiling import Size, stream
from regard.call.of_pairs import check_of_pairs
from regard.call.problem import Problem
from regard.core.positions import Positions
from regard.core.state import RowStats
from regard.core.tracing import data_unavailable, symbolic
from regard.core.value import Value
from regard.core.vjp import vjp
from regard.masks.algebra import Mask
from regard.scores.algebra import Score

Result = tuple[Tensor, Tensor]  # out (*batch, h, nq, dv) and lse (*batch, h, nq), in the accumulation dtype
Differentiable = tuple[Tensor, RowStats]


@dataclass(frozen=True, eq=False)
class Example:
    """One of many calls of a structure, for which a backend makes a plan.

    given      q and k as the similarity prepared them, and v: in the caller's axes where they are the caller's
    leaves     the tensors of the score, the mask and the sink; the similarity has used up the first `spent` to prepare
               q and k, unless the kernels read them too
    of_pairs   which of the leaves have axes of queries and keys, of other sizes in other calls: each tells the plan how
               they lie
    needs      which of `given` and `leaves` have gradients
    out        like what the caller gets
    positions  as the caller gave them
    """

    problem: Problem
    given: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    of_pairs: frozenset[int]
    spent: int
    needs: tuple[bool, ...]
    out: Tensor
    positions: Positions | None


class PlanInputs(NamedTuple):
    """What differs between the calls of a structure.

    q and k as the similarity prepared them, v and the leaves, as in Example; how many queries and keys there are; the
    mask and the positions of the caller; what draws the seed of dropout, once, or None without.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    leaves: Sequence[Tensor]
    nq: int
    nk: int
    mask: Mask
    positions: Positions | None
    seed: Callable[[], int] | None


class ForwardResult(NamedTuple):
    """What the forward of a call leaves to its backward.

    out     in the accumulation dtype: (*batch, h, nq, dv), of a plan in the caller's shape
    saved   the statistics of rows, and what else the backward reads: autograd keeps them, with out and the call's own
    kernel  what is kept besides, for the same backend or plan; it leads to none of these tensors
    """

    out: Tensor
    saved: tuple[Tensor, ...]
    kernel: Any = None


class Plan(Protocol):
    """A way to make all calls of one structure without looking at each anew."""

    of_lengths: bool  # whether it serves one number of queries and of keys only

    def run(self, call: PlanInputs) -> Tensor | None:
        """out, in the caller's shape and dtype; None where the call must run without a plan."""
        ...

    def remember(self, call: PlanInputs, score: Score, sink: Tensor | float | None, outlines: tuple[Any, ...]) -> None:
        """Registers a call that ran, with the outlines of score, mask and sink: they may then take a shorter way."""
        ...


class TrainingPlan(Protocol):
    """One for calls that will be differentiated, or whose row statistics are wanted."""

    of_lengths: bool

    def remember(self, call: PlanInputs, score: Score, sink: Tensor | float | None, outlines: tuple[Any, ...]) -> None:
        """As Plan.remember."""
        ...

    def run_for_backward(self, call: PlanInputs) -> ForwardResult | None:
        """The call, made; None where it must run without a plan."""
        ...

    def run_with_stats(self, call: PlanInputs) -> Differentiable | None:
        """out, in the caller's shape, and the statistics of its rows, in the accumulation dtype; None as above."""
        ...

    def backward(
        self, forward: ForwardResult, given: Sequence[Tensor], leaves: Sequence[Tensor], g_out: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients of what is given and of the leaves, from what the forward gave and the cotangent of out.

        None where they must be found by operations that autograd records.
        """
        ...

    def backward_of_saved(
        self, kernel: Any, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        """The same in fewer steps; None where `backward` has to find them. saved: given, leaves, out, row_stats."""
        ...


@dataclass(frozen=True)
class Backend(Value):
    """Where a problem runs: a value, so `backend=Tiled()` names it.

    A subclass defines `why_not` and `forward`. Backward streams over tiles, unless it defines a better one or says
    `recorded = True`: its forward is then made of operations that autograd records. `visible = False`: it computes by
    something else than operations of torch's, so where a TorchDispatchMode watches, `traced` runs instead.
    `calls_again = False`: its backward does not call the functions of scores and masks again.
    """

    recorded: ClassVar[bool] = False
    visible: ClassVar[bool] = True
    calls_again: ClassVar[bool] = True

    @property
    def size(self) -> Size:
        """The tiles of what is streamed."""
        return Size()

    def why_not(self, problem: Problem, lse: bool) -> str | None:
        """Why this backend cannot run the call exactly, as a clause; None if it can. `lse`: that is wanted too."""
        return None

    def forward(self, problem: Problem) -> Result:
        """(out, lse). Where the caller did not want the lse it may hold anything."""
        raise NotImplementedError

    def forward_for_backward(self, problem: Problem) -> ForwardResult:
        """The forward of a call that will be differentiated, or whose row statistics are wanted."""
        out, lse = self.forward(problem)
        stats = RowStats.of_lse(lse)
        return ForwardResult(out, (stats.m, stats.l))

    def row_stats(self, forward: ForwardResult) -> RowStats:
        """The statistics of each row, from what `forward_for_backward` returned."""
        return RowStats(*forward.saved)

    def backward(
        self, problem: Problem, forward: ForwardResult, cotangents: Cotangents, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of problem.tensors() for which `needs` is true, None for the rest."""
        return backward(problem, forward.out, self.row_stats(forward), cotangents, needs, self.size)

    def differentiable(self, problem: Problem) -> Differentiable:
        """out and the row statistics, by operations that autograd, forward mode and torch.func see, to any order."""
        if not symbolic(problem.frame.nq, problem.frame.nk):
            check_of_pairs(problem, *self.size.settled(problem))
        return stream(problem, self.size)

    def traced(self, problem: Problem) -> Differentiable:
        """The same for the graph of a compiler, which may not look at values."""
        return self.differentiable(problem)

    def plan(self, example: Example, training: bool) -> Plan | TrainingPlan | None:
        """A plan for all calls like the example; None where each needs a look. training: a TrainingPlan."""
        return None

    def why_gathers(self, problem: Problem) -> str | None:
        """Why keys and values that are kept in another form (pages, int8) are written out for this backend, as a
        clause; None if it reads that form.
        """
        return "it reads contiguous keys and values"

    def details(self, problem: Problem) -> dict[str, str]:
        """What `explain` says of a call that runs here: a phrase for each heading."""
        return {}


def recorded_backward(
    run: Callable[[Problem], Result], problem: Problem, cotangents: Cotangents, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients through a forward that autograd records, by running it again."""
    tensors = tuple(t.detach().requires_grad_(need) for t, need in zip(problem.tensors(), needs, strict=True))
    with torch.enable_grad():
        results = run(problem.with_tensors(tensors))
    recorded = [
        (t, g.to(t.dtype)) for t, g in zip(results, cotangents, strict=True) if t.requires_grad and g is not None
    ]
    wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
    outputs, grads = zip(*recorded, strict=True)
    found = iter(vjp(outputs, wanted, grads))
    return tuple(next(found) if need else None for need in needs)


def why_leaks(tensors: tuple[Tensor, ...], accumulate: torch.dtype) -> str | None:
    """Why functions of torch that multiply what is hidden by 0 cannot run a call of q, k and v; None where all numbers
    are finite."""
    if data_unavailable(*tensors):
        return "it lets what is not finite leak out of masked places, and in a graph nobody can look for it"
    sums = [t.detach().sum(dtype=accumulate) for t in tensors]  # on a GPU: what is waited for once
    if bool(torch.stack(sums).isfinite().all()) or all(bool(t.isfinite().all()) for t in tensors):
        return None
    return "it lets what is not finite leak out of masked places"
