"""Carried: facts about what attention carries, the weights times the norms of what the values add."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.call.problem import Problem
from regard.core.region import Frame, Region
from regard.core.state import RowStats
from regard.core.tracing import finite
from regard.core.wrong_calls import kind_of
from regard.inspect.facts.algebra import Accumulator, Fact, ScoreTile
from regard.inspect.facts.chosen import Columns, Rows
from regard.inspect.facts.keys import MaxReceived, MeanReceived, Readers, Received, numbers, numbers_error, placed
from regard.inspect.facts.places import Mass, Offsets, Within
from regard.inspect.facts.pooled import Map
from regard.inspect.facts.rows import Top

# A norm multiplies their answer, key by key.
_BY_KEY = (Received, MeanReceived, MaxReceived)
# They sum, copy or rank weights.
_OF_WEIGHTS = (Top, Mass, Within, Offsets, Map, Rows, Columns)


@dataclass(frozen=True)
class Carried(Fact[Any]):
    """The answer of another fact, with p_ij c_j in place of each weight p_ij: how much is carried, not only looked at.

    With c_j = ‖v_j W^O_h‖, the norm of what key j's value adds to the output of head h, p_ij c_j = ‖p_ij v_j W^O_h‖ is
    the norm of what query i receives from key j. A key with a large weight and a small value carries little. Σ_j p_ij
    c_j is an upper bound of the norm of the head's output.

    norms  c_j ≥ 0 in the units of the output, (nk,) or a tensor that broadcasts to (*batch, h, nk): see
           regard.heads.value_norms; for a model on a text see regard.heads.carried
    fact   Received, MeanReceived, MaxReceived, Top, Mass, Within, Offsets, Map, Rows or Columns, of any arguments

    The shape is that of the fact. Memory is linear: c_j is one number for each key and head. The native kernels find
    the facts of keys; the others are computed tile by tile. Raises TypeError for norms that are no numbers and for
    another fact, ValueError for a negative norm, ShapeError where the norms do not fit the call.
    Source: Kobayashi et al. 2020, "Attention is Not Only a Weight" (arXiv 2004.10102), eq. 4 and 5.

    >>> import regard as rg
    >>> x, norms = torch.zeros(2, 8), torch.tensor([0.1, 4.0])
    >>> rg.look(x, x, mask=rg.Causal(), facts=(Carried(norms), Carried(norms, Rows([1]))))[Carried(norms, Rows([1]))]
    tensor([[0.0500, 2.0000]])
    """

    norms: Tensor
    fact: Fact[Any] = Received()

    def __post_init__(self) -> None:
        if not isinstance(self.fact, (*_BY_KEY, *_OF_WEIGHTS)):
            expected = ", ".join(kind.__name__ for kind in (*_BY_KEY, *_OF_WEIGHTS))
            got = repr(self.fact) if isinstance(self.fact, Fact) else kind_of(self.fact)  # pyright: ignore
            raise TypeError(f"Carried.fact is {got}; expected one that sums, ranks or copies weights: {expected}.")
        norms = numbers(self.norms, "Carried.norms", "a norm a key, (nk,) or (*batch, h, nk)")
        if norms.numel() and bool((norms < 0).any()):
            raise ValueError(f"Carried.norms holds {float(norms.min()):.4g}; expected norms, 0 or larger.")
        object.__setattr__(self, "norms", norms)

    def region(self, frame: Frame) -> Region:
        return self.fact.region(frame)

    def compares_positions(self) -> bool:
        return self.fact.compares_positions()

    def shape_error(self, frame: Frame) -> str | None:
        return numbers_error(self.norms, "Carried.norms", frame, frame.nk) or self.fact.shape_error(frame)

    def parts(self) -> tuple[Fact[Any], ...]:
        if not isinstance(self.fact, _BY_KEY):
            return (self,)
        return KeyNorms(self.norms), Readers(), *self.fact.parts()

    def join(self, *answers: Any) -> Any:
        if not isinstance(self.fact, _BY_KEY):
            return answers[0]
        norms, readers, *of_fact = answers
        # a norm that is not finite is seen by the readers of its key only
        return torch.where(readers > 0, norms * self.fact.join(*of_fact), 0)

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Any]:
        whole = RowStats(torch.zeros_like(stats.m), (~stats.empty).to(stats.l.dtype))
        return _CarriedAccumulator(placed(self.norms, problem), self.fact.accumulator(problem, whole))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Any:
        norms = placed(self.norms, problem)[..., None, :]
        visible = scores > -math.inf
        carried = (p * norms).masked_fill(~visible, 0)
        most = (
            pad(scores, (0, 1), value=-math.inf).amax(-1, keepdim=True).masked_fill(~visible.any(-1, keepdim=True), 0)
        )
        ranks = (scores - most + _logarithms(norms)).masked_fill(~visible, -math.inf)
        return self.fact.dense(problem, ranks, carried)


@dataclass(frozen=True)
class KeyNorms(Fact[Tensor]):
    """The norms as one of the parts: (..., nk), broadcast to (*batch, h, nk)."""

    norms: Tensor

    def region(self, frame: Frame) -> Region:
        return frame.region(slice(0, 0), slice(0, 0))

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        return _Constant(placed(self.norms, problem))


class _Constant(Accumulator[Tensor]):
    def __init__(self, answer: Tensor) -> None:
        self.answer = answer

    def add(self, tile: ScoreTile) -> None:
        pass

    def finish(self) -> Tensor:
        return self.answer


class _CarriedAccumulator(Accumulator[Any]):
    """Brings each tile to another accumulator with p c for p and ln p + ln c for its scores.

    A large offset that all scores of a row share would leave no digits of ln c in their sum.
    """

    def __init__(self, norms: Tensor, of_fact: Accumulator[Any]) -> None:
        self.norms, self.of_fact = norms, of_fact

    def add(self, tile: ScoreTile) -> None:
        norms = self.norms[..., None, tile.at.cols]
        hidden = ~tile.visible
        logarithms = (tile.log_p + _logarithms(norms)).masked_fill(hidden, -math.inf)
        carried = replace(
            tile,
            scores=logarithms,
            log_p=logarithms,
            p=(tile.p * norms).masked_fill(hidden, 0),
            clean=tile.clean and finite(norms),
        )
        self.of_fact.add(carried)

    def finish(self) -> Any:
        return self.of_fact.finish()


def _logarithms(norms: Tensor) -> Tensor:
    """ln c. Of 0, which would hide its pairs, a number so low that their weights are exactly 0."""
    return norms.log().masked_fill(norms == 0, 2 * math.log(torch.finfo(norms.dtype).tiny))
