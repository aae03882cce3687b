"""Grids: the numbers that are shown as a table of layers × heads, and their scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

import regard.core.html as html
import regard.inspect.report.heads as heads
from regard.core.shapes import count_of
from regard.inspect.report.induction import induction
from regard.inspect.report.layer import Layer
from regard.inspect.report.notebook import head_figure
from regard.inspect.report.scales import largest_finite

LEAST = 10  # percent of rows from which a grid is worth its room


@dataclass(frozen=True)
class Grid:
    """A number a head: one tuple a layer, the quantity's name and unit, the ends of its scale, the layers' names.

    signs  what a number below 0 and one above 0 mean, where that matters: the scale then goes from -high to high
    """

    title: str
    unit: str
    values: tuple[tuple[float, ...], ...]
    low: float
    high: float
    places: tuple[str, ...] = ()
    signs: tuple[str, str] | None = None

    @staticmethod
    def signed(title: str, unit: str, values: Sequence[Tensor], places: Sequence[str], signs: tuple[str, str]) -> Grid:
        """A grid whose numbers have two directions, with the largest of either at both ends of its scale."""
        most = float(f"{largest_finite(*(t.abs() for t in values)):.3g}")
        return Grid(title, unit, tuple(tuple(t.tolist()) for t in values), -most, most, tuple(places), signs)

    def __repr__(self) -> str:
        layers, heads = count_of(len(self.values), "layer"), count_of(sum(map(len, self.values)), "head")
        return f"Grid({self.label!r}, {layers}, {heads}, {self.low:.4g} to {self.high:.4g})"

    def _repr_html_(self) -> str:
        """Its picture for a notebook."""
        return html.element("div", head_figure(self.label, self.values, self.rows, self.signs))

    @property
    def rows(self) -> tuple[str, ...]:
        """What each layer is called: its place in the model, or its number."""
        return tuple(place or f"L{n}" for n, place in enumerate(self.places or ("",) * len(self.values)))

    @property
    def label(self) -> str:
        """The title with its unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def share(self, value: float) -> float:
        """Where on the scale a value stands, from 0 to 1, or from -1 where signs matter; 0 for one that is no number.

        >>> grid = Grid("loss", "", ((2.0, -1.0),), -2.0, 2.0, signs=("falls", "grows"))
        >>> grid.share(2.0), grid.share(-1.0), Grid("entropy", "", ((2.0,),), 0.0, 4.0).share(2.0)
        (1.0, -0.5, 0.5)
        """
        if not math.isfinite(value) or self.high <= self.low:
            return 0.0
        if self.signs is not None:
            return min(max(value / self.high, -1.0), 1.0)
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def number(self, value: float) -> str:
        """A value as a table shows it: short, and with its sign where that matters.

        >>> grid = Grid("loss", "", ((0.52, -0.03),), -0.52, 0.52, signs=("falls", "grows"))
        >>> [grid.number(value) for value in (0.52, -0.03, 0.001, math.nan)]
        ['+0.52', '−0.03', '0.00', '–']
        """
        if not math.isfinite(value):
            return "–"
        most = max(abs(self.low), abs(self.high))
        least = 1 if self.signs is None else 2
        digits = 0 if abs(value) >= 10 else least if most == 0 else max(least, 1 - math.floor(math.log10(most)))
        rounded = round(value, digits)
        sign = "" if rounded == 0 else "−" if rounded < 0 else "+" if self.signs is not None else ""
        return f"{sign}{abs(rounded):.{digits}f}"


def overview(layers: Sequence[Layer], unit: str) -> tuple[Grid, Grid, Grid]:
    """Mean entropy, first-key mass and the largest score of each head."""
    entropy = [heads.mean_entropy(layer) for layer in layers]
    first = [100 * heads.first_key_mass(layer) for layer in layers]
    peaks = [heads.largest_score(layer) for layer in layers]
    finite = [value for peak in peaks for value in peak.tolist() if math.isfinite(value)]
    return (
        grid_of(layers, "entropy", "nats", entropy, 0, largest_finite(*entropy)),
        grid_of(layers, f"first {unit}", "% of mass", first, 0, max(10, largest_finite(*first))),
        grid_of(layers, "max score", "", peaks, min((0.0, *finite)), max((0.0, *finite))),
    )


def worth_showing(grid: Grid) -> bool:
    """Whether a grid of shares has one of LEAST or more."""
    return any(value >= LEAST for row in grid.values for value in row)


def shares(layers: Sequence[Layer], context: int, unit: str) -> tuple[Grid, ...]:
    """The shares of rows that look at the previous token, at the next one, and behind a copy of their context."""
    found = {
        f"previous {unit}": [heads.looks_by(layer, -1)[0] for layer in layers],
        f"next {unit}": [heads.looks_by(layer, 1)[0] for layer in layers],
        "induction": [induction(layer, context).share for layer in layers],
    }
    return tuple(grid_of(layers, title, "% of rows", [100 * t for t in of], 0, 100) for title, of in found.items())


def mean_grids(texts: Sequence[tuple[Grid, ...]]) -> tuple[Grid, ...]:
    """The mean over texts of each head's number; what is not finite for a text is not finite in the mean."""
    found: list[Grid] = []
    for same in zip(*texts, strict=True):
        rows = zip(*(grid.values for grid in same), strict=True)
        values = tuple(tuple(sum(cell) / len(cell) for cell in zip(*row, strict=True)) for row in rows)
        low, high = min(grid.low for grid in same), max(grid.high for grid in same)
        found.append(replace(same[0], values=values, low=low, high=high))
    return tuple(found)


def grid_of(layers: Sequence[Layer], title: str, unit: str, values: Sequence[Tensor], low: float, high: float) -> Grid:
    """A grid of a tensor (h,) a layer, with the ends of its scale."""
    found, places = tuple(tuple(t.tolist()) for t in values), tuple(layer.place for layer in layers)
    return Grid(title, unit, found, float(f"{low:.3g}"), float(f"{high:.3g}"), places)
