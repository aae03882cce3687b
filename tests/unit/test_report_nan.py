"""Reports of models that computed NaN: every form is written, and says where."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard as rg
import sample_reports as reports
from selection import few


def one_query(q: Tensor) -> None:
    q[0, 1, 3] = math.nan


def one_head(q: Tensor) -> None:
    q[0, 1] = math.inf


def everything(q: Tensor) -> None:
    q[:] = math.nan


SPOILED: dict[str, tuple[Callable[[Tensor], None], str]] = {
    "one query": (one_query, "NaN in the weights of L0H1"),
    "one head": (one_head, "NaN in the weights of L0H1"),
    "every head": (everything, "NaN in the weights of L0H0, L0H1, L0H2"),
}


def report(spoil: Callable[[Tensor], None] | None, n: int) -> rg.Report:
    random = torch.Generator().manual_seed(0)
    calls = list[reports.Call]()
    for layer in range(2):
        q, k = torch.randn(2, 1, 3, n, 8, generator=random)
        if spoil is not None and layer == 0:
            spoil(q)
        calls.append(reports.call(q, k, rg.Causal(), f"layers.{layer}"))
    return rg.Report.of(calls, title="spoiled", model="Made", tokens=[f"t{i}" for i in range(n)])


@pytest.mark.parametrize("n", [9, 600])
@pytest.mark.parametrize("name", SPOILED)
def test_what_a_terminal_shows(name: str, n: int) -> None:
    spoil, said = SPOILED[name]
    found = report(spoil, n)
    assert found.findings[0].said == said and said in str(found)
    assert "nan%" not in str(found) and not any("nan" in one.said for one in found.findings)
    assert not report(None, n).findings[0].said.startswith("NaN")


@pytest.mark.parametrize("n", [9, 600])
@pytest.mark.parametrize("suffix", few([".png", ".svg", ".pdf", ".html", ".json", ".npz"], ".png", ".html", ".json"))
@pytest.mark.parametrize("name", SPOILED)
def test_every_file_is_written(name: str, suffix: str, n: int, tmp_path: Path) -> None:
    found = report(SPOILED[name][0], n)
    for head in (None, (0, 1), (1, 2)):
        found.save(tmp_path / f"a{suffix}", head=head)
    if suffix == ".json":
        content = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
        assert content["layers"][0]["entropy"][1][3] is None
    assert found._repr_html_()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("n", [9, 600])
@pytest.mark.parametrize("name", SPOILED)
def test_a_comparison_says_which_heads_it_cannot_compare(name: str, n: int, tmp_path: Path) -> None:
    spoil, said = SPOILED[name]
    names = said.removeprefix("NaN in the weights of ")
    sound, spoiled = report(None, n), report(spoil, n)
    for found in (sound.compare(spoiled), spoiled.compare(sound)):
        assert found.findings[0].said == f"heads that changed most: none; NaN in {names}"
        assert "nan%" not in str(found)
        assert [head.name for head in found.heads[-len(names.split(", ")) :]] == names.split(", ")
        found.save(tmp_path / "c.html")
    assert sound.compare(sound).findings[0].said == "heads that changed most: none; all weights are the same"
