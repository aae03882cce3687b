"""What the page's script is given: whole rows of short texts, within a step of quantisation; sizes."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report import payload
from regard.inspect.report.layer import COLUMNS


def content(report: rg.Report) -> dict[str, Any]:
    return json.loads(payload.payload(report, None))


def unpacked(text: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal(), rg.Window(before=3, after=1)], ids=repr)
def test_rows_are_the_weights_within_a_step(mask: rg.Mask) -> None:
    n, heads = 23, 3
    random = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, heads, n, 8, generator=random) * 2  # what reports.report looks at
    p = rg.attention_weights(q.double(), k.double(), mask=mask)[0].numpy()
    given = content(reports.report(1, heads, n, mask))
    levels = unpacked(given["layers"][0]["weights"], "u1").reshape(heads, n, n)
    seen = np.broadcast_to(mask.on(n).dense().numpy(), p.shape)
    assert np.array_equal(levels != 255, seen)
    steps = given["steps"]
    found = (levels[seen] / steps) ** 2
    assert (np.abs(np.sqrt(found) - np.sqrt(p[seen])) <= 0.5 / steps + 1e-6).all()
    assert np.abs(np.where(seen, (levels / steps) ** 2, 0).sum(-1) - 1).max() < 0.05


def test_long_texts_carry_the_heaviest_keys_and_a_pooled_map() -> None:
    report = reports.report(1, 2, 521)
    given, layer = content(report)["layers"][0], report.layers[0]
    assert given["weights"] == payload.packed(torch.empty(0, dtype=torch.uint8)) and given["rows"] is None
    assert np.array_equal(unpacked(given["topKeys"], "<u2").astype(np.int16).ravel(), layer.top_keys.numpy().ravel())
    shares = unpacked(given["topWeights"], "<u2") / payload.SHARES
    np.testing.assert_allclose(shares, layer.top_weights.numpy().ravel(), atol=1 / payload.SHARES)
    assert unpacked(given["maps"], "u1").size == layer.maps.numel()


def test_long_texts_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "ENTRIES", 100)
    monkeypatch.setattr(payload, "KEYS", 100)
    report = reports.report(1, 2, 521)
    given, layer = content(report)["layers"][0], report.layers[0]
    assert given["rows"] == layer.row_edges[:-1].tolist() and given["keyEdges"] == layer.col_edges.tolist()
    received = torch.stack([layer.received[:, a:b].sum(-1) for a, b in pairwise(layer.col_edges.tolist())], -1)
    shares = unpacked(given["received"], "<u2").reshape(2, -1) / payload.SHARES * float(received.max())
    np.testing.assert_allclose(shares, received, atol=float(received.max()) / payload.SHARES)


def test_more_weights_than_a_page_may_hold_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "WEIGHTS", 2 * 3 * 23 * 23 - 1)
    given = content(reports.report(2, 3, 23))["layers"]
    assert all(unpacked(layer["weights"], "u1").size == 0 < unpacked(layer["maps"], "u1").size for layer in given)


def test_thumbnails_are_the_map_with_larger_cells() -> None:
    report = reports.report(1, 2, 83, rg.Everything())
    layer, given = report.layers[0], content(report)["layers"][0]
    assert given["thumb"] == [payload.THUMB, payload.THUMB]
    levels = unpacked(given["thumbs"], "u1").reshape(2, payload.THUMB, payload.THUMB)
    cell = torch.arange(83) * payload.THUMB // 83
    wanted = layer.maps[1][cell == 7][:, cell == 5].sum(-1).mean()
    assert 1e-4 ** (1 - levels[1, 7, 5] / 254) == pytest.approx(float(wanted), rel=0.04)


@pytest.mark.full
@pytest.mark.parametrize(("heads", "n", "mask", "most"), [(12, 256, rg.Everything(), 6e6), (6, 512, rg.Causal(), 7e6)])
def test_a_page_of_twelve_layers_is_small(heads: int, n: int, mask: rg.Mask, most: float) -> None:
    assert len(payload.payload(reports.report(12, heads, n, mask), None)) < most


def test_a_page_of_one_layer_is_small() -> None:
    """A twelfth of 6 MB: weights of random queries are as hard to compress as those of a model."""
    assert len(payload.payload(reports.report(1, 12, 256, rg.Everything()), None)) < 500_000


def test_a_column_is_put_on_the_page_by_its_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = COLUMNS["counts"]
    monkeypatch.setitem(COLUMNS, "counts", replace(counts, on_page=True))
    report = reports.report(1, 2, 23, rg.Causal())
    given = content(report)["layers"][0]
    assert given["columns"] == ["entropy", "received", "counts"] and given["countsScale"] == 23
    shares = unpacked(given["counts"], "<u2") / payload.SHARES * 23
    np.testing.assert_allclose(shares, report.layers[0].counts.flatten(), atol=1e-3)
