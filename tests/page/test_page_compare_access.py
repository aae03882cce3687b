"""The page of a comparison for everyone: what axe-core finds in each kind of it, and the names at the map's axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regard as rg
import sample_reports as reports
from regard.inspect.report.comparison import Comparison
from selection import in_turn
from test_access import SCHEMES, WIDTHS, WRITTEN, axe, serious
from test_page_compare import AFTER, BEFORE, ROWS, text
from test_page_compare_images import image
from word_reports import of_words, words

pytestmark = pytest.mark.full
__all__ = ["axe"]  # the fixture


def images() -> Comparison:
    return image(1).compare(image(2))


def cross() -> Comparison:
    return text("3 May", 1, "1 9 7 9").compare(text("12 May 81", 2, "1 9 8 1"))


def long() -> Comparison:
    """Of cells of corresponding tokens."""
    before = words(600)
    found = of_words(before).compare(of_words([*before[:100], *words(760, 700), *before[100:590]]))
    assert found.by == "cells" and found.aligned is not None
    return found


def longer() -> Comparison:
    """Of cells at the same place in texts whose queries and keys were not kept."""
    before, after = (reports.report(1, 2, n, rg.Causal(), tokens=[f"w{i}" for i in range(n)]) for n in (3001, 2901))
    found = before.compare(after)
    assert found.by == "cells" and found.aligned is None
    return found


@pytest.mark.parametrize(("scheme", "width", "made"), in_turn(SCHEMES, WIDTHS, [images, cross, long, longer]))
def test_axe_finds_nothing_in_comparisons_of_each_kind(
    visit: Any, axe: str, tmp_path: Path, made: Callable[[], Comparison], width: int, scheme: str
) -> None:
    made().save(tmp_path / "a.html", heads=("L0H1", "L0H0"))
    seen = visit(tmp_path / "a.html", color_scheme=scheme, viewport={"width": width, "height": 900})
    seen.page.locator("#help summary").click()
    assert serious(seen, axe) == []
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.said == [] and len(seen.asked) == 1


def same(drawn: str, name: str) -> bool:
    """Whether a text at an axis is the name of a token, which ends in … where it is too long."""
    plain = drawn.removeprefix("\u2066").removesuffix("\u2069")
    return plain == name or (plain.endswith("…") and len(plain) > 4 and name.startswith(plain[:-1]))


@pytest.mark.parametrize("width", [390, 1280])
def test_the_names_of_the_tokens_stand_at_the_axes(visit: Any, tmp_path: Path, width: int) -> None:
    text(BEFORE, 1).compare(text(AFTER, 2)).save(tmp_path / "a.html", heads=("L0H1", "L0H1"))
    seen = visit(tmp_path / "a.html", before=WRITTEN, viewport={"width": width, "height": 900})
    written = seen.page.evaluate("written.slice(0, written.findIndex(w => w[0] === 'query') + 1)")
    queries, keys = written[: len(ROWS)], written[len(ROWS) : 2 * len(ROWS)]
    assert [one[0] for one in written[2 * len(ROWS) :]] == ["key", "query"]
    for name, *drawn in zip(ROWS, queries, keys, strict=True):
        assert all(same(one[0], name) for one in drawn), (name, drawn)
    across, down = ([(one[n] + one[n + 2]) / 2 for one in axis] for n, axis in ((1, keys), (2, queries)))
    assert across == sorted(across) and down == sorted(down)
    assert max(one[3] for one in queries) < min(one[1] for one in keys)  # left of the map
    assert max(one[4] for one in queries) < min(one[2] for one in keys)  # below the map
    size = seen.page.locator("#map").bounding_box()
    for left, top, right, bottom in (one[1:] for one in written):
        assert min(left, top) > 0 and right < size["width"] and bottom < size["height"]
