"""The numbers of a comparison, for programs: as JSON, and as NumPy arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

import torch

from regard.inspect.report.compared import Compared
from regard.inspect.report.numbers import Array, plain, write_arrays

SCHEMA = "regard-comparison-1"
HeadPair = tuple[tuple[int, int], tuple[int, int]]


def write_json(found: Compared, file: BinaryIO, heads: HeadPair) -> None:
    """What is shown, as one JSON object: the change of each head, findings, which tokens correspond."""
    content = {
        "schema": SCHEMA,
        "before": {"title": found.before.title, "model": found.before.model},
        "after": {"title": found.after.title, "model": found.after.model},
        "by": found.by,
        "shown": [list(head) for head in heads],
        "findings": [asdict(one) for one in found.findings],
        "change": {**asdict(found.change), "values": plain(found.change.values)},
        "layers": [_layer(found, number) for number in range(len(found.before.layers))],
    }
    text = json.dumps(plain(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    file.write(text.encode("utf-8", "replace"))  # a lone surrogate is no text


def _layer(found: Compared, number: int) -> dict[str, Any]:
    pair = found.pair(number, number)
    sides = [{"before": axis.before, "after": axis.after, "names": axis.names} for axis in (pair.rows, pair.cols)]
    return {"name": found.before.layers[number].name, "queries": sides[0], "keys": sides[1]}


def write_npz(found: Compared, file: BinaryIO, heads: HeadPair) -> None:
    """The arrays of each layer: `moved/0`, the signed maps of its heads, and what their rows and columns are."""
    del heads  # arrays have none in front
    write_arrays(file, _arrays(found))


def _arrays(found: Compared) -> Iterator[tuple[str, Array]]:
    yield "schema", SCHEMA
    yield "by", found.by
    yield "names", [layer.name for layer in found.before.layers]
    for number, values in enumerate(found.change.values):
        pair = found.pair(number, number)
        yield f"change/{number}", torch.tensor(values, dtype=torch.float32, device="cpu") / 100
        yield f"moved/{number}", torch.stack([pair.moved(head, head) for head in range(len(values))])
        for name, axis in (("queries", pair.rows), ("keys", pair.cols)):
            if axis.names:
                yield f"{name}/{number}", list(axis.names)
            yield f"{name}_before/{number}", axis.before
            yield f"{name}_after/{number}", axis.after
        for when, side in zip(("before", "after"), found.layers, strict=True):
            yield f"row_edges_{when}/{number}", side[number].row_edges
            yield f"col_edges_{when}/{number}", side[number].col_edges
