"""What a notebook shows of findings and of numbers of heads: tables and small pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import regard.core.html as html
from regard.inspect.tables import CELL, head_grid, heat, text_of


def findings_table(found: Iterable[tuple[str, str]]) -> html.Markup:
    """A row for each finding: what it says, and its rule."""
    rows = list(found)
    return html.table(rows, ("finding", "rule")) if rows else html.quiet("none")


def head_figure(
    label: str, values: Sequence[Sequence[float]], rows: Sequence[str], signs: tuple[str, str] | None
) -> html.Markup:
    """A number a head, layers down and heads across; of numbers with two directions, signs, their size.

    rows: what each layer is called.
    """
    if signs is None:
        return head_grid(label, values)
    sizes = [[abs(value) for value in row] for row in values]
    shown = heat(sizes, f"{label}: layers down, heads across, by size", CELL)
    every = [(value, f"{rows[n]}H{h}") for n, row in enumerate(values) for h, value in enumerate(row)]
    ends = [(f(one for one in every if math.isfinite(one[0])), sign) for f, sign in ((max, signs[1]), (min, signs[0]))]
    said = [f"{text_of(value).replace('-', '−')} at {name} ({sign})" for (value, name), sign in ends]
    return html.figure(label, shown, f"strong is far from 0: {', '.join(said)}")
