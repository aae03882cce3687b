"""Comparison: two reports on the same heads, and which of these changed most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path

from torch import Tensor

import regard.inspect.report.page_compare as page_compare
import regard.inspect.report.printed as printed
import regard.inspect.report.save as save
import regard.inspect.report.text as text
from regard.core.shapes import count_of
from regard.inspect.facts.pooled import Cells
from regard.inspect.report.content import Content
from regard.inspect.report.findings import Head, percent
from regard.inspect.report.grids import Grid, overview
from regard.inspect.report.layer import Layer
from regard.inspect.report.page_parts import framed

LISTED = 12  # heads that are listed and shown, those that changed most


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """What differs between two reports: print it, or save it as a page with both maps of the heads that changed most.

    The change of a head is the mean, over the rows of its map, of ½ Σ_c |p_rc - p'_rc|: the share of the mass that lies
    on other keys (the total variation distance), 0 for the same weights, 1 where no key is shared. Maps are those of
    Layer, of up to 128 × 128 cells; where two texts have unlike lengths, both are pooled to the fewer cells, so that
    keys are compared by where in their text they stand. Raises ValueError where the reports have unlike heads.

    >>> from types import SimpleNamespace
    >>> import regard as rg, torch
    >>> def read(x):
    ...     mask = rg.Causal()
    ...     seen = rg.look(x, x, facts=rg.Report.FACTS, mask=mask)
    ...     call = SimpleNamespace(name="attention", seen=seen, view=mask.on(4, batch=(1,), heads=2))
    ...     return rg.Report.of([call], title="two heads", model="none")
    >>> one, other = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4)
    >>> other[:, 1] = 9 * torch.eye(4)
    >>> [(head.name, round(head.value, 2)) for head in read(one).compare(read(other)).heads]
    [('L0H1', 0.48), ('L0H0', 0.0)]
    """

    before: Content
    after: Content

    def __post_init__(self) -> None:
        counts = [[layer.heads for layer in report.layers] for report in (self.before, self.after)]
        if counts[0] != counts[1]:
            said = [f"{count_of(len(one), 'layer')} of {sorted(set(one))} heads" for one in counts]
            raise ValueError(f"compare: the reports have {said[0]} and {said[1]}; expected the same layers and heads.")

    @cached_property
    def change(self) -> Grid:
        """The change of each head, in percent of the mass."""
        pairs = zip(self.before.layers, self.after.layers, strict=True)
        values = tuple(tuple((100 * change(a, b)).tolist()) for a, b in pairs)
        places = tuple(layer.place for layer in self.before.layers)
        return Grid("change", "% of mass", values, 0.0, max(1.0, *(max(row) for row in values)), places)

    @property
    def heads(self) -> tuple[Head, ...]:
        """All heads, those that changed most first; the value of each is its change, from 0 to 1."""
        rows = zip(self.before.layers, self.change.values, strict=True)
        found = [
            Head(n, h, value / 100, place=layer.place)
            for n, (layer, row) in enumerate(rows)
            for h, value in enumerate(row)
        ]
        return tuple(sorted(found, key=lambda head: -head.value))

    def numbers(self, head: Head) -> tuple[str, ...]:
        """What the overview's numbers of a head were and are, as sentences."""
        grids = [overview(report.layers, report.unit) for report in (self.before, self.after)]
        values = [[grid.values[head.layer][head.head] for grid in of] for of in grids]
        return tuple(
            f"{grid.label} {_number(a)} → {_number(b)}"
            for grid, a, b in zip(grids[0], values[0], values[1], strict=True)
        )

    def text(self, width: int = 80) -> str:
        """The comparison for a terminal: the change of every head, and the numbers of those that changed most."""
        listed = [
            f"{head.name}  {percent(head.value)} of its mass: {', '.join(self.numbers(head))}" for head in self.heads
        ]
        names = [f"before: {text.name(self.before)}", f"after:  {text.name(self.after)}"]
        return "\n".join([*names, "", *printed.grid(self.change), "", *listed[:LISTED]])

    def html(self) -> str:
        """The page: the change of every head, and both maps of those that changed most, side by side; no script."""
        shown = [(head, self.numbers(head)) for head in self.heads[:LISTED]]
        return page_compare.html(self.before, self.after, self.change, shown)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the page. Raises ValueError for a suffix other than .html."""
        path = Path(path)
        if path.suffix.lower() != ".html":
            raise ValueError(f"{path.name} is not supported as a comparison's file; its suffix has to be .html.")
        with save.whole(path) as file:
            file.write(self.html().encode("utf-8", "replace"))

    def __repr__(self) -> str:
        return f"Comparison({text.name(self.before)}, {text.name(self.after)})"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return framed(self.html(), repr(self))


def change(a: Layer, b: Layer) -> Tensor:
    """The change of each head from one layer to another, (h,)."""
    rows, cols = (min(a.maps.shape[axis], b.maps.shape[axis]) for axis in (-2, -1))
    p, q = (_pooled(layer.maps, rows, cols) for layer in (a, b))
    seen = ((p + q).sum(-1) > 0).sum(-1).clamp(min=1)
    return (p - q).abs().sum((-1, -2)) / 2 / seen


def _pooled(maps: Tensor, rows: int, cols: int) -> Tensor:
    """Maps with fewer cells: the mass on the keys of each, mean of its queries."""
    count, width = maps.shape[-2:]
    of_row = Cells(count, rows).members(slice(0, count), maps)
    return (of_row / of_row.sum(0)).mT @ maps @ Cells(width, cols).members(slice(0, width), maps)


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "–"
