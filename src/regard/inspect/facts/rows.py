"""Facts about each query: how high it scores, how widely it looks, and which keys it reads most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.call.problem import Problem
from regard.core.region import Frame
from regard.core.state import RowStats
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.inspect.facts.algebra import MOST_OF_FEW_KEYS, Accumulator, Fact, ScoreTile, Sum, by_row, room


@dataclass(frozen=True)
class Visible(Fact[Tensor]):
    """The number of keys that each query may see, int64 (*batch, h, nq): pairs whose score is not -inf.

    >>> import regard as rg
    >>> x = torch.zeros(4, 8)
    >>> rg.look(x, x, mask=rg.Window(before=1, after=1), facts=(Visible(),))[Visible()]
    tensor([2, 3, 3, 2])
    """

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        total = room(problem, problem.frame.nq, dtype=torch.int64)
        return Sum(total, by_row, lambda tile: tile.visible.sum(-1))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        return (scores > -math.inf).sum(-1)


@dataclass(frozen=True)
class Entropy(Fact[Tensor]):
    """H_i = -Σ_j p_ij ln p_ij over the keys, in nats, (*batch, h, nq), 0 for a row that sees nothing.

    Without a sink it is 0 for one key, and at most ln(number of visible keys). With one the weights are taken as they
    are, not made to sum to 1, and the sink's own share adds nothing.

    >>> import regard as rg
    >>> x = torch.zeros(4, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(Entropy(),))[Entropy()].exp().round(decimals=4)
    tensor([1., 2., 3., 4.])
    """

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        return _EntropyAccumulator(room(problem, problem.frame.nq))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        return -torch.special.xlogy(p, p).sum(-1)


class _EntropyAccumulator(Accumulator[Tensor]):
    def __init__(self, total: Tensor) -> None:
        self.total = total

    def add(self, tile: ScoreTile) -> None:
        terms = (tile.p * tile.log_p).masked_fill(tile.p == 0, 0)  # 0 ln 0 = 0
        self.total[..., tile.rows] -= terms.sum(-1)

    def finish(self) -> Tensor:
        return self.total.clamp(min=0)


@dataclass(frozen=True)
class RelativeEntropy(Fact[Tensor]):
    """H_i / ln(number of visible keys), (*batch, h, nq); 0 where a query sees one key or none.

    From 0 to 1 without a sink: 1 if all weights are equal. Causal rows have different maximal entropies; this makes
    them comparable.

    >>> import regard as rg
    >>> x = torch.zeros(4, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(RelativeEntropy(),))[RelativeEntropy()].round(decimals=4)
    tensor([0., 1., 1., 1.])
    """

    def parts(self) -> tuple[Fact[Tensor], ...]:
        return Entropy(), Visible()

    def join(self, *answers: Tensor) -> Tensor:
        entropy, visible = answers
        return (entropy / visible.to(entropy.dtype).log()).masked_fill(visible < 2, 0)

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        ceiling = (scores > -math.inf).sum(-1).to(p.dtype).log()
        return torch.where(ceiling > 0, -torch.special.xlogy(p, p).sum(-1) / ceiling, 0)


@dataclass(frozen=True)
class EffectiveKeys(Fact[Tensor]):
    """exp(H_i), (*batch, h, nq): how many equal weights have this entropy; 0 where a query sees nothing.

    >>> import regard as rg
    >>> x = torch.zeros(4, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(EffectiveKeys(),))[EffectiveKeys()].round(decimals=4)
    tensor([1., 2., 3., 4.])
    """

    def parts(self) -> tuple[Fact[Tensor], ...]:
        return Entropy(), Visible()

    def join(self, *answers: Tensor) -> Tensor:
        entropy, visible = answers
        return entropy.exp().masked_fill(visible == 0, 0)

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        return (1 / p**p).prod(-1) * (scores > -math.inf).any(-1)


@dataclass(frozen=True)
class Concentration(Fact[Tensor]):
    """C_i = Σ_j p_ij² over the keys, (*batch, h, nq), 0 for a row that sees nothing.

    The index of Simpson (1949, Nature 163, "Measurement of Diversity") and of Herfindahl: the probability that two keys
    drawn from a row's weights are the same key. 1 / C_i is an effective number of keys (Hill's number of order 2), at
    most EffectiveKeys; -ln C_i is Rényi's entropy of order 2, in nats. Without a sink it is 1 for one key, and at least
    1 / number of visible keys. With one the weights are taken as they are, not made to sum to 1, and the sink's own
    share adds nothing.

    >>> import regard as rg
    >>> x = torch.zeros(4, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(Concentration(),))[Concentration()].round(decimals=4)
    tensor([1.0000, 0.5000, 0.3333, 0.2500])
    """

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        return Sum(room(problem, problem.frame.nq), by_row, lambda tile: tile.p.square().sum(-1))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        return p.square().sum(-1)


class Peak(NamedTuple):
    """The largest score of each row and the key that has it; -inf and -1 for a row that sees nothing."""

    score: Tensor
    key: Tensor


@dataclass(frozen=True)
class MaxScore(Fact[Peak]):
    """max_j s_ij over the visible keys, before sinks, and its key, of equal ones the first: Peak of (*batch, h, nq).

    >>> import regard as rg
    >>> q, k = torch.ones(1, 1), torch.tensor([[1.0], [3.0], [3.0]])
    >>> rg.look(q, k, score=rg.Dot(), facts=(MaxScore(),))[MaxScore()]
    Peak(score=tensor([3.]), key=tensor([1]))
    """

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Peak]:
        best = room(problem, problem.frame.nq, fill=-math.inf)
        return _PeakAccumulator(best, torch.full_like(best, -1, dtype=torch.int64))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Peak:
        score, key = pad(scores, (1, 0), value=-math.inf).max(-1)  # a key that nobody sees stands before the first
        return Peak(score, key - 1)


class _PeakAccumulator(Accumulator[Peak]):
    def __init__(self, best: Tensor, key: Tensor) -> None:
        self.best, self.key = best, key

    def add(self, tile: ScoreTile) -> None:
        score, key = tile.scores.max(-1)
        best, where = self.best[..., tile.rows], self.key[..., tile.rows]
        better = (score > best) | (score.isnan() & ~best.isnan())
        where.copy_(torch.where(better, key + tile.cols.start, where))
        best.copy_(torch.maximum(best, score))

    def finish(self) -> Peak:
        return Peak(self.best, self.key)


class TopKeys(NamedTuple):
    """Top's answer: keys and weights (*batch, h, nq, k), heaviest first, and the mass `rest` (*batch, h, nq) of others.

    Where a row sees fewer than k keys, the remaining keys are -1 and their weights 0.
    """

    keys: Tensor
    weights: Tensor
    rest: Tensor


@answers_wrong_calls({"n": "write Top(k)"})
@dataclass(frozen=True)
class Top(Fact[TopKeys]):
    """The k heaviest keys of each row, TopKeys, and the mass of all other keys.

    They are ranked by score, so that weights too small for their dtype keep their order; equal ones have any order.
    Where a query sees fewer than k keys, -1 fills the rest, with the weight 0.
    Raises ValueError for k < 1, ShapeError for more than 65,536 where there are fewer keys than k.

    >>> import regard as rg
    >>> q, k = torch.ones(1, 1), torch.tensor([[2.0], [0.0], [4.0]]).log()
    >>> top = rg.look(q, k, score=rg.Dot(), facts=(Top(2),))[Top(2)]
    >>> top.keys, top.weights
    (tensor([[2, 0]]), tensor([[0.6667, 0.3333]]))
    """

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Top.k is {kind_of(self.k)}; expected a number of keys.")
        if self.k < 1:
            raise ValueError(f"Top(k={self.k}): expected 1 key or more.")

    def shape_error(self, frame: Frame) -> str | None:
        if self.k <= max(frame.nk, MOST_OF_FEW_KEYS):
            return None
        return f"Top(k={self.k}) has room for {self.k} keys of each query; expected at most the {frame.nk} there are."

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[TopKeys]:
        scores = room(problem, problem.frame.nq, self.k, fill=-math.inf)
        return _TopAccumulator(scores, stats, room(problem, problem.frame.nq))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> TopKeys:
        s, keys = pad(scores, (0, self.k), value=-math.inf).topk(self.k, -1)
        p = pad(p, (0, self.k))
        return TopKeys(keys.masked_fill(s == -math.inf, -1), p.gather(-1, keys), p.scatter(-1, keys, 0).sum(-1))


class _TopAccumulator(Accumulator[TopKeys]):
    def __init__(self, scores: Tensor, stats: RowStats, rest: Tensor) -> None:
        self.scores, self.stats, self.rest = scores, stats, rest
        self.keys = torch.full_like(scores, -1, dtype=torch.int64)

    def add(self, tile: ScoreTile) -> None:
        k, rows = self.scores.shape[-1], tile.rows
        s, j = tile.scores.topk(min(k, tile.scores.shape[-1]), -1)
        # what is left is summed by itself: 1 minus the rest has lost the digits of a small remainder
        left = tile.p.scatter(-1, j, 0).sum(-1)
        s = torch.cat([self.scores[..., rows, :], s], -1)
        j = torch.cat([self.keys[..., rows, :], j + tile.cols.start], -1)
        best, order = s.topk(k, -1)
        self.rest[..., rows] += left + self.stats.rows(rows).weights(s).scatter(-1, order, 0).sum(-1)
        self.scores[..., rows, :] = best
        self.keys[..., rows, :] = j.gather(-1, order).masked_fill(best == -math.inf, -1)

    def finish(self) -> TopKeys:
        weights = self.stats.weights(self.scores).masked_fill(self.keys == -1, 0)
        return TopKeys(self.keys, weights, self.rest)
