"""Facts about each key: how much it is read, and by how many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.call.problem import Problem
from regard.core.region import Frame, Region
from regard.core.shapes import listed
from regard.core.state import RowStats
from regard.core.value import Value
from regard.inspect.facts.algebra import Accumulator, Fact, ScoreTile, Sum, by_key, room, sum_rows


@dataclass(frozen=True)
class Readers(Fact[Tensor]):
    """The number of queries that may see each key, int64 (*batch, h, nk).

    >>> import regard as rg
    >>> x = torch.zeros(4, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(Readers(),))[Readers()]
    tensor([4, 3, 2, 1])
    """

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        total = room(problem, problem.frame.nk, dtype=torch.int64)
        return Sum(total, by_key, lambda tile: tile.visible.sum(-2))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        return (scores > -math.inf).sum(-2)


@dataclass(frozen=True)
class Last(Value):
    """The last `count` queries of a call, by index. Made by Received.last."""

    count: int


@dataclass(frozen=True)
class Received(Fact[Tensor]):
    """Σ_i w_i p_ij: the mass that each key receives from all queries, (*batch, h, nk).

    weights: None (every w_i = 1), a tensor (nq,) or one that broadcasts to (*batch, h, nq). `Received.last(w)` counts
    the last w queries only, and sweeps only these. Raises TypeError for weights that are not floating point or
    integers, ShapeError where they do not fit the call.
    Source: Zhang et al. 2023, H2O (arXiv 2306.14048); the last rows: Li et al. 2024, SnapKV (arXiv 2404.14469).

    >>> import regard as rg
    >>> x = torch.zeros(2, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(Received(),))[Received()]
    tensor([1.5000, 0.5000])
    """

    weights: Tensor | Last | None = None

    def __post_init__(self) -> None:
        if self.weights is None or isinstance(self.weights, Last):
            return
        expected = "a number a query, (nq,) or (*batch, h, nq)"
        object.__setattr__(self, "weights", numbers(self.weights, "Received.weights", expected))

    @staticmethod
    def last(count: int) -> Received:
        """The mass that each key receives from the last `count` queries, or from all where there are no more.

        >>> import regard as rg
        >>> x = torch.zeros(4, 8)
        >>> rg.look(x, x, mask=rg.Causal(), facts=(Received.last(1),))[Received.last(1)]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
        """
        count = arrays.whole_number(count, "Received.last: count")
        if count < 1:
            raise ValueError(f"Received.last({count}): expected 1 query or more.")
        return Received(Last(count))

    def region(self, frame: Frame) -> Region:
        if not isinstance(self.weights, Last):
            return frame.region()
        return frame.region(
            torch.arange(max(frame.nq - self.weights.count, 0), frame.nq, device=frame.device, dtype=torch.int64)
        )

    def shape_error(self, frame: Frame) -> str | None:
        if not isinstance(self.weights, Tensor):
            return None
        return numbers_error(self.weights, "Received.weights", frame, frame.nq)

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        total = room(problem, problem.frame.nk)
        if not isinstance(self.weights, Tensor):
            return Sum(total, by_key, lambda tile: tile.p.sum(-2))
        weights = placed(self.weights, problem)

        def share(tile: ScoreTile) -> Tensor:
            return sum_rows(tile.p, weights[..., tile.at.rows, None], tile.clean)[..., 0, :]

        return Sum(total, by_key, share)

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        if isinstance(self.weights, Last):
            return p[..., max(p.shape[-2] - self.weights.count, 0) :, :].sum(-2)
        return p.sum(-2) if self.weights is None else (p * placed(self.weights, problem)[..., None]).sum(-2)


def numbers(given: Any, argument: str, expected: str) -> Tensor:
    """A number for each query or key, for all heads or for each, as a tensor; TypeError, naming the argument."""
    found = arrays.tensor(given, argument)
    if found.dtype == torch.bool or found.dtype.is_complex or found.dim() == 0:
        got = f"dtype {found.dtype}, shape {listed(found.shape)}"
        raise TypeError(f"{argument} has {got}; expected {expected}.")
    return found


def numbers_error(given: Tensor, argument: str, frame: Frame, n: int) -> str | None:
    """Why `numbers` do not fit the n queries or keys of a call, as a sentence; None if they do."""
    shape = tuple(given.shape)
    full = (*frame.batch, frame.heads, n) if frame.headed else (*frame.batch, n)
    fits = all(a in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False))
    if fits and shape[-1] == n and len(shape) <= len(full):
        return None
    return f"{argument} has shape {listed(shape)}; expected ({n},), or one that broadcasts to {full}."


def placed(given: Tensor, problem: Problem) -> Tensor:
    """`numbers` of queries or keys that broadcast to (*batch, h, nq) or (*batch, h, nk)."""
    given = given.to(problem.q.device, problem.accumulate)
    return given if problem.frame.headed or given.dim() < 2 else given.unsqueeze(-2)


@dataclass(frozen=True)
class MeanReceived(Fact[Tensor]):
    """Σ_i p_ij over the number of queries that may see the key, (*batch, h, nk); 0 where none may.

    >>> import regard as rg
    >>> x = torch.zeros(2, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(MeanReceived(),))[MeanReceived()]
    tensor([0.7500, 0.5000])
    """

    def parts(self) -> tuple[Fact[Any], ...]:
        return Received(), Readers()

    def join(self, *answers: Tensor) -> Tensor:
        received, readers = answers
        return received / readers.clamp(min=1)

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        return p.sum(-2) / (scores > -math.inf).sum(-2).clamp(min=1)


@dataclass(frozen=True)
class MaxReceived(Fact[Tensor]):
    """max_i p_ij: the largest weight of any query on each key, (*batch, h, nk); 0 if no query may see it.

    >>> import regard as rg
    >>> x = torch.zeros(2, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(MaxReceived(),))[MaxReceived()]
    tensor([1.0000, 0.5000])
    """

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        return _MostAccumulator(room(problem, problem.frame.nk))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        nothing = p.new_zeros(*p.shape[:-2], 1, p.shape[-1])  # a query that gives nothing stands before the first
        return torch.cat([nothing, p], -2).amax(-2)


class _MostAccumulator(Accumulator[Tensor]):
    def __init__(self, most: Tensor) -> None:
        self.most = most

    def add(self, tile: ScoreTile) -> None:
        most = self.most[..., tile.cols]
        most.copy_(torch.maximum(most, tile.p.amax(-2)))

    def finish(self) -> Tensor:
        return self.most
