"""The page of a comparison: signed maps of every pair of heads, both texts, and an overview that needs no script."""

from __future__ import annotations

import json
from html import escape
from itertools import pairwise
from string import Template
from typing import Any, BinaryIO

import torch
from torch import Tensor

from regard.inspect.facts.quantised import STEPS
from regard.inspect.report.alignment import NONE, Alignment
from regard.inspect.report.axis import Axis
from regard.inspect.report.colours import LEAST, LEVELS, palette
from regard.inspect.report.compared import Compared, joined
from regard.inspect.report.comparison_numbers import HeadPair
from regard.inspect.report.findings import percent, shown
from regard.inspect.report.page import findings_list, head_of, policy_of, script_of
from regard.inspect.report.page_parts import asset, data_uri, table
from regard.inspect.report.payload import escaped, grid_content, layer_content, picture_content
from regard.inspect.report.picture import Picture
from regard.inspect.report.png import png_of_pixels
from regard.inspect.report.text import facts, name

Numbers = list[list[int]]  # of each layer before with each layer after
SCRIPTS = (
    *("page_data", "page_address", "compare_state", "page_colour", "compare_colour", "page_frame", "page_tokens"),
    *("page_grids", "page_files", "page_save_map", "compare_map", "compare_picture", "compare_text", "compare"),
)
LISTED = 12  # heads whose numbers are listed, those that changed most


def write(found: Compared, file: BinaryIO, heads: HeadPair) -> None:
    """Writes the page into a file, UTF-8."""
    file.write(html(found, heads).encode("utf-8", "replace"))  # a lone surrogate is no text


def html(found: Compared, heads: HeadPair) -> str:
    """The page as one text; `heads` are shown first, one before and one after."""
    labels = found.labels
    title = " → ".join(labels) if labels[0] != labels[1] else labels[0]
    script = script_of(SCRIPTS)
    css = asset("page.css") + asset("page_live.css") + asset("page_compare.css")
    return Template(asset("page_compare.html")).substitute(
        head=head_of(title, policy_of(script, "'none'"), css),
        words=asset("page_words.html"),
        header=_header(found, title),
        before_image=_image(found.before.picture, "before"),
        after_image=_image(found.after.picture, "after"),
        before=escape(labels[0]),
        after=escape(labels[1]),
        grid=table(found.change, "violet", heads[0]),
        changed=_changed(found),
        data=_data(found, heads),
        script=script,
    )


def _header(found: Compared, title: str) -> str:
    read = "".join(
        f'<p class="facts"><i>{label}</i> <span>{escape(name(report))}</span> {escape(facts(report))}</p>'
        for label, report in (("before", found.before), ("after", found.after))
    )
    return f"<header><h1>{escape(title)}</h1>{read}</header>{findings_list(found.findings)}"


def _image(image: Picture | None, side: str) -> str:
    """The image that was read, below its patches; nothing for a text."""
    if image is None:
        return ""
    return (
        f'<div class="patches" id="{side}-patches"><img src="{data_uri(png_of_pixels(image.pixels))}" '
        f'alt="the image {side}"><canvas id="{side}-overlay" tabindex="0" role="img" '
        f'aria-label="changes of patches {side}; the arrow keys choose a patch"></canvas></div>'
    )


def _changed(found: Compared) -> str:
    return "".join(
        f'<li><a href="#{head.name}">{head.name}</a> {escape(found.before.layers[head.layer].name)}: '
        f"{percent(head.value)} of its mass; {escape(', '.join(found.numbers(head)))}</li>"
        for head in found.heads[:LISTED]
    )


def _data(found: Compared, heads: HeadPair) -> str:
    """What the script is given: the layers before, then those after, and how their rows and columns correspond."""
    texts: list[tuple[str, ...]] = []
    layers = [layer_content(layer, texts, found.by == "tokens", every=False) for side in found.layers for layer in side]
    axes, rows, cols = _axes(found, texts)
    content = {
        "by": found.by,
        "unit": found.before.unit,
        "shown": [list(head) for head in heads],
        "palette": palette(),
        "levels": LEVELS,
        "least": LEAST,
        "steps": STEPS,
        "grids": [grid_content(found.change)],
        "layers": layers,
        "count": len(found.before.layers),
        "axes": axes,
        "rows": rows,
        "cols": cols,
        "texts": texts,
        "pictures": {
            side: None if report.picture is None else picture_content(report.picture)
            for side, report in (("before", found.before), ("after", found.after))
        },
    }
    return escaped(json.dumps(content, separators=(",", ":"), allow_nan=False))


def _axes(found: Compared, texts: list[tuple[str, ...]]) -> tuple[list[dict[str, Any]], Numbers, Numbers]:
    """The alignments, each once; and of each layer before with each after, the numbers of two, -1 where none fits."""
    axes: list[dict[str, Any]] = []
    numbers: dict[tuple[object, ...], int] = {}

    def number(alignment: Alignment, first: Tensor | None) -> int:
        key = alignment.key, None if first is None else tuple(first.tolist())
        if key not in numbers:
            numbers[key] = len(axes)
            axes.append(_axis(alignment, first, texts))
        return numbers[key]

    count = range(len(found.before.layers))
    rows, cols = ([[-1 for _ in count] for _ in count] for _ in range(2))
    for a in count:
        for b in count:
            if found.fits(a, b):
                queries, keys = _alignments(found, a, b)
                rows[a][b], cols[a][b] = number(*queries), number(*keys)
    return axes, rows, cols


def _alignments(found: Compared, a: int, b: int) -> list[tuple[Alignment, Tensor | None]]:
    """Of queries and of keys; cells have the text before as names, and the number of their first token."""
    alignments, layer = found.alignments(a, b), found.layers[0][a]
    if found.by == "tokens":
        return [(alignment, None) for alignment in alignments]
    second = found.layers[1][b]
    sides = (
        ((layer.queries, layer.row_edges), (second.queries, second.row_edges)),
        ((layer.keys, layer.col_edges), (second.keys, second.col_edges)),
    )
    return [_named_cells(cells, *both) for cells, both in zip(alignments, sides, strict=True)]


def _named_cells(cells: Alignment, before: tuple[Axis, Tensor], after: tuple[Axis, Tensor]) -> tuple[Alignment, Tensor]:
    """The cells with the texts that they hold, if any those before; and the number of their first token."""
    names, others = _texts(*before), _texts(*after)
    firsts: list[int] = []
    said: list[str] = []
    for a, b in zip(cells.before.tolist(), cells.after.tolist(), strict=True):
        firsts.append(int(after[1][b] if a == NONE else before[1][a]))
        if names and others:
            said.append(f"{others[b]} (after)" if a == NONE else f"{names[a]} (before)" if b == NONE else names[a])
    return Alignment(cells.before, cells.after, tuple(said)), torch.tensor(firsts, dtype=torch.int64, device="cpu")


def _texts(axis: Axis, edges: Tensor) -> tuple[str, ...]:
    return tuple(shown(joined(axis.tokens[a:b]), 24) for a, b in pairwise(edges.tolist())) if axis.tokens else ()


def _axis(alignment: Alignment, numbers: Tensor | None, texts: list[tuple[str, ...]]) -> dict[str, Any]:
    if alignment.names:
        texts.append(alignment.names)
    return {
        "before": alignment.before.tolist(),
        "after": alignment.after.tolist(),
        "n": len(alignment),
        "first": 0,
        "numbers": None if numbers is None else numbers.tolist(),
        "text": len(texts) - 1 if alignment.names else -1,
    }
