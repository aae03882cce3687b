"""PowerDistance: a penalty that grows with a power of the distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.core.region import Frame
from regard.core.wrong_calls import answers_wrong_calls
from regard.scores.algebra import Score
from regard.scores.distance_penalty import DistancePenalty


@answers_wrong_calls(
    {
        **dict.fromkeys(("slope", "slopes", "scale", "r1", "a"), "write weight="),
        **dict.fromkeys(("exponent", "p", "r2"), "write power="),
    },
    "PowerDistance(weight, power) subtracts weight · |i - j|^power, numbers or a tensor of one for each head.",
)
@dataclass(frozen=True)
class PowerDistance(DistancePenalty):
    """s_ij -> s_ij - weight_h · |i - j|^power_h: a penalty that grows with a power of the distance; 0 where i = j.

    i and j are positions. weight and power: numbers, or floating-point tensors (heads,) or (), which may be learned;
    weight at least 0, power above 0 and at most 2. Numbers are checked (ValueError), shapes too (ShapeError). The
    values of tensors are not: keep learned ones in these ranges, for example by softplus and 2 · sigmoid. A power of 1
    is Alibi(slopes=weight); one of 2 makes exp(s) a Gaussian of the distance. A weight of 0 changes nothing.
    Source: Chi et al. 2022, KERPLE (arXiv 2205.09921), the power variant: weight is their r1, power their r2.

    >>> import regard as rg
    >>> s = rg.ScaledDot() >> PowerDistance(weight=1.0, power=0.5)
    >>> rg.attention_weights(torch.zeros(3, 2), torch.zeros(3, 2), score=s)[2]
    tensor([0.1509, 0.2284, 0.6207])
    """

    formula: ClassVar[str] = "s_ij -> s_ij - weight_h · |i - j|^power_h"
    head_axes: ClassVar[Mapping[str, int] | None] = {"weight": -1, "power": -1}
    power: float | Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.power, Tensor) and not 0 < self.power <= 2:
            raise ValueError(f"PowerDistance(power={self.power}): expected a number above 0, at most 2.")

    def grow(self, distance: Tensor, second: float | Tensor) -> Tensor:
        near = distance == 0  # where the power is 0 whatever its exponent, and so is its derivative
        return (distance.masked_fill(near, 1) ** second).masked_fill(near, 0)

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        power = torch.linspace(0.5, 1.5, frame.heads, dtype=torch.float64, device=frame.device)
        return cls(0.05 / power, power), cls(0.02, 0.7)
