"""What the page saves by its buttons: the weights of a row, a column or the map as CSV, the map as PNG."""

from __future__ import annotations

import csv
import io
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports

# A visit takes half a second: a plain run makes those of test_page.py and test_served_page.py alone.
pytestmark = pytest.mark.full


def saved(seen: Any, button: str) -> tuple[str, bytes]:
    """The name and the content of the file that a button saves."""
    with seen.page.expect_download() as download:
        seen.page.locator(button).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def table(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode("utf-8"), newline="")))


def made(n: int, tokens: list[str] | None = None) -> tuple[rg.Report, torch.Tensor]:
    """A report on one causal layer of two heads, and its weights."""
    random = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 2, n, 8, generator=random) * 2
    tokens = [f"t{i}" for i in range(n)] if tokens is None else tokens
    report = rg.Report.of([reports.call(q, k, rg.Causal())], title="saved", model="Made", tokens=tokens)
    return report, rg.attention_weights(q, k, mask=rg.Causal())[0]


def seen_at(visit: Any, folder: Path, address: str, tokens: list[str] | None = None) -> tuple[Any, torch.Tensor]:
    """The page of a report on 23 tokens, opened at an address, and the weights."""
    report, p = made(23, tokens)
    report.save(folder / "a.html")
    return visit(folder / "a.html", address=address), p


def test_a_row_is_saved_with_its_tokens(visit: Any, tmp_path: Path) -> None:
    tokens = [reports.NASTY[i % len(reports.NASTY)] for i in range(23)]
    seen, p = seen_at(visit, tmp_path, "#L0H1&query=12", tokens)
    name, content = saved(seen, "#save-row")
    lines = table(content)
    assert name == "L0H1-query-12.csv" and [int(one["key"]) for one in lines] == list(range(13))
    shown = seen.page.locator("#words > bdi").all_text_contents()
    assert [one["key token"] for one in lines] == shown[:13] and {one["query token"] for one in lines} == {shown[12]}
    for one in lines:
        weight = float(p[1, 12, int(one["key"])])
        assert float(one["weight"]) == pytest.approx(weight, abs=weight**0.5 / 127 + 2e-5)
        assert one["precision"] == "rounded"
    assert seen.said == [] and len(seen.asked) <= 2


def test_a_column_and_what_is_left_out(visit: Any, tmp_path: Path) -> None:
    seen, p = seen_at(visit, tmp_path, "#L0H1&key=9&by=keys")
    name, content = saved(seen, "#save-row")
    lines = table(content)
    assert name == "L0H1-key-9.csv" and [int(one["query"]) for one in lines] == list(range(9, 23))
    assert sum(float(one["weight"]) for one in lines) == pytest.approx(float(p[1, :, 9].sum()), rel=0.1)
    seen.page.locator("[value='queries']").click()
    seen.page.select_option("#hide", "first")
    seen.settle()
    assert "0" not in {one["key"] for one in table(saved(seen, "#save-row")[1])}


def test_the_map_is_saved_as_weights_and_as_a_picture(visit: Any, tmp_path: Path) -> None:
    seen, p = seen_at(visit, tmp_path, "#L0H1&query=12&key=3")
    name, content = saved(seen, "#save-map")
    lines = table(content)
    assert name == "L0H1-map.csv" and len(lines) == 23 * 24 // 2
    found = torch.zeros(23, 23)
    for one in lines:
        found[int(one["query"]), int(one["key"])] = float(one["weight"])
    assert ((found - p[1]).abs() <= p[1].sqrt() / 127 + 2e-5).all()
    name, content = saved(seen, "#save-picture")
    assert name == "L0H1-map.png" and content.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", content[16:24])
    canvas = seen.page.locator("#map").evaluate("c => [c.width, c.height]")
    assert width == canvas[0] and height > canvas[1]


def test_of_a_long_text_means_are_named_as_such(visit: Any, tmp_path: Path) -> None:
    report, p = made(601)
    report.save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H1&query=300")
    lines = table(saved(seen, "#save-row")[1])
    exact = {int(one["key"]): float(one["weight"]) for one in lines if one["precision"] == "rounded"}
    assert set(exact) == set(report.layers[0].top_keys[1, 300].tolist())
    assert all(weight == pytest.approx(float(p[1, 300, key]), abs=2e-5) for key, weight in exact.items())
    assert {one["precision"] for one in lines} == {"rounded", "mean of a cell"} and len(lines) == 301
    cells = table(saved(seen, "#save-map")[1])
    layer = report.layers[0]
    assert len(cells) == int(layer.cells.sum())
    edges = layer.row_edges.tolist()
    one = cells[700]
    row, column = edges.index(int(one["first query"])), layer.col_edges.tolist().index(int(one["first key"]))
    assert int(one["last query"]) == edges[row + 1] - 1
    assert float(one["weight"]) == pytest.approx(float(layer.maps[1, row, column]), rel=0.02, abs=1e-4)


def test_pairs_that_cannot_attend_are_not_saved(visit: Any, tmp_path: Path) -> None:
    """A cell on the diagonal has a mean, of the pairs in it that can."""
    made(601)[0].save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H1&query=40&key=30")
    seen.press("+", "+", "+")
    pairs = [(int(one["query"]), int(one["key"])) for one in table(saved(seen, "#save-map")[1])]
    queries = sorted({query for query, _ in pairs})
    assert 20 < len(queries) <= 256 and all(key <= query for query, key in pairs)
    assert any(key == query for query, key in pairs)


def test_a_notebooks_frame_may_save() -> None:
    assert reports.report()._repr_html_().startswith('<iframe sandbox="allow-scripts allow-downloads" ')


def test_positions_that_skip_some_are_those_of_the_call(visit: Any, tmp_path: Path) -> None:
    at = torch.tensor([3, 4, 5, 9, 10, 2, 30])
    q, k = torch.randn(2, 1, 1, len(at), 8)
    calls = [reports.call(q, k, rg.Causal(), positions=rg.Positions(at, at))]
    rg.Report.of(calls, title="saved", model="Made").save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H0&query=3")
    name, content = saved(seen, "#save-row")
    lines = table(content)
    assert name == "L0H0-query-9.csv" and [int(one["key"]) for one in lines] == [3, 4, 5, 9, 2]
    assert {(one["query"], one["query token"]) for one in lines} == {("9", "#9")}
    assert "query 9 → key" in seen.page.locator("#readout").inner_text()
    assert "#9 (9)" in seen.page.locator("#about").inner_text().replace("\u2068", "").replace("\u2066", "").replace(
        "\u2069", ""
    )
    pairs = table(saved(seen, "#save-map")[1])
    assert {(int(one["query"]), int(one["key"])) for one in pairs} == {
        (i, j) for i in at.tolist() for j in at.tolist() if j <= i
    }
    assert seen.said == []
