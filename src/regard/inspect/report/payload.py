"""The data of the page's script: the numbers of a report, quantised, as one JSON object without any markup."""

from __future__ import annotations

import base64
import json
import math
import zlib
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.inspect.facts.pooled import Cells
from regard.inspect.facts.quantised import STEPS
from regard.inspect.report.axis import Axis
from regard.inspect.report.carried_layer import CarriedLayer
from regard.inspect.report.circuit_content import circuit_content
from regard.inspect.report.colours import LEAST, LEVELS, levels, palette
from regard.inspect.report.content import Content
from regard.inspect.report.findings import shown
from regard.inspect.report.grids import Grid
from regard.inspect.report.layer import COLUMNS, Layer
from regard.inspect.report.picture import Picture
from regard.inspect.report.scales import largest_finite

WEIGHTS = 64_000_000  # weights that a page carries at most, a byte each before they are compressed
ENTRIES = 600_000  # else: (row, top key) pairs that it carries at most; beyond, one query a cell of the map
KEYS = 2048  # keys up to which each one's received mass is carried; beyond, the sum of a cell
THUMB = 40  # cells of a thumbnail, each way
BEST = 8
SHARES = 65535


def payload(report: Content, head: tuple[int, int] | None) -> str:
    """JSON that may stand in a script element of a page: no character of it begins markup or ends a line."""
    at, _ = report.shown(head)
    texts: list[tuple[str, ...]] = []
    whole = 0 < sum(layer.weights.numel() for layer in report.layers) <= WEIGHTS
    every = sum(layer.top_keys.numel() for layer in report.layers) <= ENTRIES
    content = {
        "unit": report.unit,
        "shown": [at.layer, at.head],
        "palette": palette(),
        "levels": LEVELS,
        "least": LEAST,
        "steps": STEPS,
        "grids": [grid_content(one) for one in report.grids],
        "findings": [
            {"title": found.said.split(":")[0], "heads": [[one.layer, one.head] for one in found.heads]}
            for found in report.findings
        ],
        "layers": [layer_content(layer, texts, whole and layer.weights.numel() > 0, every) for layer in report.layers],
        "texts": texts,
        "carried": _carried(report, whole, every),
        "circuits": circuit_content(report),
        "second": report.second_text,
        "picture": None if report.picture is None else picture_content(report.picture),
    }
    return escaped(json.dumps(content, separators=(",", ":"), allow_nan=False))


def escaped(text: str) -> str:
    """JSON as it may stand in a script element: `<`, `>` and `&` as escapes. Anything beyond ASCII is one already."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def picture_content(picture: Picture) -> dict[str, int]:
    return {"rows": picture.rows, "columns": picture.columns, "special": picture.special}


def grid_content(grid: Grid) -> dict[str, Any]:
    values = [[value if math.isfinite(value) else None for value in row] for row in grid.values]
    return {"label": grid.label, "values": values, "signs": grid.signs}


def layer_content(layer: Layer, texts: list[tuple[str, ...]], whole: bool, every: bool) -> dict[str, Any]:
    """A layer with all of its weights, or with its pooled map and the heaviest keys of every row, or of some."""
    rows = torch.arange(len(layer.queries), dtype=torch.int64, device="cpu") if whole or every else layer.row_edges[:-1]
    none = torch.empty(0, dtype=torch.uint8, device="cpu")
    thumbs = levels(*_thumbnails(layer))
    return {
        "name": layer.name,
        "place": layer.place,
        "heads": layer.heads,
        "queries": axis_content(layer.queries, texts),
        "keys": axis_content(layer.keys, texts),
        "rowEdges": layer.row_edges.tolist(),
        "colEdges": layer.col_edges.tolist(),
        "thumb": list(thumbs.shape[1:]),
        "thumbs": packed(thumbs),
        "weights": packed(layer.weights if whole else none),
        "maps": packed(none if whole else levels(layer.maps, layer.cells)),
        "spans": [_differences(none if whole else ends) for ends in (layer.earliest, layer.latest)],
        "rows": None if whole or every else rows.tolist(),
        "whole": whole,
        "wide": len(layer.keys) >= SHARES,
        **_heaviest(layer, layer.top_keys[:, rows], layer.top_weights[:, rows], whole),
        "rank": layer.top_keys.shape[-1],
        "keyEdges": None if len(layer.keys) <= KEYS else layer.col_edges.tolist(),
        "best": _best(layer, layer.received),
        **_columns(layer, rows),
    }


def _columns(layer: Layer, rows: Tensor) -> dict[str, Any]:
    """Those that are on the page, their names as `columns`, and the number that the largest share stands for."""
    found: dict[str, Any] = {"columns": [name for name, column in COLUMNS.items() if column.on_page]}
    for name in found["columns"]:
        values: Tensor = getattr(layer, name)
        of_rows = COLUMNS[name].axes == "head, query"
        values = values if of_rows else _of_page_keys(layer, values)
        scale = largest_finite(values) or 1.0
        found |= {name: _shares(values[:, rows] if of_rows else values, scale), f"{name}Scale": scale}
    return found


def _carried(report: Content, whole: bool, every: bool) -> list[dict[str, Any]] | None:
    """What each layer carries, in shares of the largest norm of each head; None where that was not measured."""
    carried = next((one.carried_by_layer for one in report.head_results if one.carried_by_layer), None)
    if carried is None:
        return None
    return [
        _carried_layer(layer, one, whole and layer.weights.numel() > 0, every)
        for layer, one in zip(report.layers, carried, strict=True)
    ]


def _carried_layer(layer: Layer, carried: CarriedLayer, whole: bool, every: bool) -> dict[str, Any]:
    """The norms of a layer's keys, from which the page makes all pairs; or its map and the keys that carry most."""
    most = carried.norms.nan_to_num(0).amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    scale, none = most[:, None, None], torch.empty(0, dtype=torch.uint8, device="cpu")
    rows = slice(None) if every else layer.row_edges[:-1]
    return {
        "most": most.tolist(),
        "norms": _shares(carried.norms / most[:, None], 1.0),
        "maps": packed(none if whole else levels(carried.map / scale, layer.cells)),
        **_heaviest(layer, carried.top.keys[:, rows], (carried.top.weights / scale)[:, rows], whole),
        **_received(layer, carried.received),
    }


def _heaviest(layer: Layer, keys: Tensor, weights: Tensor, whole: bool) -> dict[str, Any]:
    """The heaviest keys of some rows, and their weights or shares; nothing of a layer whose every weight is there."""
    if whole:
        nothing = packed(torch.empty(0, dtype=torch.uint8, device="cpu"))
        return {"topKeys": nothing, "topWeights": nothing}
    wide = torch.int32 if len(layer.keys) >= SHARES else torch.int16
    return {"topKeys": packed(keys.to(wide)), "topWeights": _shares(weights, 1.0)}


def _received(layer: Layer, received: Tensor) -> dict[str, Any]:
    """What keys receive, (h, nk), and which of them receive most."""
    sums = _of_page_keys(layer, received)
    return {"received": _shares(sums, largest_finite(sums) or 1.0), "best": _best(layer, received)}


def _of_page_keys(layer: Layer, values: Tensor) -> Tensor:
    """A number a key, (h, nk): of each or, of many, the sums of cells."""
    edges = list(range(len(layer.keys) + 1)) if len(layer.keys) <= KEYS else layer.col_edges.tolist()
    return torch.stack([values[:, a:b].sum(-1) for a, b in pairwise(edges)], -1)


def _best(layer: Layer, received: Tensor) -> list[list[list[float]]]:
    """The keys that receive most, and how much, of each head."""
    best = received.nan_to_num(0).topk(min(BEST, len(layer.keys)), -1)
    return [
        [[key, round(mass, 4)] for key, mass in zip(*of_head, strict=True)]
        for of_head in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _thumbnails(layer: Layer) -> tuple[Tensor, Tensor]:
    """The maps and their cells, pooled to at most THUMB × THUMB: the mass on a cell's keys, mean of its queries."""
    count, width = layer.maps.shape[-2:]
    rows, cols = Cells.of(count, THUMB), Cells.of(width, THUMB)
    of_row = rows.members(slice(0, count), layer.maps)
    of_col = cols.members(slice(0, width), layer.maps)
    mean = of_row.mT / of_row.sum(0)[:, None]
    return mean @ layer.maps @ of_col, (of_row.mT @ layer.cells.to(of_row.dtype) @ of_col) > 0


def axis_content(axis: Axis, texts: list[tuple[str, ...]]) -> dict[str, Any]:
    """How many tokens, the position of the first, those of all where they do not grow by one, and the texts' number."""
    positions, text = axis.positions, -1
    if axis.tokens:
        tokens = tuple(shown(token, 40) for token in axis.tokens)
        if tokens not in texts:
            texts.append(tokens)
        text = texts.index(tokens)
    numbers = None if bool((positions.diff() == 1).all()) else positions.tolist()
    return {"n": len(axis), "first": int(positions[0]), "numbers": numbers, "text": text}


def _shares(values: Tensor, scale: float) -> str:
    """Numbers from 0 to scale, in 65,535 steps; NaN is 0."""
    steps = (values.double().nan_to_num(0) / scale * SHARES).round().clamp(0, SHARES).to(torch.int32)
    return packed(torch.where(steps > 32767, steps - 65536, steps).to(torch.int16))


def _differences(values: Tensor) -> str:
    """Whole numbers, each as its difference from the one before: ends of spans grow by one, which packs well."""
    return packed(torch.diff(values.to(torch.int32), prepend=values.new_zeros(1, dtype=torch.int32)))


def packed(values: Tensor) -> str:
    """The bytes of a tensor, least significant first, compressed by zlib, in base64."""
    # Weights are noise to a search for repeats: Z_FILTERED leaves most of them to Huffman's code, a tenth smaller.
    coder = zlib.compressobj(6, zlib.DEFLATED, 15, 9, zlib.Z_FILTERED)
    return base64.b64encode(coder.compress(values.contiguous().numpy().tobytes()) + coder.flush()).decode()
