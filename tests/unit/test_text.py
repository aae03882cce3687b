"""How a report looks in a terminal."""

from __future__ import annotations

import re

import pytest

import regard as rg
import sample_reports as reports
from regard.inspect.report.grids import Grid
from regard.inspect.report.printed import block, grid, shelves, side_by_side


def test_blocks_keep_to_their_ends() -> None:
    def row(*values: float, low: float = 0, high: float = 1) -> str:
        return grid(Grid("x", "", (values,), low, high))[-1].removeprefix("L0").replace(" ", "")

    assert row(-3.0, 0.0, 9.0, 1.0) == "▁▁██" and row(5.0, low=2, high=2) == "▁"
    assert row(float("-inf"), float("nan")) == "··"
    assert "".join(block(n / 8) for n in range(-8, 9)) == "▓▓▓▒▒▒░░▁▂▃▄▅▆▇██"


def test_grid_has_a_line_a_layer_and_a_block_a_head() -> None:
    lines = grid(Grid("x", "units", ((0.0,) * 8, (1.0,) * 8, (0.5,) * 5), 0, 1))
    assert lines[0] == "x, units"
    assert lines[2].split() == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert [line.split()[0] for line in lines[3:]] == ["L0", "L1", "L2"]
    assert lines[4].split()[1:] == ["█"] * 8 and lines[5].split()[1:] == ["▅"] * 5


def test_many_heads_stand_close() -> None:
    assert grid(Grid("x", "", ((1.0,) * 11,), 0, 1))[2:] == ["     01234567890", "L0   ███████████"]


def test_pictures_of_unequal_height_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        side_by_side(["a", "b"], ["c"])


def test_shelves_take_as_many_as_fit() -> None:
    assert shelves([["aa"], ["bb"], ["cc"]], width=14) == ["aa    bb    cc"]
    assert shelves([["aa"], ["bb"], ["cc"]], width=13) == ["aa    bb", "", "cc"]
    assert shelves([["too wide"], ["b"]], width=3) == ["too wide", "", "b"]


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (6, 12), (24, 16), (3, (2, 5, 3))])
def test_a_report_fits_a_terminal(layers: int, heads: int | tuple[int, ...]) -> None:
    text = reports.report(layers, heads, mask=rg.Everything()).text()
    assert max(map(len, text.splitlines())) <= 80
    assert len(re.findall(r"^L\d+ ", text, re.MULTILINE)) in (layers, 2 * layers)  # shelves of grids
    assert str(reports.report()) != text


def test_a_report_has_facts_and_findings() -> None:
    shown = reports.report(2, 3, 23, notes=("loss 1.00",), seconds=2.0)
    first, *_, last = str(shown).splitlines()
    assert first.startswith("a model (Made)  23 tokens, 2 × 3 heads, loss 1.00, 2.0 s   kept")
    assert last == "    rule: the largest of all scores"
    assert f"kept {shown.kept / 1e3:.1f} kB" in str(shown) and "dense weights" not in str(shown)  # these are less


def test_what_is_kept_is_told_beside_the_dense_weights_that_it_saves() -> None:
    shown = reports.report(1, 1, 1200)
    said = f"kept {shown.kept / 1e3:.1f} kB (dense weights: {4 * 1200 * 1200 / 1e6:.1f} MB)"
    assert said in str(shown).replace("\n", " ")
