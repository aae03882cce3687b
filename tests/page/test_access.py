"""For everyone: what axe-core finds, labels that do not overlap, the focus, narrow screens and wide ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report.picture import Picture
from selection import in_turn

# A visit takes half a second: a plain run makes those of test_page.py and test_served_page.py alone.
pytestmark = pytest.mark.full

WIDTHS, SCHEMES = [390, 768, 1280, 1920], ["light", "dark"]
SIZES = in_turn(SCHEMES, WIDTHS)  # what overlaps depends on no scheme, and contrast on no width


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, which looks for what people who see or move otherwise cannot use."""
    package = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python, which brings axe-core")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def serious(seen: Any, axe: str) -> list[tuple[str, list[str]]]:
    seen.page.evaluate(axe)
    found = seen.page.evaluate("async () => (await axe.run(document, { resultTypes: ['violations'] })).violations")
    return [(one["id"], [node["html"][:160] for node in one["nodes"]]) for one in found]


@pytest.mark.parametrize(("scheme", "width"), SIZES)
def test_axe_finds_nothing_in_what_heads_add(visit: Any, axe: str, tmp_path: Path, width: int, scheme: str) -> None:
    report = reports.report(2, 3, 23)
    held = report.with_heads(*reports.results(report))
    held.save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", color_scheme=scheme, viewport={"width": width, "height": 900})
    seen.page.select_option("#sort", str(len(held.grids) - 1))
    seen.settle()
    assert serious(seen, axe) == []
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("scheme", "width"), SIZES)
def test_axe_finds_nothing_in_a_pair_of_texts(visit: Any, axe: str, tmp_path: Path, width: int, scheme: str) -> None:
    reports.report(1, 2, 23, second_text=9).save(tmp_path / "a.html")
    form = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
    seen = visit(tmp_path / "a.html", address="#L0H1&query=12&pair=ba", **form)
    assert serious(seen, axe) == []
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("scheme", "width"), SIZES)
def test_axe_finds_nothing(visit: Any, axe: str, width: int, scheme: str) -> None:
    seen = visit(color_scheme=scheme, viewport={"width": width, "height": 900})
    assert serious(seen, axe) == []
    seen.page.locator("[value='lines']").click()
    seen.page.select_option("#sort", "1")
    seen.page.select_option("#hide", "first")
    seen.settle()
    assert serious(seen, axe) == []
    assert seen.said == [] and len(seen.asked) == 1


def image() -> rg.Report:
    """Of a model that reads [CLS] and 5 × 7 patches."""
    random = torch.Generator().manual_seed(1)
    picture = Picture.of(torch.rand(3, 50, 70, generator=random), 5, 7, 1)
    call = reports.call(*torch.randn(2, 1, 2, 36, 8, generator=random) * 2)
    tokens = ["[CLS]", *(f"{row},{column}" for row in range(5) for column in range(7))]
    return rg.Report.of([call], title="an image", model="Made", tokens=tokens, picture=picture)


def cross() -> rg.Report:
    """Of a model that looks from one text at another."""
    call = reports.call(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 11, 8))
    return rg.Report.of([call], title="dates", model="Made", tokens=["3", "May", "1979", "."], key_tokens="1979-05-03;")


def long() -> rg.Report:
    return reports.report(2, 2, 3001)


@pytest.mark.parametrize(("scheme", "width", "made"), in_turn(SCHEMES, WIDTHS, [image, cross, long]))
def test_axe_finds_nothing_in_pages_of_each_kind(
    visit: Any, axe: str, tmp_path: Path, made: Callable[[], rg.Report], width: int, scheme: str
) -> None:
    made().save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", color_scheme=scheme, viewport={"width": width, "height": 900})
    seen.page.locator("#help summary").click()
    assert serious(seen, axe) == []
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.said == [] and len(seen.asked) == 1


@pytest.mark.parametrize("address", ["#L0H1", "#L0H1&scale=linear&by=keys"])
def test_axe_finds_nothing_in_a_text_of_every_shade(visit: Any, axe: str, tmp_path: Path, address: str) -> None:
    reports.report(1, 3, 301).save(tmp_path / "a.html")
    for scheme in ("light", "dark"):
        assert serious(visit(tmp_path / "a.html", address=address, color_scheme=scheme), axe) == []


# Where the map has texts: [text, left, top, right, bottom], in CSS pixels.
WRITTEN = """
window.written = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const box = this.measureText(text), at = this.getTransform();
  const corners = [
    [x - box.actualBoundingBoxLeft, y - box.actualBoundingBoxAscent],
    [x + box.actualBoundingBoxRight, y + box.actualBoundingBoxDescent],
  ].map((corner) => at.transformPoint({ x: corner[0], y: corner[1] }));
  const [xs, ys] = [corners.map((p) => p.x), corners.map((p) => p.y)];
  window.written.push([text, Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)]);
  fillText.call(this, text, x, y);
};
"""


@pytest.mark.parametrize("n", [20, 32, 301, 3010])
@pytest.mark.parametrize("width", WIDTHS)
def test_names_at_the_map_do_not_overlap(visit: Any, tmp_path: Path, n: int, width: int) -> None:
    reports.report(1, 1, n, tokens=[f"{i}averyverylongtokenname" for i in range(n)]).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", before=WRITTEN, viewport={"width": width, "height": 900})
    last = seen.page.evaluate("written.slice(written.findLastIndex(w => w[0] === 'query') + 1).length")
    assert last == 0
    written = seen.page.evaluate("written.slice(0, written.findIndex(w => w[0] === 'query') + 1)")
    assert len(written) > 9
    for at, (text, left, top, right, bottom) in enumerate(written):
        for other, left2, top2, right2, bottom2 in written[:at]:
            apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
            assert apart, (text, other)


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_on_the_page_overlaps(visit: Any, width: int) -> None:
    seen = visit(viewport={"width": width, "height": 900})
    overlapping = """() => {
      const parts = "h1, h2, h3, .facts, .bar > *, .numbers li, .thumb, .bar-line, .findings li";
      const found = [...document.querySelectorAll(parts)].filter((e) => e.offsetParent)
        .map((e) => [e, e.getBoundingClientRect()]);
      const before = (a, b) => a.right <= b.left + 1 || a.bottom <= b.top + 1;
      const apart = (a, b) => before(a, b) || before(b, a);
      return found.flatMap(([a, x], n) => found.slice(0, n)
        .filter(([b, y]) => !apart(x, y) && !a.contains(b) && !b.contains(a)).map(([b]) => a.outerHTML + b.outerHTML));
    }"""
    assert seen.page.evaluate(overlapping) == []


def test_the_tab_key_passes_each_part_once(visit: Any) -> None:
    seen = visit()
    reached: list[str] = []
    for _ in range(60):
        seen.page.keyboard.press("Tab")
        where = seen.page.evaluate("document.activeElement.closest('#words, #sheet')?.id ?? document.activeElement.id")
        reached.append(where)
    assert {"theme", "layer", "head", "hide", "search", "words", "map", "sort", "filter", "sheet"} <= set(reached)
    assert reached[: reached.index("sheet")].count("words") == 1
