"""Parts of the report's HTML files that need no script: style sheets, tables of heads, pictures of maps."""

from __future__ import annotations

import base64
from html import escape
from importlib.resources import files

from regard.inspect.report.colours import levels, palette
from regard.inspect.report.grids import Grid
from regard.inspect.report.layer import Layer
from regard.inspect.report.png import png


def asset(name: str) -> str:
    """The text of a file that lies beside this one."""
    return (files("regard.inspect.report") / name).read_text(encoding="utf-8")


def table(grid: Grid, hue: str, marked: tuple[int, int]) -> str:
    """A grid as a table: teal, amber or violet, or blue and orange for numbers below and above 0; one head marked."""
    heads = "".join(f'<th scope="col">{head}</th>' for head in range(max(map(len, grid.values))))
    rows = "".join(
        f'<tr><th scope="row">{escape(grid.rows[layer])}</th>'
        f"{''.join(_cell(grid, layer, head, marked) for head in range(len(row)))}</tr>"
        for layer, row in enumerate(grid.values)
    )
    corner = '<td class="corner"></td>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(grid.label)}"><table class="grid {hue}">'
        f"<caption>{escape(grid.label)}{_signs(grid)}</caption><thead><tr>{corner}{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _signs(grid: Grid) -> str:
    """What the two colours of a grid mean; nothing for a scale of one colour."""
    if grid.signs is None:
        return ""
    below, above = map(escape, grid.signs)
    return f'<span class="signs"><i class="above"></i>+ {above}<i class="below"></i>− {below}</span>'


def _cell(grid: Grid, layer: int, head: int, marked: tuple[int, int]) -> str:
    value = grid.values[layer][head]
    share = grid.share(value)
    names = [name for name, there in (("on", (layer, head) == marked), ("below", share < 0)) if there]
    kind = f' class="{" ".join(names)}"' if names else ""
    return f'<td{kind} data-at="{layer},{head}" style="--v:{100 * abs(share):.0f}%">{grid.number(value)}</td>'


def picture(layer: Layer, head: int, alt: str) -> str:
    """The map of a head as a picture, on light ground and on dark."""
    cells, colours = levels(layer.maps[head], layer.cells), palette()
    light, dark = (data_uri(png(cells, shades)) for shades in (colours, colours[::-1]))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(alt)}"></picture>'
    )


def data_uri(image: bytes) -> str:
    """A PNG file as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def framed(html: str, title: str) -> str:
    """A whole page for a notebook's cell: in a frame that may run its own script and save files, no more."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" title="{escape(title)}" srcdoc="{escape(html)}" '
        'style="width: 100%; height: 860px; max-height: 92vh; border: 1px solid #8886; border-radius: 8px"></iframe>'
    )
