"""Facts: what can be known about the weights without writing them out.

Each fact is a value that says what is wanted; a sweep over the tiles, with the log-sum-exp known, feeds its Tally.
With s_ij the final score and lse_i the row's log-sum-exp:  p_ij = exp(s_ij - lse_i).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.problem import Problem
from regard.value import Value

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, eq=False)
class Patch:
    """One tile of the sweep: where it lies, its scores (-inf where hidden), its weights, and their logarithms."""

    rows: slice
    cols: slice
    scores: Tensor
    log_p: Tensor
    p: Tensor


class Tally(Generic[T]):
    """The sums of one fact during one sweep."""

    def add(self, patch: Patch) -> None:
        """Takes one tile into account. Every visible pair comes exactly once."""
        raise NotImplementedError

    def finish(self) -> T:
        """The fact, after the last tile."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fact(Value, Generic[T]):
    """A question about the weights; `tally` starts its answer for one problem. Answers are (*batch, h, ...)."""

    def tally(self, problem: Problem) -> Tally[T]:
        """A fresh Tally."""
        raise NotImplementedError


def _rows(problem: Problem, *shape: int, fill: float = 0.0) -> Tensor:
    lead = problem.q.shape[:-2]
    return torch.full((*lead, *shape), fill, dtype=problem.accumulate, device=problem.q.device)


@dataclass(frozen=True)
class Entropy(Fact[Tensor]):
    """H_i = -Σ_j p_ij ln p_ij in nats, (*batch, h, nq): 0 for one key or none, at most ln(number of visible keys)."""

    def tally(self, problem: Problem) -> Tally[Tensor]:
        return _EntropyTally(_rows(problem, problem.frame.nq))


class _EntropyTally(Tally[Tensor]):
    def __init__(self, total: Tensor) -> None:
        self.total = total

    def add(self, patch: Patch) -> None:
        surprise = (patch.p * patch.log_p).masked_fill(patch.p == 0, 0)  # 0 ln 0 = 0
        self.total[..., patch.rows] -= surprise.sum(-1)

    def finish(self) -> Tensor:
        return self.total


class Peak(NamedTuple):
    """The largest score of each row and the key that has it; -inf and -1 for a row that sees nothing."""

    score: Tensor
    key: Tensor


@dataclass(frozen=True)
class MaxScore(Fact[Peak]):
    """max_j s_ij over the visible keys, before sinks, and its key, of equal ones the first: Peak of (*batch, h, nq)."""

    def tally(self, problem: Problem) -> Tally[Peak]:
        best = _rows(problem, problem.frame.nq, fill=-math.inf)
        return _PeakTally(best, torch.full_like(best, -1, dtype=torch.int64))


class _PeakTally(Tally[Peak]):
    def __init__(self, best: Tensor, key: Tensor) -> None:
        self.best, self.key = best, key

    def add(self, patch: Patch) -> None:
        score, key = patch.scores.max(-1)
        best, where = self.best[..., patch.rows], self.key[..., patch.rows]
        where.copy_(torch.where(score > best, key + patch.cols.start, where))
        best.copy_(torch.maximum(best, score))

    def finish(self) -> Peak:
        return Peak(self.best, self.key)


class TopKeys(NamedTuple):
    """keys and weights (*batch, h, nq, k), heaviest first, and the mass `rest` (*batch, h, nq) of all other keys.

    Where a row sees fewer than k keys, the remaining keys are -1 and their weights 0.
    """

    keys: Tensor
    weights: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Top(Fact[TopKeys]):
    """The k heaviest keys of each row and the mass that they leave. Raises ValueError for k < 1."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"Top(k={self.k}): expected 1 key or more.")

    def tally(self, problem: Problem) -> Tally[TopKeys]:
        weights = _rows(problem, problem.frame.nq, self.k)
        return _TopTally(weights, torch.full_like(weights, -1, dtype=torch.int64), _rows(problem, problem.frame.nq))


class _TopTally(Tally[TopKeys]):
    def __init__(self, weights: Tensor, keys: Tensor, mass: Tensor) -> None:
        self.weights, self.keys, self.mass = weights, keys, mass

    def add(self, patch: Patch) -> None:
        k = self.weights.shape[-1]
        p, j = patch.p.topk(min(k, patch.p.shape[-1]), -1)
        p = torch.cat([self.weights[..., patch.rows, :], p], -1)
        j = torch.cat([self.keys[..., patch.rows, :], j + patch.cols.start], -1)
        best, order = p.topk(k, -1)
        self.weights[..., patch.rows, :] = best
        self.keys[..., patch.rows, :] = j.gather(-1, order).masked_fill(best == 0, -1)
        self.mass[..., patch.rows] += patch.p.sum(-1)

    def finish(self) -> TopKeys:
        return TopKeys(self.keys, self.weights, (self.mass - self.weights.sum(-1)).clamp(min=0))


@dataclass(frozen=True)
class Received(Fact[Tensor]):
    """Σ_i p_ij: the mass that each key receives from all queries, (*batch, h, nk)."""

    def tally(self, problem: Problem) -> Tally[Tensor]:
        return _ReceivedTally(_rows(problem, problem.frame.nk))


class _ReceivedTally(Tally[Tensor]):
    def __init__(self, total: Tensor) -> None:
        self.total = total

    def add(self, patch: Patch) -> None:
        self.total[..., patch.cols] += patch.p.sum(-2)

    def finish(self) -> Tensor:
        return self.total


@dataclass(frozen=True)
class Map(Fact[Tensor]):
    """The weights pooled to rows × cols cells, (*batch, h, rows, cols): at most one cell a query and a key.

    Cell (a, b) is the mean, over the queries of a, of the mass on the keys of b; so each pooled row sums to 1 where its
    queries see keys and there is no sink. Queries are divided evenly: query i belongs to row i · rows // nq.
    """

    rows: int = 64
    cols: int = 64

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"Map(rows={self.rows}, cols={self.cols}): expected 1 cell or more each way.")

    def tally(self, problem: Problem) -> Tally[Tensor]:
        frame = problem.frame
        rows, cols = min(self.rows, frame.nq), min(self.cols, frame.nk)
        return _MapTally(_rows(problem, rows, cols), frame.nq, frame.nk)


class _MapTally(Tally[Tensor]):
    def __init__(self, total: Tensor, nq: int, nk: int) -> None:
        self.total, rows, cols = total, *total.shape[-2:]
        self.row_of = torch.arange(nq, device=total.device) * rows // max(nq, 1)
        self.col_of = torch.arange(nk, device=total.device) * cols // max(nk, 1)
        self.size = torch.bincount(self.row_of, minlength=rows).to(total.dtype)

    def add(self, patch: Patch) -> None:
        rows, a = _membership(self.row_of[patch.rows], patch.p.dtype)
        cols, b = _membership(self.col_of[patch.cols], patch.p.dtype)
        self.total[..., rows, cols] += a.mT @ (patch.p @ b)

    def finish(self) -> Tensor:
        return self.total / self.size[:, None]


def _membership(cell_of: Tensor, dtype: torch.dtype) -> tuple[slice, Tensor]:
    """The cells that a run of tokens touches, and which token is in which: non-decreasing (n,) -> (n, cells)."""
    first, last = int(cell_of[0]), int(cell_of[-1])
    return slice(first, last + 1), torch.nn.functional.one_hot(cell_of - first, last - first + 1).to(dtype)
