"""Grids: the numbers that are shown as a table of layers × heads, and their scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

import regard.inspect.report.heads as heads
from regard.inspect.report.layer import Layer

LEAST = 10  # percent of rows from which a grid is worth its room


@dataclass(frozen=True)
class Grid:
    """A number a head: one tuple a layer, the quantity's name and unit, and the ends of its scale."""

    title: str
    unit: str
    values: tuple[tuple[float, ...], ...]
    low: float
    high: float

    @property
    def label(self) -> str:
        """The title with its unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def share(self, value: float) -> float:
        """Where on the scale a value stands, from 0 to 1; 0 for one that is no number."""
        if not math.isfinite(value) or self.high <= self.low:
            return 0.0
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def overview(layers: Sequence[Layer], unit: str) -> tuple[Grid, Grid, Grid]:
    """Mean entropy, first-key mass and the largest score of each head."""
    entropy = [heads.mean_entropy(layer) for layer in layers]
    first = [100 * heads.first_key_mass(layer) for layer in layers]
    peaks = [heads.largest_score(layer) for layer in layers]
    finite = [value for peak in peaks for value in peak.tolist() if math.isfinite(value)]
    return (
        _grid("entropy", "nats", entropy, 0, max((float(t.max()) for t in entropy if len(t)), default=0)),
        _grid(f"first {unit}", "% of mass", first, 0, max(10, *(float(t.max()) for t in first if len(t)))),
        _grid("max score", "", peaks, min((0.0, *finite)), max((0.0, *finite))),
    )


def grids(layers: Sequence[Layer], context: int, unit: str) -> tuple[Grid, ...]:
    """The overview, and the shares of rows that look at the previous token, the next one, and behind a copy.

    A grid whose shares are all below LEAST is left out.
    """
    shares = {
        f"previous {unit}": [heads.looks_by(layer, -1) for layer in layers],
        f"next {unit}": [heads.looks_by(layer, 1) for layer in layers],
        "induction": [heads.induction(layer, context)[0] for layer in layers],
    }
    found = (_grid(title, "% of rows", [100 * t for t in of], 0, 100) for title, of in shares.items())
    return (
        *overview(layers, unit),
        *(one for one in found if any(value >= LEAST for row in one.values for value in row)),
    )


def _grid(title: str, unit: str, values: Sequence[Tensor], low: float, high: float) -> Grid:
    return Grid(title, unit, tuple(tuple(t.tolist()) for t in values), float(f"{low:.3g}"), float(f"{high:.3g}"))
