"""Temperature: scores divided by a number, or by one number a head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.core.region import Frame, Region
from regard.core.tracing import finite
from regard.core.wrong_calls import answers_wrong_calls
from regard.scores.algebra import Modifier, Score
from regard.scores.fields import number, shape_error_by_head


@answers_wrong_calls(
    dict.fromkeys(("temperature", "tau", "T"), "write Temperature(t)"), "Temperature(2.0) divides the scores by 2."
)
@dataclass(frozen=True)
class Temperature(Modifier):
    """s -> s / t_h: a temperature above 1 makes the weights more uniform, one below 1 sharpens them.

    t: a number above 0 (ValueError), or a floating-point tensor () or (heads,), which may be learned. Tensors are not
    checked: keep learned values positive, for example by exp. It divides the score before it: ScaledDot() >>
    Temperature(2.0) >> Bias(b) adds b undivided. The learned logit scale of Swin V2 is Cosine(1.0) >> Temperature(tau).
    Native kernels support it before all modifiers that add to the scores; after one of them other backends run the
    call, and `explain` says so.
    Source: Hinton et al. 2015 (arXiv 1503.02531); learned, for each head, Liu et al. 2022, Swin V2 (arXiv 2111.09883).

    >>> import regard as rg
    >>> q, k = torch.ones(1, 1), torch.tensor([[0.0], [1.0]])
    >>> rg.attention_weights(q, k, score=rg.Dot() >> Temperature(0.5))
    tensor([[0.1192, 0.8808]])
    """

    formula: ClassVar[str] = "s -> s / t_h"
    head_axes: ClassVar[Mapping[str, int] | None] = {"t": -1}
    positional: ClassVar[bool] = False
    indexed: ClassVar[bool] = False
    t: float | Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "t", number(self.t, "Temperature.t"))
        if not isinstance(self.t, Tensor) and not 0 < self.t < math.inf:
            raise ValueError(f"Temperature(t={self.t}): expected a finite number above 0.")

    def shape_error(self, frame: Frame) -> str | None:
        return shape_error_by_head(self.t, "Temperature.t", frame.heads)

    def modify(self, s: Tensor, at: Region) -> Tensor:
        if not isinstance(self.t, Tensor):
            return s / self.t
        t = at.heads(self.t).to(s.dtype)
        if finite(s):
            return s / t
        # 0 · inf is NaN: a hidden score that is not finite would make the temperature's gradient that
        fine = s.isfinite()
        return torch.where(fine, s.masked_fill(~fine, 0) / t, s / t.detach())

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(0.7), cls(torch.linspace(0.5, 2, frame.heads, dtype=torch.float64, device=frame.device))
