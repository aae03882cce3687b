"""Clamp: scores kept between two numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard.core.region import Frame, Region
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.scores.algebra import Modifier, Score


@answers_wrong_calls(
    {
        **dict.fromkeys(("min", "minimum", "lower"), "write low="),
        **dict.fromkeys(("max", "maximum", "upper"), "write high="),
    },
    "Clamp(-50, 50) keeps the scores within ±50.",
)
@dataclass(frozen=True)
class Clamp(Modifier):
    """s -> min(max(s, low), high): scores below `low` become low, scores above `high` become high.

    low, high: numbers, low < high; infinite for no bound on that side. ValueError for others. The gradient of a score
    is that of the score after it where low ≤ s ≤ high, and 0 elsewhere, as that of torch.clamp. NaN stays NaN. It
    clamps the score before it: ScaledDot() >> Clamp(-50, 50) >> Bias(b) adds b afterwards; hidden pairs stay hidden.
    Native kernels support it before all modifiers that add to the scores; after one of them other backends run the
    call, and `explain` says so.
    Source: GLIP (arXiv 2112.03857) and Grounding DINO (arXiv 2303.05499), whose layers clamp scores at ±50,000.

    >>> import regard as rg
    >>> q, k = torch.ones(1, 1), torch.tensor([[0.0], [9.0]])
    >>> rg.attention_weights(q, k, score=rg.Dot() >> Clamp(-1.0, 1.0))
    tensor([[0.2689, 0.7311]])
    """

    formula: ClassVar[str] = "s -> min(max(s, low), high)"
    head_axes: ClassVar[Mapping[str, int] | None] = {}
    positional: ClassVar[bool] = False
    indexed: ClassVar[bool] = False
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            x = getattr(self, name)
            if isinstance(x, bool) or not isinstance(x, (int, float)):
                raise TypeError(f"Clamp.{name} is {kind_of(x)}; expected a number, or ±inf for no bound.")
            object.__setattr__(self, name, float(x))
        if not self.low < self.high or (self.low, self.high) == (-math.inf, math.inf):
            raise ValueError(f"Clamp(low={self.low}, high={self.high}): expected low < high, one of them finite.")

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s.clamp(self.low, self.high)

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(-0.5, 0.7), cls(high=0.1)
