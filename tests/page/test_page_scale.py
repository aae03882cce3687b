"""The scale of colours: chosen by the spread of what is shown, or by the switch; and what the page's words mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports

pytestmark = pytest.mark.full

N = 41


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Head 0: a few keys hold all the mass. Head 1: one key holds a third, and the rest is spread over all others."""
    sharp = torch.full((N, N), -20.0)
    sharp[:, 3], sharp[:, 8] = 1.0, 0.0  # 73 %, which the page rounds to 74 %, and 27 %
    spread = torch.zeros(N, N)
    spread[:, 3] = torch.tensor(0.5 * (N - 1)).log()
    k = torch.stack([sharp, spread]).mT[None]
    q = torch.eye(N).expand(1, 2, N, N) * N**0.5
    rg.Report.of([reports.call(q, k)], title="two", model="Made", tokens=[f"t{n}" for n in range(N)]).save(
        tmp_path / "a.html"
    )
    return tmp_path / "a.html"


def scale(seen: Any, of: str) -> tuple[str, str, str]:
    return tuple(seen.page.inner_text(f"#{of} .{part}") for part in ("kind", "least", "most"))


@pytest.mark.parametrize("of", ["text-scale", "map-scale"])
def test_the_scale_suits_the_spread(visit: Any, page: Path, of: str) -> None:
    assert scale(visit(page, address="#L0H0&query=5"), of) == ("weight, linear", "0", "74 %")
    assert scale(visit(page, address="#L0H1&query=5"), of) == ("weight, logarithmic", "0.3 %", "33 %")


def test_the_switch_decides_where_it_is_set(visit: Any, page: Path) -> None:
    seen = visit(page, address="#L0H0&query=5")
    seen.page.locator("[data-choice='scale'][value='log']").click()
    assert scale(seen, "text-scale") == scale(seen, "map-scale") == ("weight, logarithmic", "0.01 %", "100 %")
    assert "scale=log" in seen.page.url
    seen.page.locator("[data-choice='scale'][value='auto']").click()
    assert scale(seen, "text-scale")[0] == "weight, linear" and "scale=" not in seen.page.url


def test_what_is_left_out_does_not_choose_the_scale(visit: Any, tmp_path: Path) -> None:
    """[CLS] holds nearly all; of the rest, a key holds a third, and the others are equal."""
    scores = torch.zeros(N, N)
    scores[:, 0], scores[:, 3] = torch.tensor(2000.0).log(), torch.tensor(0.5 * (N - 2)).log()
    q, k = torch.eye(N).expand(1, 1, N, N) * N**0.5, scores.mT[None, None]
    tokens = ["[CLS]", *(f"t{n}" for n in range(1, N))]
    rg.Report.of([reports.call(q, k)], title="one", model="Made", tokens=tokens).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html")
    for left_out in ("first", "special"):
        seen.page.locator("#hide").select_option("nothing")
        assert scale(seen, "text-scale")[0] == scale(seen, "map-scale")[0] == "weight, linear"
        seen.page.locator("#hide").select_option(left_out)
        assert scale(seen, "text-scale")[0] == scale(seen, "map-scale")[0] == "weight, logarithmic"


@pytest.mark.parametrize("form", [{}, {"java_script_enabled": False}])
def test_a_question_mark_explains_the_words(visit: Any, page: Path, form: dict[str, Any]) -> None:
    seen = visit(page, **form)
    words = seen.page.locator("#help dl")
    assert not words.is_visible()
    seen.page.locator("#help summary").focus()
    seen.page.keyboard.press("Enter")
    assert words.is_visible() and words.bounding_box()["y"] > seen.page.locator("#help summary").bounding_box()["y"]
    terms = seen.page.locator("#help dt").all_inner_texts()
    assert terms[:5] == ["query, key", "weight", "mass", "entropy, in nats", "max score"]
