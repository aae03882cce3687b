"""Axis: the tokens along one side of a layer's weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Axis:
    """The tokens along one side of the weights: positions (n,), and as many texts, or none where they are unknown.

    >>> Axis(torch.tensor([4, 5]), ("the", "cat")).name(1), Axis(torch.tensor([4, 5])).name(1)
    ('cat', '#5')
    """

    positions: torch.Tensor
    tokens: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.positions)

    def name(self, index: int) -> str:
        """The token's text; without one, its position."""
        return self.tokens[index] if self.tokens else f"#{int(self.positions[index])}"
