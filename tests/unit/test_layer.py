"""Layer: the numbers of one call on one sequence, against the dense weights; padding left out."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report import heads
from regard.inspect.report.axis import Axis
from regard.inspect.report.columns import Column, Joining
from regard.inspect.report.induction import induction
from regard.inspect.report.layer import COLUMNS, Layer
from regard.inspect.report.reach import Reach

MASKS = [
    rg.Everything(),
    rg.Causal(),
    rg.Window(before=3, after=1),
    rg.Lengths(keys=torch.tensor([5, 11])),
    rg.Where(lambda b, h, i, j: ((i + j + h + b) % 3 > 0) & (j < 17)),
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("element", [0, 1])
def test_reach_is_that_of_the_dense_mask(mask: rg.Mask, element: int) -> None:
    n, rows, cols = 23, 5, 7
    view = mask.on(n, batch=(2,), heads=3)
    dense = view.dense().expand(2, 3, n, n)[element].any(0)
    row, col = torch.arange(n) * rows // n, torch.arange(n) * cols // n
    reach = Reach.of(view, element, rows, cols)
    expected = [[bool(dense[row == a][:, col == b].any()) for b in range(cols)] for a in range(rows)]
    assert reach.cells.tolist() == expected
    assert reach.earliest.tolist() == [min([j for j in range(n) if dense[i, j]], default=n) for i in range(n)]
    assert reach.latest.tolist() == [max([j for j in range(n) if dense[i, j]], default=-1) for i in range(n)]


def test_reach_holds_over_several_strips() -> None:
    n = 521
    by_interval, by_strip = (
        Reach.of(mask.on(n), 0, 13, 11) for mask in (rg.Causal(), rg.Where(lambda b, h, i, j: j <= i))
    )
    assert torch.equal(by_interval.cells, by_strip.cells)
    assert torch.equal(by_interval.earliest, by_strip.earliest)
    assert torch.equal(by_interval.latest, by_strip.latest)


def dense(q: torch.Tensor, k: torch.Tensor, mask: rg.Mask) -> torch.Tensor:
    """The weights (h, nq, nk) of the first batch element."""
    return rg.attention_weights(q.double(), k.double(), mask=mask)[0]


@pytest.mark.parametrize("mask", MASKS[:3], ids=lambda mask: type(mask).__name__)
def test_heads_are_what_the_dense_weights_say(mask: rg.Mask) -> None:
    n = 29
    q, k = torch.randn(1, 6, n, 8) * 2, torch.randn(1, 2, n, 8)
    layer, p = Layer.of(reports.call(q, k, mask), 0), dense(q, k, mask)
    seen, top = mask.on(n).dense().expand(1, n, n)[0], p.argmax(-1)
    torch.testing.assert_close(heads.mean_entropy(layer), -torch.special.xlogy(p, p).sum(-1).mean(-1).float())
    scores = (q.double() @ k.double().repeat_interleave(3, 1).mT)[0] / 8**0.5
    torch.testing.assert_close(heads.largest_score(layer), scores[:, seen].amax(-1).float())
    torch.testing.assert_close(heads.first_key_mass(layer), (p[..., 0].sum(-1) / seen[:, 0].sum()).float())
    for offset in (-1, 1):
        rows = torch.arange(max(0, -offset), n - max(0, offset))
        expected = (top[:, rows] == rows + offset).float().mean(-1)
        torch.testing.assert_close(heads.looks_by(layer, offset)[0], expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(side: str) -> None:
    real, padding = 13, 6
    n = real + padding
    first = padding if side == "left" else 0
    q, k = torch.randn(2, 2, 3, n, 8)
    inside = torch.zeros(2, n, dtype=torch.bool)
    inside[0], inside[1, first : first + real] = True, True
    mask = rg.Causal() & rg.Dense(inside[:, None, :, None] & inside[:, None, None, :])
    padded = Layer.of(reports.call(q, k, mask), 1, [str(i) for i in range(n)])
    kept = slice(first, first + real)
    alone = Layer.of(reports.call(q[1:, :, kept], k[1:, :, kept], rg.Causal()), 0)
    ends = "earliest", "latest"
    for name in ("entropy", "max_score", "top_keys", "received", "readers", "counts", "own", *ends, "cells"):
        torch.testing.assert_close(getattr(padded, name), getattr(alone, name), msg=lambda said, n=name: f"{n}: {said}")
    torch.testing.assert_close(padded.maps, alone.maps)
    assert padded.row_edges.tolist() == padded.col_edges.tolist() == list(range(real + 1))
    assert padded.queries.tokens == padded.keys.tokens == tuple(str(i) for i in range(first, first + real))


def test_cells_of_many_tokens_keep_their_edges() -> None:
    n = 401
    layer = Layer.of(reports.call(*torch.randn(2, 1, 1, n, 4)), 0)
    cell = torch.arange(n) * 128 // n
    assert layer.row_edges.tolist() == [int((cell < a).sum()) for a in range(129)]


def test_the_last_tokens_of_a_sequence_know_their_own_keys() -> None:
    q, k, positions = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 11, 8), rg.tail(3, 11)
    layer = Layer.of(reports.call(q, k, rg.Causal(), positions=positions), 0, list("abcdefghijk"))
    assert layer.own.tolist() == [8, 9, 10]
    assert layer.queries.tokens == tuple("ijk") and layer.keys.tokens == tuple("abcdefghijk")


def test_cross_attention_has_two_texts_and_no_key_of_its_own() -> None:
    layer = Layer.of(reports.call(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)), 0, list("abc"), list("vwxyz"))
    assert not layer.looks_at_itself
    assert layer.queries.tokens == tuple("abc") and layer.keys.tokens == tuple("vwxyz")
    assert not heads.looks_by(layer, -1)[0].any() and induction(layer, 1).rows == 0


def test_texts_of_another_length_name_nothing() -> None:
    layer = Layer.of(reports.call(*torch.randn(2, 1, 2, 5, 8)), 0, list("abc"))
    assert layer.queries.tokens == layer.keys.tokens == ()
    assert layer.keys.name(3) == "#3" and Axis(torch.tensor([7])).name(0) == "#7"


def test_what_no_layer_can_be_made_of() -> None:
    q = torch.randn(2, 3, 5, 8)
    with pytest.raises(IndexError, match="no batch element 2; attention was called with 2"):
        Layer.of(reports.call(q, q), 2)
    with pytest.raises(ValueError, match=r"attention was called with shape \(1, 2, 0, 0\); a report needs a pair"):
        Layer.of(reports.call(torch.zeros(1, 2, 0, 8), torch.zeros(1, 2, 0, 8)), 0)
    seen = rg.look(q, q)
    with pytest.raises(ValueError, match=r"was not recorded with .*; a report needs facts=regard.Report.FACTS"):
        Layer.of(reports.Call("attention", seen, rg.Everything().on(5, batch=(2,), heads=3)), 0)


def test_each_tensor_of_a_layer_is_a_column() -> None:
    layer = Layer.of(reports.call(*torch.randn(2, 1, 2, 5, 8)), 0)
    assert [one.name for one in fields(Layer) if isinstance(getattr(layer, one.name), torch.Tensor)] == list(COLUMNS)


def test_a_column_is_joined_as_its_axes_say() -> None:
    layers = [Layer.of(reports.call(*torch.randn(2, 1, 2, n, 8), rg.Causal()), 0) for n in (5, 3)]
    steps = Joining(layers, [torch.arange(5), torch.tensor([0, 5, 6])], 8, 7)
    a, b = layers
    scores = steps.join("entropy", Column("head, query"))
    assert torch.equal(scores, torch.cat([a.entropy, b.entropy], 1))
    mass = steps.join("received", Column("head, key"))
    assert torch.equal(mass[:, 1:5], a.received[:, 1:]) and torch.equal(mass[:, 5:], b.received[:, 1:])
    assert torch.equal(mass[:, 0], a.received[:, 0] + b.received[:, 0])
    assert steps.join("own", Column("query", indices=True)).tolist() == [0, 1, 2, 3, 4, 0, 5, 6]
