"""HTML for notebooks: tables and small pictures. All text is escaped; there is no script, and nothing is fetched.

Ink is `currentColor`, the colour of the text around: the same markup reads on light ground and on dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

SHADES, INK = 8, 0.85  # steps of a picture's ink, and how opaque the most is
LINE = "1px solid color-mix(in srgb, currentColor 20%, transparent)"
QUIET = "color:color-mix(in srgb, currentColor 75%, transparent);"
CELL = f"text-align:left;vertical-align:top;padding:3px 14px 3px 0;border:0;border-bottom:{LINE};font-weight:400;"


class Markup(str):
    """Text that is HTML already; every other text is escaped where it is put into an element."""

    __slots__ = ()


def element(tag: str, *content: str, **attributes: str) -> Markup:
    """An element around its content; aria_label="..." is the attribute aria-label.

    >>> element("td", "a < b", element("b", "c"), title='"')
    '<td title="&quot;">a &lt; b<b>c</b></td>'
    """
    named = "".join(f' {name.replace("_", "-")}="{_escaped(value)}"' for name, value in attributes.items())
    return Markup(f"<{tag}{named}>{''.join(map(_escaped, content))}</{tag}>")


def _escaped(text: str) -> str:
    """A lone surrogate, which no file can hold, becomes a question mark."""
    return text if type(text) is Markup else escape(text).encode("utf-8", "replace").decode()


def panel(title: str, *parts: Markup) -> str:
    """What a notebook shows of one object: its title, and the parts below."""
    style = "font:13px/1.5 system-ui,sans-serif;overflow-wrap:anywhere;max-width:100%;overflow-x:auto;"
    return element("div", element("div", title, style="font-weight:600;margin:0 0 6px;"), *parts, style=style)


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> Markup:
    """A row of cells each; the first one names its row, `head` the columns."""
    titles = [element("th", name, scope="col", style=CELL + QUIET) for name in head]
    lines = [
        element(
            "tr",
            element("th", row[0], scope="row", style=CELL + "white-space:nowrap;"),
            *(element("td", cell, style=CELL) for cell in row[1:]),
            style="background:none;",
        )
        for row in rows
    ]
    above = (element("thead", element("tr", *titles, style="background:none;")),) if titles else ()
    style = "border-collapse:collapse;border:0;margin:0 0 8px;font:inherit;font-variant-numeric:tabular-nums;"
    return element("table", *above, element("tbody", *lines), style=style)


def quiet(text: str) -> Markup:
    """A line of small print."""
    return element("div", text, style=QUIET + "font-size:12px;margin:2px 0 8px;")


def side_by_side(*parts: Markup) -> Markup:
    """Parts next to each other, as far as the width takes them."""
    return element("div", *parts, style="display:flex;flex-wrap:wrap;gap:6px 22px;align-items:flex-start;")


def picture(cells: Sequence[Sequence[float]], label: str, width: int, height: int) -> Markup:
    """A grid of cells (rows, columns) as ink from 0 (none) to 1, width × height pixels; NaN has none.

    `label` is what it is called where it cannot be seen.

    >>> 'd="M0 0h2v1h-2z"' in picture([[1.0, 1.0], [0.0, math.nan]], "two of four", 20, 20)
    True
    """
    columns = max(map(len, cells), default=0)
    paths: list[list[str]] = [[] for _ in range(SHADES + 1)]
    for y, row in enumerate(cells):
        x = 0
        for shade, run in groupby(map(_shade, row)):
            length = len(list(run))
            paths[shade].append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    ink = [
        element("path", d="".join(path), fill="currentColor", fill_opacity=f"{INK * shade / SHADES:.2g}")
        for shade, path in enumerate(paths)
        if path and shade
    ]
    return element(
        "svg",
        *ink,
        viewBox=f"0 0 {columns} {len(cells)}",
        width=str(width),
        height=str(height),
        preserveAspectRatio="none",
        shape_rendering="crispEdges",
        role="img",
        aria_label=label,
        style=f"display:block;outline:{LINE};max-width:100%;",
    )


def _shade(share: float) -> int:
    """0 for nothing alone: whatever is more has the lightest ink at least."""
    return 0 if math.isnan(share) or share <= 0 else max(1, round(min(share, 1.0) * SHADES))


def figure(title: str, shown: Markup, below: str = "") -> Markup:
    """A picture with a title above it and small print below."""
    return element("div", element("div", title, style=QUIET + "margin:0 0 3px;"), shown, quiet(below))
