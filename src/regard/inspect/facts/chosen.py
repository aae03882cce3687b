"""Chosen rows and columns of the weights themselves. Only these are swept."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import regard.core.arrays as arrays
from regard.call.problem import Problem
from regard.core.region import Frame, Region
from regard.core.state import RowStats
from regard.core.wrong_calls import answers_wrong_calls
from regard.inspect.facts.algebra import Accumulator, Fact, ScoreTile, room


@answers_wrong_calls({**dict.fromkeys(("queries", "index"), "write rows=")})
@dataclass(frozen=True)
class Rows(Fact[Tensor]):
    """The weights p_ij of some queries, (*batch, h, r, nk): how much these tokens attend to each key.

    rows: integers (r,), indices of queries, from the end where negative. Raises TypeError for anything else, IndexError
    for a query that does not exist.

    >>> import regard as rg
    >>> x, last = torch.zeros(4, 8), Rows([-1])
    >>> rg.look(x, x, mask=rg.Causal(), facts=(last,))[last]
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    rows: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", arrays.indices(self.rows, "Rows.rows"))

    def region(self, frame: Frame) -> Region:
        return frame.region(arrays.existing(self.rows, frame.nq, "Rows.rows", "queries").to(frame.device))

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        return _CopyAccumulator(room(problem, len(self.rows), problem.frame.nk))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        return p[..., self.rows, :]


@answers_wrong_calls({**dict.fromkeys(("keys", "index"), "write columns=")})
@dataclass(frozen=True)
class Columns(Fact[Tensor]):
    """The weights p_ij on some keys, (*batch, h, nq, c): how much each query attends to these tokens.

    columns: integers (c,), indices of keys, from the end where negative. Raises TypeError for anything else, IndexError
    for a key that does not exist.

    >>> import regard as rg
    >>> x, first = torch.zeros(4, 8), Columns([0])
    >>> rg.look(x, x, mask=rg.Causal(), facts=(first,))[first][:, 0]
    tensor([1.0000, 0.5000, 0.3333, 0.2500])
    """

    columns: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", arrays.indices(self.columns, "Columns.columns"))

    def region(self, frame: Frame) -> Region:
        columns = arrays.existing(self.columns, frame.nk, "Columns.columns", "keys").to(frame.device)
        return frame.region(slice(None), columns)

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        return _CopyAccumulator(room(problem, problem.frame.nq, len(self.columns)))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        return p[..., self.columns]


class _CopyAccumulator(Accumulator[Tensor]):
    """The weights of the fact's region, as they come."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def add(self, tile: ScoreTile) -> None:
        self.weights[..., tile.rows, tile.cols] = tile.p

    def finish(self) -> Tensor:
        return self.weights
