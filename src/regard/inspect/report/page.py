"""The page: a report as one HTML file that needs no network; and the part of it that needs no script."""

from __future__ import annotations

import base64
import hashlib
import math
from html import escape
from importlib.resources import files
from string import Template
from typing import BinaryIO

from regard.inspect.report.colours import levels, palette
from regard.inspect.report.content import Content
from regard.inspect.report.grids import Grid, overview
from regard.inspect.report.payload import payload
from regard.inspect.report.png import png
from regard.inspect.report.text import facts


def write(report: Content, file: BinaryIO, head: tuple[int, int] | None) -> None:
    """Writes the page into a file, UTF-8."""
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = Template(_asset("page.html")).substitute(
        title=escape(report.title),
        digest=digest,  # this script may run, and no other
        css=_asset("page.css"),
        overview=_overview(report, head),
        figure=_still(report, head),
        data=payload(report, head),
        script=script,
    )
    file.write(page.encode("utf-8", "replace"))  # a lone surrogate is no text


def fragment(report: Content) -> str:
    """The overview for a notebook's cell: the grids, the findings, and the map of the striking head; no script."""
    css = _asset("page.css")
    return f'<div class="regard"><style>{css}</style>{_overview(report, None)}{_still(report, None)}</div>'


def _script() -> str:
    """The parts of the script, in a scope of their own."""
    parts = "\n".join(_asset(name) for name in ("page_draw.js", "page.js"))
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _asset(name: str) -> str:
    return (files("regard.inspect.report") / name).read_text(encoding="utf-8")


def _overview(report: Content, head: tuple[int, int] | None) -> str:
    at, _ = report.shown(head)
    hues = ("teal", "amber", "violet")
    tables = "".join(
        _table(grid, hue, (at.layer, at.head))
        for grid, hue in zip(overview(report.layers, report.unit), hues, strict=True)
    )
    said = "".join(
        f'<li>{escape(found.said)}<span class="rule">{escape(found.rule)}</span></li>' for found in report.findings
    )
    return (
        f"<header><h1>{escape(report.title)}</h1>"
        f'<p class="facts"><span>{escape(report.model)}</span> {escape(facts(report))}</p></header>'
        f'<section aria-label="findings"><ul class="findings">{said}</ul></section>'
        f'<section class="grids" aria-label="layers and heads">{tables}</section>'
    )


def _table(grid: Grid, hue: str, marked: tuple[int, int]) -> str:
    heads = "".join(f'<th scope="col">{head}</th>' for head in range(max(map(len, grid.values))))
    rows = "".join(
        f'<tr><th scope="row">L{layer}</th>{"".join(_cell(grid, layer, head, marked) for head in range(len(row)))}</tr>'
        for layer, row in enumerate(grid.values)
    )
    corner = '<td class="corner"></td>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(grid.label)}"><table class="grid {hue}">'
        f"<caption>{escape(grid.label)}</caption><thead><tr>{corner}{heads}</tr></thead><tbody>{rows}</tbody>"
        "</table></div>"
    )


def _cell(grid: Grid, layer: int, head: int, marked: tuple[int, int]) -> str:
    value = grid.values[layer][head]
    number = "–" if not math.isfinite(value) else f"{value:.0f}" if abs(value) >= 10 else f"{value:.1f}"
    on = ' class="on"' if (layer, head) == marked else ""
    return f'<td{on} data-at="{layer},{head}" style="--v:{100 * grid.share(value):.0f}%">{number}</td>'


def _still(report: Content, head: tuple[int, int] | None) -> str:
    """The map of one head as a picture, on light ground and on dark."""
    at, title = report.shown(head)
    layer, colours = report.layers[at.layer], palette()
    cells = levels(layer.maps[at.head], layer.cells)
    light, dark = (_data_uri(png(cells, shades)) for shades in (colours, colours[::-1]))
    alt = f"{title}: weights of {len(layer.queries):,} queries (down) on {len(layer.keys):,} keys (across)"
    return (
        f'<figure class="still" id="still"><figcaption>{escape(title)}</figcaption><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(alt)}"></picture>'
        "<p>queries downwards, keys to the right; logarithmic colours from 0.0001 to 1; grey: cannot attend</p>"
        "</figure>"
    )


def _data_uri(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
