"""Long texts that differ are compared in cells of corresponding tokens: against the definition, token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import regard as rg
from regard.inspect.report.aligned_cells import AlignedCells, pooled
from regard.inspect.report.alignment import NONE
from regard.inspect.report.axis import Axis
from word_reports import of_words, words

WORDS = words(700)


def axis(text: list[str]) -> Axis:
    return Axis(torch.arange(len(text)), tuple(text))


def cells_of(report: rg.Report, head: int, rows: tuple[int, ...], cols: tuple[int, ...]) -> torch.Tensor:
    """The map by its definition: for each cell the mass on its keys, mean of its queries; 0 of empty cells."""
    p = report.layers[0].every_weight()[head].double()
    mean = [[p[a:b, c:d].sum(-1).mean() if b > a else 0.0 for c, d in pairwise(cols)] for a, b in pairwise(rows)]
    return torch.tensor(mean, dtype=torch.float64)


def test_cells_hold_corresponding_tokens() -> None:
    before, after = WORDS[:600], [*WORDS[:200], *words(790, 700), *WORDS[200:590]]
    cells = AlignedCells.of(axis(before), axis(after))
    assert len(cells.alignment) == 128 and cells.before[-1] == 600 and cells.after[-1] == 680
    both = zip(pairwise(cells.before), pairwise(cells.after), strict=True)
    inserted = [(c, d) for (a, b), (c, d) in both if a == b]
    assert (inserted[0][0], inserted[-1][1]) == (200, 290)
    for (a, b), (c, d) in zip(pairwise(cells.before), pairwise(cells.after), strict=True):
        if a < b and c < d and b <= 590:
            assert before[a:b] == after[c:d]  # no cell mixes what was inserted with what both have


@pytest.mark.parametrize(("most", "same"), [(4, True), (1, True), (200, False)])
def test_there_are_no_more_cells_than_asked_for(most: int, same: bool) -> None:
    cells = AlignedCells.of(axis(WORDS[:50]), axis(WORDS[20:90]), most)
    assert (len(cells.alignment) == most) == same and len(cells.alignment) <= min(most, 90)


@pytest.mark.full
def test_maps_and_changes_are_those_of_the_definition() -> None:
    before, after = WORDS[:521], [*WORDS[30:211], *WORDS[500:590], *WORDS[211:521]]
    one, other = of_words(before), of_words(after)
    found = one.compare(other)
    assert found.by == "cells" and found.aligned is not None
    rows, cols = found.aligned.rows[0], found.aligned.cols[0]
    for head, second in ((0, 0), (1, 0)):
        p, q = cells_of(one, head, rows.before, cols.before), cells_of(other, second, rows.after, cols.after)
        both = (torch.tensor(rows.before).diff() > 0) & (torch.tensor(rows.after).diff() > 0)
        moved = found.moved((0, head), (0, second))
        torch.testing.assert_close(moved[both].double(), (q - p)[both], rtol=0, atol=1e-6)
        assert moved[~both].isnan().all()
        expected = float((p - q)[both].abs().sum() / 2 / both.sum())
        assert found.between((0, head), (0, second)) == pytest.approx(expected, rel=1e-5)
    assert found.change.values[0][1] == pytest.approx(100 * found.between((0, 1), (0, 1)))


def test_what_was_inserted_moves_nothing_elsewhere() -> None:
    near = rg.Window(before=3, after=0)
    before, after = WORDS[:600], [*WORDS[:100], *words(830, 800), *WORDS[100:600]]
    aligned = of_words(before, mask=near).compare(of_words(after, mask=near))
    by_place = of_words(before, rg.Report.FACTS, near).compare(of_words(after, rg.Report.FACTS, near))
    assert aligned.aligned is not None and by_place.aligned is None
    assert max(head.value for head in aligned.heads) < 0.02 < 0.1 < min(head.value for head in by_place.heads)
    assert "in 128 × 128 cells of corresponding tokens" in str(aligned).replace("\n   ", "")


def test_steps_and_short_texts_are_pooled_alike() -> None:
    report = of_words(WORDS[:40], rg.Report.FACTS)
    layer, edges = report.layers[0], torch.tensor([0, 3, 11, 40])
    cells = pooled(layer, edges, edges)
    expected = cells_of(report, 1, (0, 3, 11, 40), (0, 3, 11, 40))
    torch.testing.assert_close(cells.maps[1].double(), expected, rtol=0, atol=2e-3)  # in steps of 127
    assert cells.cells.tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_heads_that_read_other_texts_are_refused() -> None:
    one, other = (of_words(read, fewer=9) for read in (WORDS[:600], WORDS[5:600]))
    found = one.compare(other)
    assert found.aligned is not None
    with pytest.raises(ValueError, match="L0H0 and cross L0H0 read other texts"):
        found.moved("L0H0", "cross L0H0")


def test_without_a_counterpart_is_a_number_for_none() -> None:
    cells = AlignedCells((0, 2, 2, 5), (0, 2, 4, 4))
    assert cells.alignment.before.tolist() == [0, NONE, 1] and cells.alignment.after.tolist() == [0, 1, NONE]
    assert cells.edges("before").tolist() == [0, 2, 5] and cells.edges("after").tolist() == [0, 2, 4]
