"""Report.row: any row of the weights, exactly, from queries and keys that were kept; against the dense definition."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.call.hooks import AttentionCall
from regard.demo.model import SEEN, load
from regard.demo.reading import read
from regard.inspect.report.kept_call import KeptCall

FACTS = (*rg.Report.FACTS, rg.facts.Inputs())


@torch.no_grad()
def test_a_row_of_a_long_text_is_that_of_all_weights() -> None:
    model, text = load(), bytes(range(32, 127)) * 6
    report = read(model, text, facts=FACTS)
    x = model.embedding(torch.tensor([list(text)]))
    p = model.blocks[0].attention.weights(model.blocks[0].attention_norm(x), mask=SEEN)[0]
    assert report.layers[0].weights.numel() == 0 and len(text) == 570
    for query in (0, 300, 569, -1):
        row = report.row("L0H2", query)
        torch.testing.assert_close(row, p[2, query], rtol=1e-5, atol=1e-7)
    assert (row[: 569 - 255] == 0).all() and torch.equal(report.row((0, 2), 569), row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_grouped_heads_with_a_sink_and_modifiers(dtype: torch.dtype) -> None:
    """Half precision is not rounded once more: the weights are those of its numbers in float32."""
    torch.manual_seed(0)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=dtype)
    score = rg.ScaledDot() >> rg.SoftCap(5.0) >> rg.Alibi(slopes)
    q, k = torch.randn(3, 4, 11, 8).to(dtype), torch.randn(3, 2, 11, 8).to(dtype)
    mask, sink = rg.Causal() & rg.Window(before=5, after=0), torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype)
    view = mask.on(11, batch=(3,), heads=4)
    call = KeptCall(
        AttentionCall(None, q, k, score, mask, None, sink), view, 2, slice(1, 9), slice(0, 9), torch.arange(9)
    )
    wide = rg.ScaledDot() >> rg.SoftCap(5.0) >> rg.Alibi(slopes.double())
    p = rg.attention_weights(q.double(), k.double(), score=wide, mask=mask, sink=sink.double())[2]
    for query in range(8):
        weights, seen = call.row(query, 9)
        assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(weights.double(), p[:, query + 1, :9], rtol=1e-5, atol=1e-7)
        assert torch.equal(seen[0], mask.on(11).dense()[0, query + 1, :9]) and call.queries == 8


@torch.no_grad()
def test_one_of_a_batch_without_its_padding() -> None:
    torch.manual_seed(0)
    layer, x, lengths = rg.nn.MultiHeadAttention(16, heads=4), torch.randn(3, 11, 16), torch.tensor([11, 9, 7])
    mask = rg.Causal() & rg.Lengths(keys=lengths, queries=lengths)
    with rg.record(layer, facts=FACTS) as tape:
        layer(x, mask=mask)
    report = rg.Report.of(tape.calls, title="", model="", element=2)
    p = layer.weights(x, mask=mask)[2]
    assert report.row("L0H1", -1).shape == (7,)
    for query in range(7):
        torch.testing.assert_close(report.row((0, 1), query), p[1, query, :7], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_steps_of_a_cache_are_one_sequence() -> None:
    torch.manual_seed(0)
    layer, x = rg.nn.MultiHeadAttention(16, heads=4), torch.randn(1, 9, 16)
    cache = rg.nn.GrowingCache()
    with rg.record(layer, facts=FACTS) as tape:
        for start, end in ((0, 6), (6, 7), (7, 8), (8, 9)):
            layer(x[:, start:end], mask=rg.Causal(), cache=cache)
    report = rg.Report.of(tape.calls, title="", model="")
    p = layer.weights(x, mask=rg.Causal())[0]
    for query in range(9):
        torch.testing.assert_close(report.row((0, 3), query), p[3, query], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_steps_of_a_cache_that_drops_keys() -> None:
    torch.manual_seed(0)
    layer, x, cache = rg.nn.MultiHeadAttention(16, heads=4), torch.randn(1, 9, 16), rg.nn.RollingCache(4)
    mask = rg.Causal() & rg.Window(before=3, after=0)
    with rg.record(layer, facts=FACTS) as tape:
        for step in range(9):
            layer(x[:, step : step + 1], mask=mask, cache=cache)
    report = rg.Report.of(tape.calls, title="", model="")
    p = layer.weights(x, mask=mask)[0]
    for query in range(9):
        torch.testing.assert_close(report.row((0, 3), query), p[3, query], rtol=1e-5, atol=1e-6)


def test_what_they_take_is_told() -> None:
    without, kept = (read(load(), b"to be or not to be", facts=facts) for facts in (rg.Report.FACTS, FACTS))
    assert (without.inputs, kept.inputs) == (0, 4 * 2 * 18 * 128 * 4)
    assert ", q and k 73.7 kB" in str(kept).replace("\n", " ") and "q and k" not in str(without)


def test_what_is_not_there() -> None:
    report = read(load(), b"to be", facts=FACTS)
    with pytest.raises(IndexError, match=r"there is no query 5; blocks.3.attention has queries 0 to 4"):
        report.row("L3H1", 5)
    with pytest.raises(ValueError, match="there is no head L9H1"):
        report.row((9, 1), 0)
    with pytest.raises(ValueError, match=r"were not kept.*facts=\(\*rg.Report.FACTS, rg.facts.Inputs\(\)\)"):
        read(load(), b"to be", facts=rg.Report.FACTS).row("L3H1", 0)
