"""Colours of weights: one logarithmic scale for the picture and for the page."""

from __future__ import annotations

import torch
from torch import Tensor

# Light to dark in even steps of lightness, by way of yellow, red and violet, so that it reads in grey too.
RAMP = (
    *("#fbf7e8", "#f9e3ab", "#fec171", "#fe9652", "#f16653"),
    *("#d03765", "#9d1f74", "#631778", "#32175f", "#140f34"),
)
LEAST = 1e-4  # the weight at the light end, and below it
LEVELS = 255  # 0 is LEAST or less, LEVELS - 1 is a weight of 1
IMPOSSIBLE = 255  # the level of a cell that holds no visible pair


def levels(weights: Tensor, possible: Tensor) -> Tensor:
    """Where weights stand on the logarithmic scale: uint8, IMPOSSIBLE where no pair is visible; NaN stands at 0.

    >>> levels(torch.tensor([1.0, 0.01, 1e-4, 0.0]), torch.tensor([True, True, True, False])).tolist()
    [254, 127, 0, 255]
    """
    most = torch.tensor(LEAST, dtype=torch.float32, device="cpu").log10()
    share = 1 - weights.nan_to_num(0).clamp(min=LEAST).log10() / most
    level = (share * (LEVELS - 1)).round().clamp(0, LEVELS - 1)
    return torch.where(possible, level, IMPOSSIBLE).to(torch.uint8)


def palette() -> list[tuple[int, int, int]]:
    """The LEVELS colours, light to dark, as red, green, blue from 0 to 255."""
    stops = [tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in RAMP]
    found: list[tuple[int, int, int]] = []
    for level in range(LEVELS):
        place = level * (len(stops) - 1) / (LEVELS - 1)
        low = min(int(place), len(stops) - 2)
        red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(stops[low], stops[low + 1], strict=True))
        found.append((red, green, blue))
    return found
