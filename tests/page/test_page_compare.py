"""The page of a comparison: the signed map, both texts with linked pointers, heads before and after, files."""

from __future__ import annotations

import base64
import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

import regard as rg
import sample_reports as reports
from test_access import SIZES, axe, serious
from word_reports import of_words, words

pytestmark = pytest.mark.full
__all__ = ["axe"]  # the fixture

# The red, green and blue of a colour of the style sheet.
COLOUR = """name => {
  const pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = getComputedStyle(document.body).getPropertyValue(name);
  pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
}"""

BEFORE, AFTER = "the cat sat on the mat", "the old dog sat on a mat"
ROWS = ["the", "cat (before)", "old (after)", "dog (after)", "sat", "on", "the → a", "mat"]


def text(words: str, seed: int, keys: str = "") -> rg.Report:
    """Two layers of two heads; of a model that looks from the words at the keys, if these are given."""
    random, n, m = torch.Generator().manual_seed(seed), len(words.split()), len((keys or words).split())
    calls = [
        reports.call(
            torch.randn(1, 2, n, 8, generator=random) * 2,
            torch.randn(1, 2, m, 8, generator=random) * 2,
            name=f"layers.{at}",
        )
        for at in range(2)
    ]
    named = {"tokens": words.split(), "key_tokens": keys.split()} if keys else {"tokens": words.split()}
    return rg.Report.of(calls, title=words, model="Made", **named)


@pytest.fixture
def found() -> Any:
    return text(BEFORE, 1).compare(text(AFTER, 2))


@pytest.fixture
def seen(visit: Any, found: Any, tmp_path: Path) -> Any:
    found.save(tmp_path / "a.html", heads=("L0H1", "L0H1"))
    return visit(tmp_path / "a.html", address="#L0H1&query=4&key=0")


def said(seen: Any, of: str) -> str:
    return re.sub("[\u2066\u2069]", "", seen.page.inner_text(of))


def chosen(seen: Any) -> list[str]:
    return [seen.page.locator(f"#{side}-chosen .on").inner_text() for side in ("before", "after")]


def test_a_token_and_its_counterpart_are_chosen_together(seen: Any) -> None:
    assert chosen(seen) == ["sat", "sat"] and said(seen, "#about") == "query sat: where its mass moved"
    seen.page.locator("#after-chosen [data-n='5']").click()
    seen.page.mouse.move(2, 2)
    seen.settle()
    assert chosen(seen) == ["the", "a"] and said(seen, "#about") == "query the → a: where its mass moved"
    seen.page.locator("#before-chosen [data-n='5']").hover()
    assert chosen(seen) == ["mat", "mat"]
    seen.page.mouse.move(2, 2)
    assert chosen(seen) == ["the", "a"] and "query=6" in seen.page.url
    seen.press("Home", at="#before-chosen [tabindex='0']")
    assert chosen(seen) == ["the", "the"]
    assert seen.said == [] and len(seen.asked) == 1


def test_what_has_no_counterpart_says_so(seen: Any) -> None:
    alone = seen.page.locator(".alone").evaluate_all("words => words.map(w => [w.textContent, w.title])")
    assert alone == [[word, "no counterpart"] for word in ("cat", "old", "dog")]
    seen.page.locator("#after-chosen [data-n='1']").click()
    seen.settle()
    assert "no counterpart in the other text" in seen.page.inner_text("#mass")
    assert seen.page.locator("#before-chosen .on").count() == 0
    assert seen.page.inner_text("#lost") == seen.page.inner_text("#gained") == "nothing"


def test_the_lists_hold_the_largest_changes(seen: Any, found: Any) -> None:
    moved = found.moved("L0H1")
    for row in (4, 7):
        seen.page.goto(seen.page.url.split("#")[0] + f"#L0H1&query={row}&key=0")
        seen.settle()
        for of, sign in (("lost", -1), ("gained", 1)):
            order = [n for n in (sign * moved[row]).argsort(descending=True).tolist() if sign * moved[row, n] > 0.004]
            names = seen.page.locator(f"#{of} .word").all_inner_texts()[: len(order)]
            assert names == [ROWS[n] for n in order]
        share = float(re.match(r"([\d.]+) % of the mass", seen.page.inner_text("#mass"))[1])
        assert share == pytest.approx(float(100 * moved[row].abs().sum() / 2), abs=2)
    share = float(re.match(r"([\d.]+) % of its mass", seen.page.inner_text("#moved"))[1])
    assert share == pytest.approx(100 * found.between("L0H1", "L0H1"), abs=2)


def test_the_map_has_two_colours(seen: Any, found: Any) -> None:
    moved = found.moved("L0H1")
    box = seen.page.locator("#map").bounding_box()
    left, below = 96, 96

    def pixel(row: int, column: int) -> list[int]:
        x = left + (column + 0.25) * (box["width"] - left) / len(ROWS)
        y = (row + 0.25) * (box["height"] - below) / len(ROWS)
        at = f"document.getElementById('map').getContext('2d').getImageData({x}, {y}, 1, 1).data"
        return seen.page.evaluate(f"Array.from({at})")[:3]

    for row in (0, 5, 7):
        high, low = int(moved[row].argmax()), int(moved[row].argmin())
        red, _, blue = pixel(row, high)
        assert red > blue + 30, ROWS[high]
        red, _, blue = pixel(row, low)
        assert blue > red + 30, ROWS[low]
    assert pixel(1, 0) == pixel(2, 5) == [213, 217, 224]  # queries without a counterpart


def test_the_map_is_read_by_pointer_and_keys(seen: Any, found: Any) -> None:
    p, q = (one.layers[0].maps[1] for one in (found.before, found.after))
    seen.press("Shift+ArrowRight")
    assert "key=1" in seen.page.url
    read = said(seen, "#readout")
    assert re.match(r"query sat → key cat \(before\): before [\d.]+ %, after no counterpart \(−[\d.]+ %\)", read)
    assert float(re.search(r"before ([\d.]+) %", read)[1]) == pytest.approx(float(100 * p[2, 1]), abs=1)
    seen.press("Shift+ArrowRight", "Shift+ArrowRight")
    read = said(seen, "#readout")
    assert float(re.search(r"after ([\d.]+) %", read)[1]) == pytest.approx(float(100 * q[3, 2]), abs=1)
    seen.press("ArrowDown")
    assert said(seen, "#name").startswith("L1H1") and "#L1H1" in seen.page.url


def test_two_heads(visit: Any, found: Any, tmp_path: Path) -> None:
    found.save(tmp_path / "a.html", heads=("L0H1", "L1H0"))
    seen = visit(tmp_path / "a.html")
    assert said(seen, "#name") == "L0H1 before, L1H0 after" and "after=1,0" in seen.page.url
    share = float(re.match(r"([\d.]+) % of its mass", seen.page.inner_text("#moved"))[1])
    assert share == pytest.approx(100 * found.between("L0H1", "L1H0"), abs=2)
    again = visit(tmp_path / "a.html", address="#" + seen.page.url.split("#")[1])
    assert said(again, "#name") == "L0H1 before, L1H0 after"
    seen.page.select_option("#after-layer", "0")
    seen.settle()
    assert said(seen, "#name") == "L0H1 before, L0H0 after"
    seen.page.locator("#same").click()
    seen.settle()
    assert said(seen, "#name").startswith("L0H1 ") and not seen.page.locator("#same").is_visible()
    seen.page.locator(".findings a").first.click()
    seen.settle()
    assert said(seen, "#name").split()[0] == seen.page.locator(".findings a").first.inner_text()


def test_who_looks_at_a_key(seen: Any, found: Any) -> None:
    seen.page.locator("[value='keys']").click()
    seen.settle()
    seen.page.locator("#before-chosen [data-n='0']").click()
    seen.settle()
    column = found.moved("L0H1")[:, 0].nan_to_num()
    assert said(seen, "#about") == "key the: whose mass it lost and gained"
    assert seen.page.locator("#gained .word").first.inner_text() == ROWS[int(column.argmax())]


def test_cross_attention_has_both_texts_of_each(visit: Any, tmp_path: Path) -> None:
    one, other = text("3 May", 1, "1 9 7 9"), text("12 May 81", 2, "1 9 8 1")
    one.compare(other).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H0&query=0&key=0")
    shown = [
        seen.page.locator(f"#{side}-{kind} bdi").all_inner_texts()
        for side in ("before", "after")
        for kind in ("chosen", "shaded")
    ]
    assert shown == [["3", "May"], list("1979"), ["12", "May", "81"], list("1981")]
    seen.page.locator("#after-chosen [data-n='1']").click()
    seen.settle()
    assert chosen(seen) == ["May", "May"] and said(seen, "#readout").startswith("query May → key ")


def test_long_texts_by_cells(visit: Any, tmp_path: Path) -> None:
    one, other = (reports.report(1, 2, n, rg.Causal(), tokens=[f"w{i}" for i in range(n)]) for n in (3001, 2901))
    found = one.compare(other)
    found.save(tmp_path / "a.html", heads=("L0H1", "L0H1"))
    seen = visit(tmp_path / "a.html", address="#L0H1&query=100&key=0")
    seen.page.locator("#before-chosen .on").wait_for()
    assert int(seen.page.get_attribute("#before-chosen .on", "data-n")) == int(found.layers[0][0].row_edges[100])
    share = float(re.match(r"([\d.]+) % of its mass", seen.page.inner_text("#moved"))[1])
    assert share == pytest.approx(found.change.values[0][1], rel=0.05)
    assert seen.said == []


def test_long_texts_by_cells_of_corresponding_tokens(visit: Any, tmp_path: Path) -> None:
    before = words(600)
    after = [*before[:100], *words(760, 700), *before[100:590]]
    found = of_words(before).compare(of_words(after))
    found.save(tmp_path / "a.html", heads=("L0H1", "L0H1"))
    seen = visit(tmp_path / "a.html", address="#L0H1&query=100&key=0")
    seen.page.locator("#before-chosen [data-n]").first.wait_for()
    assert found.by == "cells" and found.aligned is not None
    numbers = [int(seen.page.get_attribute(f"#{side}-chosen .on", "data-n")) for side in ("before", "after")]
    assert before[numbers[0]] == after[numbers[1]] and numbers[1] - numbers[0] == 60
    share = float(re.match(r"([\d.]+) % of its mass", seen.page.inner_text("#moved"))[1])
    assert share == pytest.approx(found.change.values[0][1], abs=1.5)
    row = found.aligned.rows[0].alignment.before.tolist().index(-1)  # a cell of what was inserted
    inserted = visit(tmp_path / "a.html", address=f"#L0H1&query={row}&key=0")
    assert "no counterpart in the other text" in inserted.page.inner_text("#mass")
    assert said(inserted, "#about").startswith("query ") and "(after)" in said(inserted, "#about")
    assert seen.said == [] == inserted.said


def test_the_changes_are_saved(seen: Any, found: Any, tmp_path: Path) -> None:
    moved = found.moved("L0H1")
    with seen.page.expect_download() as download:
        seen.page.locator("#save-map").click()
    download.value.save_as(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(ROWS) ** 2 and [rows[n]["key"] for n in range(len(ROWS))] == ROWS
    for n, row in enumerate(rows):
        expected = float(moved.flatten()[n])
        assert (row["change"] == "") == (expected != expected)
        if row["change"]:
            assert float(row["change"]) == pytest.approx(expected, abs=0.01)
    assert rows[1]["key number before"] == "1" and rows[1]["key number after"] == "" == rows[1]["weight after"]


def test_the_map_is_saved_as_a_picture(seen: Any, tmp_path: Path) -> None:
    with seen.page.expect_download() as download:
        seen.page.locator("#save-picture").click()
    assert download.value.suggested_filename == "L0H1-changes.png"
    download.value.save_as(tmp_path / "a.png")
    saved = imread(tmp_path / "a.png")  # (rows, columns, RGBA) in [0, 1]
    seen.page.locator("#map").evaluate("canvas => document.body.dataset.map = canvas.toDataURL()")
    map_of_page = imread(io.BytesIO(base64.b64decode(seen.page.evaluate("document.body.dataset.map").split(",")[1])))
    rows, columns = map_of_page.shape[:2]
    above = (len(saved) - rows) // 2
    opaque = map_of_page[..., 3] == 1
    assert opaque.mean() > 0.3
    assert (saved[above : above + rows, :columns][opaque] == map_of_page[opaque]).all()
    scale = saved[-above:, :, :3].reshape(-1, 3) * 255
    for end in ("lost", "gained"):
        colour = seen.page.evaluate(COLOUR, f"--{end}")
        assert (abs(scale - colour).max(1) < 4).any()
    assert seen.said == []


@pytest.mark.parametrize(("scheme", "width"), SIZES)
def test_axe_finds_nothing(visit: Any, axe: str, found: Any, tmp_path: Path, width: int, scheme: str) -> None:
    found.save(tmp_path / "a.html", heads=("L0H1", "L1H0"))
    seen = visit(tmp_path / "a.html", color_scheme=scheme, viewport={"width": width, "height": 900})
    seen.page.locator("#help summary").click()
    assert serious(seen, axe) == []
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.said == [] and len(seen.asked) == 1


def test_without_scripts_the_heads_are_listed(visit: Any, found: Any, tmp_path: Path) -> None:
    found.save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", java_script_enabled=False)
    listed = seen.page.locator(".changed a").all_inner_texts()
    assert listed == [head.name for head in found.heads]
    assert seen.page.locator(".grid td").first.is_visible() and not seen.page.locator("#live").is_visible()
