"""The numbers of a report, for programs: as JSON, and as NumPy arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, BinaryIO
from zipfile import ZIP_DEFLATED, ZipFile

import torch
from torch import Tensor

from regard.inspect.report.axis import Axis
from regard.inspect.report.content import Content
from regard.inspect.report.head_result import HeadArray
from regard.inspect.report.layer import COLUMNS, Layer

SCHEMA = "regard-report-1"
Array = Tensor | str | bool | list[str]  # what is written as an array
DIGITS = 4  # significant digits in JSON
# The arrays of a layer, their axes and what they count in.
ARRAYS = {name: (column.axes, column.unit) for name, column in COLUMNS.items() if column.unit is not None}


def write_json(report: Content, file: BinaryIO, head: tuple[int, int] | None) -> None:
    """Everything that is shown, as one JSON object; a number that is not finite is null."""
    at, title = report.shown(head)
    found = _of_heads(report)
    content = {
        "schema": SCHEMA,
        "title": report.title,
        "model": report.model,
        "unit": report.unit,
        "notes": report.notes,
        "seconds": report.seconds,
        "kept_bytes": report.kept,
        "dense_bytes": report.dense,
        "shown": {"layer": at.layer, "head": at.head, "title": title},
        "findings": [asdict(found) for found in report.findings],
        "grids": [{**asdict(grid), "values": plain(grid.values)} for grid in report.grids],
        "heads": {type(result).__name__.lower(): result.numbers for result in report.head_results},
        "arrays": {
            **{name: {"axes": axes, "unit": unit} for name, (axes, unit) in ARRAYS.items()},
            **{name: {"axes": array.axes, "unit": array.unit} for name, array in found.items()},
        },
        "layers": [
            {**_layer(layer), **{name: array.values[number] for name, array in found.items()}}
            for number, layer in enumerate(report.layers)
        ],
    }
    text = json.dumps(plain(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    file.write(text.encode("utf-8", "replace"))  # a lone surrogate is no text


def write_npz(report: Content, file: BinaryIO, head: tuple[int, int] | None) -> None:
    """The arrays of each layer as `entropy/0`, its names as `names`, the tokens as `queries/0` and `keys/0`."""
    del head  # arrays have none in front
    write_arrays(file, _arrays(report))


def write_arrays(file: BinaryIO, arrays: Iterable[tuple[str, Array]]) -> None:
    """A .npz file, as np.savez_compressed writes it, but one array after the other: one is held at a time."""
    import numpy as np

    with ZipFile(file, "w", ZIP_DEFLATED) as archive:
        for name, values in arrays:
            array = values.numpy() if isinstance(values, Tensor) else np.array(values)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)


def _arrays(report: Content) -> Iterator[tuple[str, Array]]:
    """The names and values of the arrays in a .npz file."""
    yield "schema", SCHEMA
    yield "names", [layer.name for layer in report.layers]
    for number, layer in enumerate(report.layers):
        for name in ARRAYS:
            yield f"{name}/{number}", getattr(layer, name)
        weights = layer.every_weight()
        if weights.numel():
            yield f"weights/{number}", weights
            yield f"weights_exact/{number}", bool(layer.calls)
        for name, array in _of_heads(report).items():
            yield f"{name}/{number}", array.values[number]
        for name, axis in (("queries", layer.queries), ("keys", layer.keys)):
            yield f"{name}/{number}", [axis.name(n) for n in range(len(axis))]
            yield f"{name}_positions/{number}", axis.positions


def _of_heads(report: Content) -> dict[str, HeadArray]:
    """The arrays of the results that the report holds, by their names."""
    return {name: array for result in report.head_results for name, array in result.arrays.items()}


def _layer(layer: Layer) -> dict[str, Any]:
    arrays = {name: getattr(layer, name) for name in ARRAYS}
    return {
        "name": layer.name,
        "place": layer.place,
        "queries": _axis(layer.queries),
        "keys": _axis(layer.keys),
        **arrays,
    }


def _axis(axis: Axis) -> dict[str, Any]:
    return {"positions": axis.positions, "tokens": axis.tokens}


def plain(content: Any) -> Any:
    """The same of what JSON knows: tensors as nested lists, numbers short, none of them NaN or infinite."""
    if isinstance(content, Tensor):
        return _short(content)
    if isinstance(content, dict):
        return {name: plain(part) for name, part in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(part) for part in content]
    if isinstance(content, float):
        return _short(torch.tensor(content, dtype=torch.float64, device="cpu"))
    return content


def _short(values: Tensor) -> Any:
    """Numbers with DIGITS significant digits, as nested lists, null where not finite; integers as they are."""
    if not values.dtype.is_floating_point:
        return values.tolist()
    wide = values.double()
    # Powers of ten up to the 22nd are exact, so a division by one gives the double that prints short.
    places = (DIGITS - 1 - wide.abs().log10().nan_to_num(0, 0, 0).floor()).clamp(0, 22)
    scale = torch.tensor(10.0, dtype=torch.float64, device="cpu") ** places
    rounded = (wide * scale).round() / scale
    return rounded.tolist() if bool(rounded.isfinite().all()) else _without_infinities(rounded.tolist())


def _without_infinities(values: Any) -> Any:
    if isinstance(values, list):
        return [_without_infinities(value) for value in values]
    return values if math.isfinite(values) else None
