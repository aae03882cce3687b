"""Quantised: every weight of a call of few tokens, in one byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.call.problem import Problem
from regard.core.arrays import whole_number
from regard.core.region import Frame, Region
from regard.core.state import RowStats
from regard.inspect.facts.algebra import Accumulator, Fact, ScoreTile, room

STEPS = 127


def quantise(p: Tensor) -> Tensor:
    """Weights in STEPS even steps of their square root, uint8: fine for small weights, coarse for large ones.

    NaN counts as 0. A weight of 1.6e-5 or more is above 0; dequantise(quantise(p)) differs from p by less than
    √p / 127 + 1.6e-5.

    >>> quantise(torch.tensor([1.0, 0.25, 1e-4, 0.0])).tolist()
    [127, 64, 1, 0]
    """
    return (p.nan_to_num(0).clamp(0, 1).sqrt() * STEPS).round().to(torch.uint8)


def dequantise(levels: Tensor) -> Tensor:
    """The weights, float32.

    >>> dequantise(quantise(torch.tensor([1.0, 0.25, 0.0]))).tolist()
    [1.0, 0.2539525032043457, 0.0]
    """
    return (levels / STEPS).square()


@dataclass(frozen=True)
class Quantised(Fact[Tensor]):
    """Every weight p_ij of a call of at most `limit` queries and keys, uint8 (*batch, h, nq, nk), as `quantise` has it.

    For a longer call the answer is empty, (*batch, h, 0, 0): it never takes more than limit² bytes per head. Raises
    ValueError for limit < 0.

    >>> import regard as rg
    >>> x = torch.zeros(4, 8)
    >>> rg.look(x, x, mask=rg.Causal(), facts=(Quantised(),))[Quantised()]
    tensor([[127,   0,   0,   0],
            [ 90,  90,   0,   0],
            [ 73,  73,  73,   0],
            [ 64,  64,  64,  64]], dtype=torch.uint8)
    """

    limit: int = 512

    def __post_init__(self) -> None:
        if whole_number(self.limit, "Quantised.limit") < 0:
            raise ValueError(f"Quantised(limit={self.limit}): expected 0 or more.")

    def fits(self, frame: Frame) -> bool:
        """Whether a call of that size is answered."""
        return max(frame.nq, frame.nk) <= self.limit

    def region(self, frame: Frame) -> Region:
        return frame.region() if self.fits(frame) else frame.region(slice(0, 0), slice(0, 0))

    def accumulator(self, problem: Problem, stats: RowStats) -> Accumulator[Tensor]:
        size = (problem.frame.nq, problem.frame.nk) if self.fits(problem.frame) else (0, 0)
        return _LevelsAccumulator(room(problem, *size, dtype=torch.uint8))

    def dense(self, problem: Problem, scores: Tensor, p: Tensor) -> Tensor:
        return quantise(p if self.fits(problem.frame) else p[..., :0, :0])


class _LevelsAccumulator(Accumulator[Tensor]):
    def __init__(self, levels: Tensor) -> None:
        self.levels = levels

    def add(self, tile: ScoreTile) -> None:
        self.levels[..., tile.rows, tile.cols] = quantise(tile.p)

    def finish(self) -> Tensor:
        return self.levels
