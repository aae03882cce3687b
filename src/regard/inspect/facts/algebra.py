"""What a fact is: a question about the weights, its definition, and how its answer is summed tile by tile.

With s_ij the final score, and m_i and l_i the statistics of its row, a sink included:  p_ij = exp(s_ij - m_i) / l_i.
A pair is visible when its score is not -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from regard.call.problem import Problem
from regard.core.region import Frame, Region
from regard.core.state import RowStats, weigh
from regard.core.value import Value

T = TypeVar("T", covariant=True)
Place = tuple[slice | EllipsisType, ...]


@dataclass(frozen=True, eq=False)
class ScoreTile:
    """One tile of a sweep: its scores (-inf where hidden), its weights (0 where hidden), and their logarithms.

    at: its pairs in the call. rows, cols: their place in the fact's own region, and so in its answer. clean: none of
    its weights is NaN, none of its scores NaN or +inf.
    """

    at: Region
    rows: slice
    cols: slice
    scores: Tensor
    log_p: Tensor
    p: Tensor
    clean: bool

    @property
    def visible(self) -> Tensor:
        return self.scores != -torch.inf


class Accumulator(Generic[T]):
    """The sums of one fact during one sweep."""

    def add(self, tile: ScoreTile) -> None:
        """Adds one tile. Every visible pair of the fact's region comes exactly once."""
        raise NotImplementedError

    def finish(self) -> T:
        """The fact, after the last tile."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fact(Value, Generic[T]):
    """A question about the weights of one call. Answers have the axes (*batch, h, ...), in the accumulation dtype.

    A fact of your own is a frozen dataclass with `accumulator`, and with `dense`, the definition that tests compare it
    with.

    >>> import regard as rg
    >>> @dataclass(frozen=True)
    ... class Squares(Fact[Tensor]):                       # Σ_j p_ij²
    ...     def accumulator(self, problem, stats):
    ...         return Sum(room(problem, problem.frame.nq), by_row, lambda tile: tile.p.square().sum(-1))
    ...     def dense(self, problem, scores, p):
    ...         return p.square().sum(-1)
    >>> x = torch.zeros(4, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(Squares(),))[Squares()]
    tensor([1.0000, 0.5000, 0.3333, 0.2500])
    """

    def __new__(cls, *given: Any, **named: Any) -> Fact[T]:
        """TypeError where queries and keys come, which a fact does not take."""
        if len(given) > len(cls.__dataclass_fields__) and all(isinstance(x, Tensor) for x in given[:2]):
            name = cls.__name__
            raise TypeError(f"{name} takes no queries and keys; they are look's: rg.look(q, k, facts=({name}(),)).")
        return super().__new__(cls)

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[T]:
        """A fresh Accumulator for a problem whose row statistics (*batch, h, nq) are known."""
        raise NotImplementedError(f"{type(self).__name__} does not define accumulator(problem, stats).")

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> T:
        """The definition, from all scores (-inf where hidden, before the sink) and weights (*batch, h, nq, nk)."""
        raise NotImplementedError(f"{type(self).__name__} does not define dense(problem, scores, p).")

    def region(self, frame: Frame) -> Region:
        """The pairs that must be swept. IndexError where some do not exist."""
        return frame.region()

    def parts(self) -> tuple[Fact[Any], ...]:
        """The facts that are accumulated for this one."""
        return (self,)

    def join(self, *answers: Any) -> T:
        """The answer from those of the parts."""
        return answers[0]

    def compares_positions(self) -> bool:
        """Whether the answer depends on the positions of queries and keys."""
        return False

    def shape_error(self, frame: Frame) -> str | None:
        """Why this fact does not fit a call of that size, as a sentence; None if it does."""
        return None


MOST_OF_FEW_KEYS = 1 << 16  # numbers that an answer may have for each query, where there are fewer keys


def room(problem: Problem, *shape: int, fill: float = 0, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor (*batch, h, *shape) filled with one number, in the accumulation dtype unless another is passed."""
    lead = problem.q.shape[:-2]
    return torch.full((*lead, *shape), fill, dtype=dtype or problem.accumulate, device=problem.q.device)


def by_row(tile: ScoreTile) -> Place:
    """The place of a tile's rows in (*batch, h, nq)."""
    return (..., tile.rows)


def by_row_of_many(tile: ScoreTile) -> Place:
    """Where a tile's rows lie in (*batch, h, nq, m)."""
    return (..., tile.rows, slice(None))


def by_key(tile: ScoreTile) -> Place:
    """The place of a tile's keys in (*batch, h, nk)."""
    return (..., tile.cols)


class Sum(Accumulator[Tensor]):
    """Adds `share` of every tile at its `place`: long sums have two levels, within a tile and over tiles."""

    def __init__(
        self, total: Tensor, place: Callable[[ScoreTile], Place], share: Callable[[ScoreTile], Tensor]
    ) -> None:
        self.total, self.place, self.share = total, place, share

    def add(self, tile: ScoreTile) -> None:
        self.total[self.place(tile)] += self.share(tile)

    def finish(self) -> Tensor:
        return self.total


def sum_keys(x: Tensor, member: Tensor, clean: bool) -> Tensor:
    """Σ_j x_ij m_jc: (..., r, c) and (..., c, cells) -> (..., r, cells). What m leaves out by a 0 adds nothing."""
    return weigh(member.mT, x.mT, None if clean else member.mT != 0).mT


def sum_rows(x: Tensor, member: Tensor, clean: bool) -> Tensor:
    """Σ_i m_ia x_ij: (..., r, c) and (..., r, cells) -> (..., cells, c). What m leaves out by a 0 adds nothing."""
    return weigh(member.mT, x, None if clean else member.mT != 0)
