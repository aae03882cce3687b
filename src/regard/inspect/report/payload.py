"""What the page's script is given: the numbers of a report, quantised, as one JSON object without any markup."""

from __future__ import annotations

import base64
import json
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.inspect.report.colours import LEAST, LEVELS, levels, palette
from regard.inspect.report.content import Content
from regard.inspect.report.findings import shown
from regard.inspect.report.grids import Grid, grids
from regard.inspect.report.layer import Axis, Layer

ENTRIES = 600_000  # (row, top key) pairs a page carries at most; beyond, one query a cell of the map
KEYS = 2048  # keys up to which each one's received mass is carried; beyond, the sum of a cell
BEST = 8
STEPS = 65535


def payload(report: Content, head: tuple[int, int] | None) -> str:
    """JSON that may stand in a script element of a page: no character of it begins markup or ends a line."""
    at, _ = report.shown(head)
    texts: list[tuple[str, ...]] = []
    entries = sum(layer.top_keys.numel() for layer in report.layers)
    content = {
        "unit": report.unit,
        "shown": [at.layer, at.head],
        "palette": palette(),
        "levels": LEVELS,
        "least": LEAST,
        "grids": [_grid(one) for one in grids(report.layers, report.context, report.unit)],
        "layers": [_layer(layer, texts, entries <= ENTRIES) for layer in report.layers],
        "texts": texts,
    }
    return escaped(json.dumps(content, separators=(",", ":"), allow_nan=False))


def escaped(text: str) -> str:
    """JSON as it may stand in a script element: `<`, `>` and `&` as escapes. Anything beyond ASCII is one already."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _grid(grid: Grid) -> dict[str, Any]:
    values = [[value if math.isfinite(value) else None for value in row] for row in grid.values]
    return {"label": grid.label, "values": values}


def _layer(layer: Layer, texts: list[tuple[str, ...]], every: bool) -> dict[str, Any]:
    rows = torch.arange(len(layer.queries)) if every else layer.row_edges[:-1]
    keys = torch.arange(len(layer.keys) + 1) if len(layer.keys) <= KEYS else layer.col_edges
    received = torch.stack([layer.received[:, a:b].sum(-1) for a, b in pairwise(keys.tolist())], -1)
    best = layer.received.topk(min(BEST, len(layer.keys)), -1)
    wide = len(layer.keys) >= STEPS
    return {
        "name": layer.name,
        "heads": layer.heads,
        "queries": _axis(layer.queries, texts),
        "keys": _axis(layer.keys, texts),
        "rowEdges": layer.row_edges.tolist(),
        "colEdges": layer.col_edges.tolist(),
        "maps": _packed(levels(layer.maps, layer.cells)),
        "rows": None if every else rows.tolist(),
        "topKeys": _packed(layer.top_keys[:, rows].to(torch.int32 if wide else torch.int16)),
        "wide": wide,
        "topWeights": _shares(layer.top_weights[:, rows], 1.0),
        "entropy": _shares(layer.entropy[:, rows], float(layer.entropy.max()) or 1.0),
        "entropyScale": float(layer.entropy.max()) or 1.0,
        "rank": layer.top_keys.shape[-1],
        "keyEdges": None if len(layer.keys) <= KEYS else keys.tolist(),
        "received": _shares(received, float(received.max()) or 1.0),
        "receivedScale": float(received.max()) or 1.0,
        "best": [
            [[key, round(mass, 4)] for key, mass in zip(*of_head, strict=True)]
            for of_head in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
    }


def _axis(axis: Axis, texts: list[tuple[str, ...]]) -> dict[str, Any]:
    """How many tokens, the position of the first, and which of the texts is theirs; -1 for none."""
    first = int(axis.positions[0])
    if not axis.tokens:
        return {"n": len(axis), "first": first, "text": -1}
    tokens = tuple(shown(token, 40) for token in axis.tokens)
    if tokens not in texts:
        texts.append(tokens)
    return {"n": len(axis), "first": first, "text": texts.index(tokens)}


def _shares(values: Tensor, scale: float) -> str:
    """Numbers from 0 to scale, in 65,535 steps."""
    steps = (values.double() / scale * STEPS).round().clamp(0, STEPS).to(torch.int32)
    return _packed(torch.where(steps > 32767, steps - 65536, steps).to(torch.int16))


def _packed(values: Tensor) -> str:
    """The bytes of a tensor, least significant first, in base64."""
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()
