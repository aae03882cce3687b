"""The benchmarks of functions of a pair, on small calls: what is checked and shown, never how fast it is."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from benchmark_checks import made, right, row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import candidates, report, tables, truth
from benchmarks.functions import FUNCTIONS, WIDE
from benchmarks.inputs import draw

pytestmark = pytest.mark.full

SMALL = {
    case.name: dataclasses.replace(case, shape=(1, 3, 14 * WIDE, 8))
    for case in tables.FUNCTIONS
    if case.what in FUNCTIONS
}


@pytest.mark.parametrize("candidate", ["regard", "tiled"])
@pytest.mark.parametrize("name", SMALL)
def test_every_way_is_right(name: str, candidate: str) -> None:
    assert all(error <= 1 for error in right(SMALL[name], candidate).values())


def test_every_function_is_measured() -> None:
    assert {case.what for case in SMALL.values()} == FUNCTIONS.keys()


@pytest.mark.parametrize("name", ["ten operations", "neighbours"])
def test_another_function_is_wrong(name: str) -> None:
    case = SMALL[name]
    x, other = draw(case), dataclasses.replace(case, what="gates")
    way = candidates.CANDIDATES["tiled"].module().ways(other, dataclasses.replace(x, case=other))[0]
    with torch.no_grad():
        exact, out = truth.exact(case, x), way.results(way.run())
    assert exact.error(out) > exact.limit


def test_the_page_says_what_a_function_costs() -> None:
    plain, ten, near = (
        row(next(case for case in tables.FUNCTIONS if case.name == name), regard=seconds)
        for name, seconds in (("full", 0.1), ("ten operations", 0.15), ("neighbours", 0.02))
    )
    ten.entries["regard"].ways["way"].parts = {"first": 0.16, "second": 0.15}
    page = report.markdown(dataclasses.replace(made(plain, ten, near), table="functions"))
    assert "- ten operations: 1.50 times the plain call; a first call 160 ms, the next one 150 ms." in page
    assert "- neighbours: 0.20 times the plain call, with 8.3% of its pairs." in page
