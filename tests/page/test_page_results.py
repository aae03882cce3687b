"""What heads add, on the page: tables with their signs, thumbnails sorted by such a number, by keys and pointer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import regard as rg
import sample_reports as reports

# A visit takes half a second: a plain run makes those of test_page.py and test_served_page.py alone.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, rg.Report]:
    report = reports.report(2, 3, 23)
    held = report.with_heads(*reports.results(report))
    path = tmp_path_factory.mktemp("page") / "heads.html"
    held.save(path, head=(0, 1))
    return path, held


def region(seen: Any, label: str) -> Any:
    return seen.page.locator(f".grids .scroll[aria-label='{label}']")


def loss(held: rg.Report) -> Any:
    return next(grid for grid in held.grids if grid.title == "loss without a head")


def test_a_table_tells_the_sign_by_number_words_and_colour(held: Any, visit: Any) -> None:
    path, report = held
    seen, grid = visit(path), loss(report)
    table = region(seen, grid.label)
    assert table.locator(".signs").inner_text() == "+ it grows− it falls"
    grounds: dict[bool, set[str]] = {True: set(), False: set()}
    for layer, row in enumerate(grid.values):
        for head, value in enumerate(row):
            cell = table.locator(f"[data-at='{layer},{head}']")
            assert cell.inner_text() == grid.number(value) and cell.inner_text()[0] == ("−" if value < 0 else "+")
            hue = cell.evaluate("cell => getComputedStyle(cell).getPropertyValue('--hue')")
            grounds[value < 0].add(hue)
    assert len(grounds[True]) == len(grounds[False]) == 1 and grounds[True] != grounds[False]
    assert seen.said == []


def test_a_cell_is_read_in_full_under_the_pointer_and_by_keys(held: Any, visit: Any) -> None:
    path, report = held
    seen, grid = visit(path), loss(report)
    table, words = region(seen, grid.label), dict(zip((True, False), grid.signs, strict=True))

    def wanted(layer: int, head: int) -> str:
        value = grid.values[layer][head]
        return f"L{layer}H{head}: {'−' if value < 0 else '+'}{abs(value):#.3g}, {words[value < 0]}"

    assert table.locator(".read").inner_text() == wanted(0, 1)
    table.locator("[data-at='1,2']").hover()
    assert table.locator(".read").inner_text() == wanted(1, 2) and seen.name() == "L0H1"
    seen.page.mouse.move(2, 2)
    table.focus()
    for key in ("ArrowDown", "ArrowLeft"):
        seen.page.keyboard.press(key)
        seen.settle()
    assert seen.name() == "L1H0" and table.locator(".read").inner_text() == wanted(1, 0)
    assert wanted(1, 0).partition(": ")[2] in seen.page.inner_text("#numbers")


def test_thumbnails_are_sorted_by_what_a_head_costs(held: Any, visit: Any) -> None:
    path, report = held
    seen, grid = visit(path), loss(report)
    values = {f"L{n}H{h}": value for n, row in enumerate(grid.values) for h, value in enumerate(row)}
    for order, sign in (
        (f"{grid.label}, largest first (it grows)", -1),
        (f"{grid.label}, smallest first (it falls)", 1),
    ):
        seen.page.select_option("#sort", label=order)
        names = [name.split()[0] for name in seen.page.locator("#sheet .thumb").all_inner_texts()]
        assert names == sorted(values, key=lambda name: sign * values[name])
        said = seen.page.locator("#sheet .thumb").first.get_attribute("aria-label")
        assert said.endswith(f", {grid.signs[sign < 0]}")


def test_the_head_whose_removal_costs_most_is_a_link_and_a_filter(held: Any, visit: Any) -> None:
    path, report = held
    seen = visit(path)
    finding = next(found for found in report.findings if found.said.startswith("the loss grows most"))
    seen.page.locator(".findings a", has_text=finding.heads[0].name).last.click()
    seen.settle()
    assert seen.name() in {head.name for head in finding.heads} | {seen.name()}
    seen.page.select_option("#filter", label=finding.said.split(":")[0])
    assert seen.page.locator("#sheet .thumb span").all_inner_texts() == [finding.heads[0].name]


@pytest.mark.parametrize("width", [340, 390, 1280])
def test_the_page_is_as_wide_as_the_screen(held: Any, visit: Any, width: int) -> None:
    seen = visit(held[0], viewport={"width": width, "height": 800})
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


def test_markup_in_a_tokens_name_is_text(held: Any, visit: Any) -> None:
    seen = visit(held[0])
    assert any("‘<b>␣tea’" in text for text in seen.page.locator("caption").all_inner_texts())
    assert seen.page.locator("caption b").count() == 0 and seen.said == []
