"""Facts pooled over pairs: maps of weights and of scores, and the histogram of weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.call.problem import Problem
from regard.core.arrays import whole_number
from regard.core.state import RowStats
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.inspect.facts.algebra import Accumulator, Fact, ScoreTile, room, sum_keys, sum_rows


@dataclass(frozen=True)
class Cells:
    """n tokens divided evenly into `count` cells: token i belongs to cell i · count // n. No more cells than tokens."""

    n: int
    count: int

    @staticmethod
    def of(n: int, wanted: int) -> Cells:
        return Cells(n, min(n, wanted))

    def touched(self, tokens: slice) -> slice:
        """The cells of a run of tokens."""
        return slice(tokens.start * self.count // self.n, (tokens.stop - 1) * self.count // self.n + 1)

    def index(self, tokens: slice, device: torch.device) -> Tensor:
        """Which of the touched cells each token of a run is in, (tokens,)."""
        return (
            torch.arange(tokens.start, tokens.stop, device=device, dtype=torch.int64) * self.count // self.n
            - self.touched(tokens).start
        )

    def members(self, tokens: slice, like: Tensor) -> Tensor:
        """1 where a token of a run is in a touched cell, 0 elsewhere, (tokens, cells)."""
        cells = self.touched(tokens)
        numbers = torch.arange(cells.stop - cells.start, device=like.device, dtype=torch.int64)
        return (self.index(tokens, like.device)[:, None] == numbers).to(like.dtype)

    def tokens(self, cell: int) -> slice:
        """The tokens of one cell."""
        return slice(-(-cell * self.n // self.count), -(-(cell + 1) * self.n // self.count))

    def pooled(self, x: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
        """reduce(the tokens of each cell, -1), along the last axis: (..., n) -> (..., cells)."""
        parts = [reduce(x[..., self.tokens(cell)], -1) for cell in range(self.count)]
        return torch.stack(parts, -1) if parts else x


@answers_wrong_calls({**dict.fromkeys(("size", "cells"), "write rows= and cols=")})
@dataclass(frozen=True)
class Map(Fact[Tensor]):
    """The weights pooled to rows × cols cells, (*batch, h, rows, cols): at most one cell a query and a key.

    Cell (a, b) is the mean, over the queries of a that see anything, of the mass on the keys of b; so each pooled row
    sums to 1 where there is no sink, and to 0 where its queries see nothing. Query i belongs to row i · rows // nq, key
    j to column j · cols // nk. Raises ValueError for less than 1 cell each way.

    >>> import regard as rg
    >>> x = torch.zeros(4, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(Map(2, 2),))[Map(2, 2)]
    tensor([[1.0000, 0.0000],
            [0.5833, 0.4167]])
    """

    rows: int = 64
    cols: int = 64

    def __post_init__(self) -> None:
        _check_cells(self)

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        return _MapAccumulator(problem, stats, *_cells(self, problem))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        rows, cols = _cells(self, problem)
        seeing = rows.pooled((scores > -math.inf).any(-1), torch.sum).clamp(min=1)
        return _pooled(p, rows, cols, torch.sum) / seeing[..., None]


def _check_cells(fact: Map | ScoreMap) -> None:
    name = type(fact).__name__
    rows, cols = (whole_number(getattr(fact, axis), f"{name}.{axis}") for axis in ("rows", "cols"))
    if rows < 1 or cols < 1:
        raise ValueError(f"{name}(rows={fact.rows}, cols={fact.cols}): expected 1 cell or more each way.")


def _cells(fact: Map | ScoreMap, problem: Problem) -> tuple[Cells, Cells]:
    return Cells.of(problem.frame.nq, fact.rows), Cells.of(problem.frame.nk, fact.cols)


def _pooled(x: Tensor, rows: Cells, cols: Cells, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A number for each cell, of pairs (..., nq, nk): (..., rows, cols)."""
    return rows.pooled(cols.pooled(x, reduce).mT, reduce).mT


class _MapAccumulator(Accumulator[Tensor]):
    def __init__(self, problem: Problem, stats: RowStats, rows: Cells, cols: Cells) -> None:
        self.total = room(problem, rows.count, cols.count)
        self.rows, self.cols = rows, cols
        # with a sink every row has some mass; without one, the mass tells which rows see something
        self.unknown = problem.sink is not None
        self.sees = ~stats.empty & (not self.unknown)

    def add(self, tile: ScoreTile) -> None:
        rows, cols = self.rows.touched(tile.rows), self.cols.touched(tile.cols)
        pooled = sum_keys(tile.p, self.cols.members(tile.cols, tile.p), tile.clean)
        self.total[..., rows, cols] += sum_rows(pooled, self.rows.members(tile.rows, tile.p), tile.clean)
        if self.unknown:
            self.sees[..., tile.rows] |= tile.visible.any(-1)

    def finish(self) -> Tensor:
        cell_of = (
            torch.arange(self.rows.n, device=self.total.device, dtype=torch.int64)
            * self.rows.count
            // max(self.rows.n, 1)
        )
        size = self.total.new_zeros(*self.sees.shape[:-1], self.rows.count)
        size.index_add_(-1, cell_of, self.sees.to(size.dtype))
        return self.total / size.clamp(min=1)[..., None]


class ScoreCells(NamedTuple):
    """The mean and largest score of each cell's visible pairs, (*batch, h, rows, cols); NaN and -inf of no pair."""

    mean: Tensor
    most: Tensor


@dataclass(frozen=True)
class ScoreMap(Fact[ScoreCells]):
    """The scores of visible pairs pooled to rows × cols cells, before sinks: ScoreCells of (*batch, h, rows, cols).

    Cells as those of Map. A cell without a visible pair has the mean NaN and the largest score -inf. Raises ValueError
    for less than 1 cell each way.

    >>> import regard as rg
    >>> q, k = torch.ones(2, 1), torch.tensor([[1.0], [3.0]])
    >>> rg.look(q, k, score=rg.Dot(), mask=rg.Causal(), facts=(ScoreMap(2, 1),))[ScoreMap(2, 1)]
    ScoreCells(mean=tensor([[1.],
            [2.]]), most=tensor([[1.],
            [3.]]))
    """

    rows: int = 64
    cols: int = 64

    def __post_init__(self) -> None:
        _check_cells(self)

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[ScoreCells]:
        return _ScoreAccumulator(problem, *_cells(self, problem))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> ScoreCells:
        rows, cols = _cells(self, problem)
        seen = scores != -math.inf
        total = _pooled(scores.masked_fill(~seen, 0), rows, cols, torch.sum)
        return ScoreCells(total / _pooled(seen, rows, cols, torch.sum), _pooled(scores, rows, cols, torch.amax))


class _ScoreAccumulator(Accumulator[ScoreCells]):
    def __init__(self, problem: Problem, rows: Cells, cols: Cells) -> None:
        self.rows, self.cols = rows, cols
        self.total, self.count = (room(problem, rows.count, cols.count) for _ in range(2))
        self.most = room(problem, rows.count, cols.count, fill=-math.inf)

    def add(self, tile: ScoreTile) -> None:
        s, here = tile.scores, (..., self.rows.touched(tile.rows), self.cols.touched(tile.cols))
        rows, cols = self.rows.members(tile.rows, s), self.cols.members(tile.cols, s)
        seen = tile.visible
        self.count[here] += rows.mT @ (seen.to(s.dtype) @ cols)
        self.total[here] += sum_rows(sum_keys(s.masked_fill(~seen, 0), cols, tile.clean), rows, tile.clean)
        by_column = _largest(s, self.cols.index(tile.cols, s.device), cols.shape[-1])
        most = _largest(by_column.mT, self.rows.index(tile.rows, s.device), rows.shape[-1]).mT
        self.most[here] = torch.maximum(self.most[here], most)

    def finish(self) -> ScoreCells:
        return ScoreCells((self.total / self.count).masked_fill(self.count == 0, math.nan), self.most)


def _largest(x: Tensor, cell_of: Tensor, cells: int) -> Tensor:
    """The largest number of each cell along the last axis: (..., n) and (n,) -> (..., cells)."""
    lowest = x.new_full((*x.shape[:-1], cells), -math.inf)
    return lowest.scatter_reduce(-1, cell_of.expand(x.shape), x, "amax")


_DECADES = (0.0, *(10.0**n for n in range(-8, 1)))


@answers_wrong_calls({"bins": "write edges=, the limits of the bins"})
@dataclass(frozen=True)
class Histogram(Fact[Tensor]):
    """The number of visible pairs with a weight in each bin, int64 (*batch, h, bins), over all queries and keys.

    Bin n holds edges[n] ≤ p < edges[n + 1], the last one its right end too; weights outside are not counted. The
    default bins are the decades of p: below 1e-8, from there to 1e-7, ..., from 0.1 to 1. Weights above 1 by rounding
    count as 1. Raises ValueError for fewer than 2 edges, or edges that do not increase.

    >>> import regard as rg
    >>> x, halves = torch.zeros(4, 8), Histogram((0.0, 0.5, 1.0))
    >>> rg.look(x, x, mask=rg.Causal(), facts=(halves,))[halves]
    tensor([7, 3])
    """

    edges: tuple[float, ...] = _DECADES

    def __post_init__(self) -> None:
        if not isinstance(self.edges, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Histogram.edges is {kind_of(self.edges)}; expected a tuple of numbers, the bins' limits.")
        if len(self.edges) < 2 or any(not a < b for a, b in zip(self.edges[:-1], self.edges[1:], strict=True)):
            raise ValueError(f"Histogram(edges={self.edges}): expected 2 edges or more, each above the one before.")

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        edges = torch.tensor(self.edges, dtype=problem.accumulate, device=problem.q.device)
        return _HistogramAccumulator(room(problem, len(self.edges) + 1, dtype=torch.int64), edges)

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        seen, last = scores > -math.inf, len(self.edges) - 2
        bins = [
            (seen & (p >= low) & ((p < high) | ((n == last) & (p == high)))).sum((-1, -2))
            for n, (low, high) in enumerate(zip(self.edges[:-1], self.edges[1:], strict=True))
        ]
        return torch.stack(bins, -1)


class _HistogramAccumulator(Accumulator[Tensor]):
    """Counts for the weights below the first edge, each bin, and those above the last."""

    def __init__(self, count: Tensor, edges: Tensor) -> None:
        self.count, self.edges = count, edges

    def add(self, tile: ScoreTile) -> None:
        p = tile.p.clamp(max=1)
        bin_of = torch.bucketize(p, self.edges, right=True)
        bin_of.masked_fill_(p == self.edges[-1], len(self.edges) - 1)
        self.count.scatter_add_(-1, bin_of.flatten(-2), tile.visible.long().flatten(-2))

    def finish(self) -> Tensor:
        return self.count[..., 1:-1]
