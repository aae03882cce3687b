"""The page of two texts that are read together: attention within one of them, or from one to the other, alone."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports

# A visit takes half a second: a plain run makes those of test_page.py and test_served_page.py alone.
pytestmark = pytest.mark.full

N, SECOND = 23, 9
SIDES = {"A": set(range(SECOND)), "B": set(range(SECOND, N))}
CHOICES = {"aa": ("A", "A"), "ab": ("A", "B"), "ba": ("B", "A"), "bb": ("B", "B")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A page of a pair of texts, and the weights of its head L0H1."""
    random = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 2, N, 8, generator=random)
    tokens = [f"t{n}" for n in range(N)]
    report = rg.Report.of([reports.call(q, k)], title="a pair", model="Made", tokens=tokens, second_text=SECOND)
    path = tmp_path_factory.mktemp("pairs") / "a.html"
    report.save(path, head=(0, 1))
    return path, rg.attention_weights(q, k)[0, 1]


def coloured(seen: Any, where: str = "#words") -> set[int]:
    words = "words => words.filter(w => w.style.background).map(w => Number(w.dataset.n))"
    return set(seen.page.locator(f"{where} > bdi").evaluate_all(words))


@pytest.mark.parametrize("choice", CHOICES)
def test_what_a_token_looks_at_is_filtered(made: Any, visit: Any, choice: str) -> None:
    path, p = made
    asking, read = (SIDES[side] for side in CHOICES[choice])
    seen = visit(path, address="#L0H1&query=4")
    assert coloured(seen) == set(range(N))
    seen.page.select_option("#pair", choice)
    seen.settle()
    query = int(seen.page.locator("#words .on").get_attribute("data-n"))
    assert query == (4 if 4 in asking else SECOND)  # else the first token that asks
    assert coloured(seen) == read and set(seen.listed()) <= read
    order = [n for n in p[query].argsort(descending=True).tolist() if n in read]
    assert next(iter(seen.listed())) == order[0]
    assert "what is left out is not counted" in seen.page.inner_text("#mass")
    other = next(n for n in range(N) if n not in asking)
    seen.choose(other)
    assert coloured(seen) == set() and seen.page.inner_text("#mass") == "nothing to show: all of it is left out"


def test_who_looks_at_a_token_and_lines_are_filtered(made: Any, visit: Any) -> None:
    seen = visit(made[0], address="#L0H1&key=12&by=keys&pair=ab")
    assert seen.page.locator("#pair").input_value() == "ab"
    assert coloured(seen) == SIDES["A"] and set(seen.listed()) <= SIDES["A"]
    assert "pair=ab" in seen.page.url
    seen.page.locator("[value='lines']").click()
    seen.settle()
    assert coloured(seen, "#left") == SIDES["A"]


def test_the_map_shows_the_chosen_part_alone(made: Any, visit: Any) -> None:
    seen = visit(made[0], address="#L0H1&query=4&pair=ba")
    with seen.page.expect_download() as download:
        seen.page.locator("#save-map").click()
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        pairs = {(int(one["query"]), int(one["key"])) for one in csv.DictReader(file)}
    assert pairs == {(query, key) for query in SIDES["B"] for key in SIDES["A"]}
    colours = seen.page.locator("#map").evaluate(
        """canvas => {
          const box = canvas.getBoundingClientRect(), ratio = canvas.width / box.width;
          const pen = canvas.getContext("2d");
          const at = (x, y) => [...pen.getImageData(x * ratio, y * ratio, 1, 1).data].join();
          const left = 96, w = box.width - left, h = box.height - 96;
          const cell = (q, k) => at(left + (w * (k + 0.5)) / 23, (h * (q + 0.5)) / 23);
          return [cell(1, 1), cell(1, 20), cell(20, 1), cell(20, 20)];
        }"""
    )
    assert colours[0] == colours[1] == colours[3] != colours[2]


def test_one_text_has_no_such_filter(visit: Any) -> None:
    seen = visit(address="#L0H1&pair=ab")
    assert not seen.page.locator("#pair").is_visible() and coloured(seen)


def test_a_token_that_is_not_there_is_refused() -> None:
    for wrong in (-1, 23, 40):
        with pytest.raises(ValueError, match=f"second_text is {wrong}; expected the number of a token, 0 to 22"):
            reports.report(1, 1, 23, second_text=wrong)
