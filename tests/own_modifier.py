"""A modifier of a person's: a function of scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

import regard as rg
from regard.core.region import Region


@dataclass(frozen=True)
class OfScores(rg.Modifier):
    """fn(s)."""

    positional = False
    fn: Callable[[Tensor], Tensor]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.fn(s)
