"""A number and its noun agree on the pages of one token and of one head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sample_reports as reports
from test_page_compare import text

pytestmark = pytest.mark.full


def test_the_map_of_one_token_has_one_query_and_one_key(visit: Any, tmp_path: Path) -> None:
    reports.report(1, 1, 1).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html")
    assert seen.page.get_attribute("#map", "aria-label") == "attention map of L0H0: 1 query, 1 key"
    assert seen.page.inner_text("#count") == "1 head"


def test_the_map_of_many_tokens(visit: Any, tmp_path: Path) -> None:
    reports.report(1, 2, 3001).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html")
    assert seen.page.get_attribute("#map", "aria-label").endswith(": 3,001 queries, 3,001 keys")
    assert seen.page.inner_text("#count") == "2 heads"


def test_the_map_of_two_texts_of_one_token(visit: Any, tmp_path: Path) -> None:
    text("cat", 1).compare(text("dog", 2)).save(tmp_path / "a.html", heads=("L0H1", "L0H1"))
    seen = visit(tmp_path / "a.html")
    assert seen.page.get_attribute("#map", "aria-label") == "signed map of L0H1 before and L0H1 after: 1 query, 1 key"


def test_the_mean_of_one_head_is_the_head(visit: Any, tmp_path: Path) -> None:
    reports.report(1, 1, 5).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H0&measure=mean")
    assert "all 1 heads" not in seen.page.inner_text("body")
    assert "the weights of this layer's only head" in seen.page.inner_text("body")
