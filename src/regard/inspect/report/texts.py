"""TextReports: the reports on several texts, and the means over them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import regard.core.html as html
import regard.inspect.report.printed as printed
import regard.inspect.report.text as text
from regard.core.shapes import count_of
from regard.inspect.report.grids import Grid, mean_grids, overview, shares, worth_showing
from regard.inspect.report.report import Report
from regard.inspect.tables import head_grid


@dataclass(frozen=True, eq=False, repr=False)
class TextReports:
    """What a model did on several texts: print it for means over the texts, index it for one text's Report.

    A mean is over texts, each of which counts as much as the others, however long it is. Findings and maps are of one
    text each: print(reports[0]), reports[0].save("first.html"); reports.save("look.html") writes those of all, a
    file each.
    """

    reports: tuple[Report, ...]

    def __len__(self) -> int:
        return len(self.reports)

    def __getitem__(self, index: int) -> Report:
        return self.reports[index]

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """A number a head: entropy, mass on the first token, largest score; and shares of rows worth showing."""
        means = mean_grids([overview(one.layers, one.unit) for one in self])
        parts = mean_grids([shares(one.layers, one.context, one.unit) for one in self])
        return (*means, *filter(worth_showing, parts))

    def text(self, width: int = 80) -> str:
        """The means for a terminal, then a line for each text."""
        pictures = printed.shelves([printed.grid(one) for one in self.grids], width)
        head = f"{text.name(self[0])}  mean over {count_of(len(self), 'text')}"
        each = [
            line
            for number, one in enumerate(self)
            for line in textwrap.wrap(f"[{number}]  {text.facts(one)}", width, subsequent_indent="     ")
        ]
        return "\n".join([*textwrap.wrap(head, width), "", *pictures, "", *each])

    def save(self, path: str | PathLike[str], head: tuple[int, int] | str | None = None) -> tuple[Path, ...]:
        """Writes a file for each text, numbered as the reports are: look.png is look-0.png, look-1.png, ...

        Returns their paths. The suffix says what they are written as, and `head` is drawn large, as in Report.save.
        Raises ValueError for another suffix, and for a head that one of the texts' reports lacks; nothing is written
        then.
        """
        path = Path(path)
        heads = [one.find(head) if isinstance(head, str) else head for one in self]
        for one, at in zip(self, heads, strict=True):
            one.shown(at)  # refused before a file is written
        digits = len(str(len(self) - 1))
        found = tuple(path.with_stem(f"{path.stem}-{number:0{digits}}") for number in range(len(self)))
        for one, at, file in zip(self, heads, found, strict=True):
            one.save(file, at)
        return found

    def __repr__(self) -> str:
        return f"TextReports({count_of(len(self), 'text')}, {text.name(self[0])})"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The means for a notebook, then a row for each text."""
        grids = [head_grid(one.label, one.values) for one in self.grids]
        rows = [(f"[{number}]", text.facts(one)) for number, one in enumerate(self)]
        title = f"{text.name(self[0])}, mean over {count_of(len(self), 'text')}"
        return html.panel(title, html.side_by_side(*grids), html.table(rows))
