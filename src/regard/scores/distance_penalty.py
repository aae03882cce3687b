"""Penalties by the distance of positions, one function of it for each head: LogDistance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from regard.core.region import Frame, Region
from regard.core.wrong_calls import answers_wrong_calls
from regard.scores.algebra import Modifier, Score
from regard.scores.fields import number, shape_error_by_head


@dataclass(frozen=True)
class DistancePenalty(Modifier):
    """s_ij -> s_ij - weight_h · f_h(|i - j|), for positions i and j.

    A subclass adds one field, which f takes, and defines `grow`. Both fields are numbers, or floating-point tensors
    (heads,) or (), which may be learned. Numbers are checked, tensors are not.
    """

    indexed: ClassVar[bool] = False
    adds: ClassVar[bool] = True
    weight: float | Tensor

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for field in fields(self):
            x = number(getattr(self, field.name), f"{kind}.{field.name}")
            object.__setattr__(self, field.name, x)
            if not isinstance(x, Tensor) and not 0 <= x < math.inf:
                raise ValueError(f"{kind}({field.name}={x}): expected a finite number, 0 or above.")

    def grow(self, distance: Tensor, second: float | Tensor) -> Tensor:
        """f of distances (*batch, 1, r, c), for the second field: a number, or a tensor () or (h, 1, 1)."""
        raise NotImplementedError(f"{type(self).__name__} does not define grow(distance, second).")

    def shape_error(self, frame: Frame) -> str | None:
        for field in fields(self):
            why = shape_error_by_head(getattr(self, field.name), f"{type(self).__name__}.{field.name}", frame.heads)
            if why is not None:
                return why
        return None

    def modify(self, s: Tensor, at: Region) -> Tensor:
        held = (getattr(self, field.name) for field in fields(self))
        weight, second = (at.heads(x).to(s.dtype) if isinstance(x, Tensor) else x for x in held)
        return s - weight * self.grow((at.i - at.j).abs().to(s.dtype), second)


@answers_wrong_calls(
    {
        **dict.fromkeys(("slope", "slopes", "scale", "r1", "a"), "write weight="),
        **dict.fromkeys(("rates", "r2", "b"), "write rate="),
    },
    "LogDistance(weight, rate) subtracts weight · ln(1 + rate · |i - j|), numbers or a tensor of one for each head.",
)
@dataclass(frozen=True)
class LogDistance(DistancePenalty):
    """s_ij -> s_ij - weight_h · ln(1 + rate_h · |i - j|): a penalty that grows with the logarithm of the distance.

    i and j are positions. weight and rate: numbers, or floating-point tensors (heads,) or (), which may be learned;
    both at least 0. Numbers are checked (ValueError). Tensors are not: keep learned values positive, for example by
    softplus; if 1 + rate · |i - j| is not above 0, the row is NaN. A weight or a rate of 0 changes nothing.
    Source: Chi et al. 2022, KERPLE (arXiv 2205.09921), the logarithmic variant: weight is their r1, rate their r2.

    >>> import regard as rg
    >>> s = rg.ScaledDot() >> LogDistance(weight=1.0, rate=1.0)   # exp(-s) is 1 + the distance
    >>> rg.attention_weights(torch.zeros(3, 2), torch.zeros(3, 2), score=s)[2]
    tensor([0.1818, 0.2727, 0.5455])
    """

    formula: ClassVar[str] = "s_ij -> s_ij - weight_h · ln(1 + rate_h · |i - j|)"
    head_axes: ClassVar[Mapping[str, int] | None] = {"weight": -1, "rate": -1}
    rate: float | Tensor

    def grow(self, distance: Tensor, second: float | Tensor) -> Tensor:
        return torch.log1p(second * distance)

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        weight = torch.linspace(0.5, 1.5, frame.heads, dtype=torch.float64, device=frame.device)
        return cls(weight, 2 - weight), cls(0.7, 0.3)
