"""Facts about where each query's mass lies: in groups of keys, on the sink, near or far."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.call.problem import Problem
from regard.core.region import Frame, Region
from regard.core.shapes import count_of, listed
from regard.core.state import RowStats
from regard.core.value import Value
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.inspect.facts.algebra import (
    MOST_OF_FEW_KEYS,
    Accumulator,
    Fact,
    ScoreTile,
    Sum,
    by_row,
    by_row_of_many,
    room,
    sum_keys,
)
from regard.masks.positional import Window


@dataclass(frozen=True)
class First(Value):
    """The keys at positions below `count`: one group. Made by Mass.first."""

    count: int


@answers_wrong_calls({**dict.fromkeys(("keys", "sets"), "write groups=, a set of keys each")})
@dataclass(frozen=True)
class Mass(Fact[Tensor]):
    """Σ of p_ij over each group of keys, (*batch, h, nq, g).

    groups: integers (nk,) or (*batch, nk), the number of each key's group from 0 to g - 1; -1 = in none.
    Raises TypeError for other dtypes, ValueError for a number below -1, ShapeError where they do not fit the call, or
    where a number is larger than 65,535 and than the number of keys.

    >>> import regard as rg
    >>> x = torch.zeros(1, 8)
    >>> halves = Mass(torch.tensor([0, 0, 0, 1, -1]))
    >>> rg.look(x, torch.zeros(5, 8), facts=(halves,))[halves]
    tensor([[0.6000, 0.2000]])
    """

    groups: Tensor | First

    def __post_init__(self) -> None:
        if isinstance(self.groups, First):
            return
        groups = arrays.integers(self.groups, "Mass.groups")
        if groups.numel() and int(groups.min()) < -1:
            raise ValueError(f"Mass.groups holds {int(groups.min())}; expected group numbers from 0, or -1 for none.")
        object.__setattr__(self, "groups", groups)

    @staticmethod
    def first(count: int) -> Mass:
        """The mass on the keys at the first `count` positions, (*batch, h, nq, 1).

        Source: Xiao et al. 2023, StreamingLLM (arXiv 2309.17453).

        >>> import regard as rg
        >>> x = torch.zeros(3, 8)
        >>> rg.look(x, x, mask=rg.Causal(), facts=(Mass.first(1),))[Mass.first(1)][:, 0]
        tensor([1.0000, 0.5000, 0.3333])
        """
        count = arrays.whole_number(count, "Mass.first: count")
        if count < 1:
            raise ValueError(f"Mass.first({count}): expected 1 position or more.")
        return Mass(First(count))

    @property
    def count(self) -> int:
        """The number of groups."""
        if isinstance(self.groups, First):
            return 1
        return int(self.groups.max()) + 1 if self.groups.numel() else 0

    def shape_error(self, frame: Frame) -> str | None:
        if isinstance(self.groups, First):
            return None
        *lead, n = self.groups.shape if self.groups.dim() else (-1,)
        if n == frame.nk and tuple(lead) in ((), frame.batch):
            return self._too_many(frame.nk)
        fits = f"({frame.nk},)" + (f" or {listed((*frame.batch, frame.nk))}" if frame.batch else "")
        return f"Mass.groups has shape {listed(self.groups.shape)}; expected {fits}."

    def _too_many(self, nk: int) -> str | None:
        """Why an answer with a column for each number would hold more than the weights, most of them 0."""
        if self.count <= max(nk, MOST_OF_FEW_KEYS):
            return None
        return (
            f"Mass.groups holds {self.count - 1}, and the answer has a column for each number from 0 to that; of "
            f"{count_of(nk, 'key')} expected groups that are numbered one after another: "
            "torch.unique(groups, return_inverse=True)[1]."
        )

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        numbers = torch.arange(self.count, device=problem.q.device, dtype=torch.int64)
        of = self.numbers(problem.frame)

        def share(tile: ScoreTile) -> Tensor:
            member = (tile.at.keys(of).mT == numbers).to(tile.p.dtype)
            return sum_keys(tile.p, member, tile.clean)

        return Sum(room(problem, problem.frame.nq, self.count), by_row_of_many, share)

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        of = self.numbers(problem.frame)[..., None, None, :]
        masses = [p.masked_fill(of != n, 0).sum(-1) for n in range(self.count)]
        return torch.stack(masses, -1) if masses else p.new_zeros(*p.shape[:-1], 0)

    def numbers(self, frame: Frame) -> Tensor:
        """The group of each key, integers (nk,) or (*batch, nk); -1 for none."""
        if isinstance(self.groups, First):
            return torch.where(frame.positions.k < self.groups.count, 0, -1)
        return self.groups.to(frame.device)


@dataclass(frozen=True)
class SinkMass(Fact[Tensor]):
    """1 - Σ_j p_ij: the mass on the learned sink, (*batch, h, nq); 0 without one. Sweeps nothing.

    >>> import regard as rg
    >>> rg.look(torch.zeros(1, 8), torch.zeros(3, 8), sink=0.0, facts=(SinkMass(),))[SinkMass()]
    tensor([0.2500])
    """

    def region(self, frame: Frame) -> Region:
        nothing = torch.zeros(0, dtype=torch.int64, device=frame.device)
        return frame.region(nothing, nothing)

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        total = room(problem, problem.frame.nq)
        if problem.sink is not None:
            total += stats.sink_weights(problem.sink)
        return Sum(total, by_row, lambda tile: torch.zeros_like(tile.p.sum(-1)))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        if problem.sink is None:
            return torch.zeros_like(p.sum(-1))
        return (1 - p.sum(-1)).masked_fill(problem.sink[..., None] == -math.inf, 0)


@dataclass(frozen=True)
class Distance(Fact[Tensor]):
    """Σ_j p_ij |i - j| in positions, (*batch, h, nq): the mean distance of the attended keys; a sink adds nothing.

    >>> import regard as rg
    >>> x = torch.zeros(3, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(Distance(),))[Distance()]
    tensor([0.0000, 0.5000, 1.0000])
    """

    def compares_positions(self) -> bool:
        return True

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        def share(tile: ScoreTile) -> Tensor:
            return (tile.p * (tile.at.i - tile.at.j).abs()).sum(-1)

        return Sum(room(problem, problem.frame.nq), by_row, share)

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        i, j = problem.frame.positions.q, problem.frame.positions.k
        return torch.einsum("...hij,...ij->...hi", p, (i[..., :, None] - j[..., None, :]).abs().to(p.dtype))


@answers_wrong_calls({"window": "write before= and after="})
@dataclass(frozen=True)
class Within(Fact[Tensor]):
    """The mass on keys at most `before` positions behind and `after` ahead of the query, (*batch, h, nq).

    Both count keys besides the query's own, None = unbounded, as in Window. Raises ValueError for negative numbers.

    >>> import regard as rg
    >>> x, near = torch.zeros(4, 8), Within(before=1, after=0)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(near,))[near]
    tensor([1.0000, 1.0000, 0.6667, 0.5000])
    """

    before: int | None
    after: int | None

    def __post_init__(self) -> None:
        try:
            Window(self.before, self.after)  # which knows what they may be
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("Window", "Within", 1)) from None

    def compares_positions(self) -> bool:
        return True

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        window = Window(self.before, self.after)
        total = room(problem, problem.frame.nq)
        return Sum(total, by_row, lambda tile: tile.p.masked_fill(~window.visible(tile.at), 0).sum(-1))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        i, j = problem.frame.positions.q[..., None, :, None], problem.frame.positions.k[..., None, None, :]
        before = math.inf if self.before is None else self.before
        after = math.inf if self.after is None else self.after
        return p.masked_fill((i - j > before) | (j - i > after), 0).sum(-1)


@answers_wrong_calls({})
@dataclass(frozen=True)
class Offsets(Fact[Tensor]):
    """The mass on the keys that stand at j = i + offset, for each offset, (*batch, h, nq, len(offsets)).

    offsets: a tuple of integers; -1 is the token before. Raises TypeError for anything else, ValueError for none.

    >>> import regard as rg
    >>> x, near = torch.zeros(3, 8), Offsets((-1, 0))
    >>> rg.look(x, x, mask=rg.Causal(), facts=(near,))[near]
    tensor([[0.0000, 1.0000],
            [0.5000, 0.5000],
            [0.3333, 0.3333]])
    """

    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.offsets, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Offsets.offsets is {kind_of(self.offsets)}; expected a tuple: Offsets((-1, 1)).")
        if not self.offsets:
            raise ValueError(
                "Offsets(offsets=()): expected 1 offset or more, such as Offsets((-1,)), the token before."
            )
        for n in self.offsets:
            if type(n) is not int:
                raise TypeError(f"Offsets.offsets holds {n!r}, {kind_of(n)}; expected integers.")

    def compares_positions(self) -> bool:
        return True

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        def share(tile: ScoreTile) -> Tensor:
            ahead = tile.at.j - tile.at.i
            return torch.stack([tile.p.masked_fill(ahead != n, 0).sum(-1) for n in self.offsets], -1)

        return Sum(room(problem, problem.frame.nq, len(self.offsets)), by_row_of_many, share)

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        i, j = problem.frame.positions.q[..., None, :, None], problem.frame.positions.k[..., None, None, :]
        return torch.stack([(p * (j == i + n)).sum(-1) for n in self.offsets], -1)
