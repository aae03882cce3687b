"""Rollout is one row of the dense product over the layers, found without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard as rg
from fact_checks import tiles
from regard.call.hooks import AttentionCall, observing

N = 13
MASK = rg.Causal() & rg.Lengths(keys=torch.tensor([13, 7]), queries=torch.tensor([13, 7]))


def draw(heads: int, key_heads: int, sink: Tensor | None = None, mask: rg.Mask = MASK) -> AttentionCall:
    q, k = (torch.randn(2, h, N, 5, dtype=torch.float64) for h in (heads, key_heads))
    return AttentionCall(None, q, k, score=rg.ScaledDot() >> rg.SoftCap(3.0), mask=mask, sink=sink)


def dense(calls: list[AttentionCall], residual: float) -> Tensor:
    """A_L ··· A_1, (batch, n, n)."""
    product = torch.eye(N, dtype=torch.float64).expand(2, N, N)
    for call in calls:
        p = rg.attention_weights(call.q, call.k, score=call.score, mask=call.mask, sink=call.sink).mean(1)
        product = (residual * torch.eye(N, dtype=torch.float64) + (1 - residual) * p) @ product
    return product


@pytest.mark.parametrize("residual", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("row", [0, 5, -1])
def test_one_row_of_the_dense_product(row: int, residual: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 4, 5)
    calls = [draw(4, 2), draw(3, 3, sink=torch.randn(3, dtype=torch.float64)), draw(6, 1, mask=rg.Everything())]
    expected = dense(calls, residual)[:, row]
    torch.testing.assert_close(rg.rollout(calls, row, residual), expected, rtol=1e-12, atol=1e-14)


def test_layers_go_from_last_to_first() -> None:
    calls = [draw(2, 2), draw(2, 2)]
    assert not torch.allclose(rg.rollout(calls, 5), rg.rollout(calls[::-1], 5))
    torch.testing.assert_close(rg.rollout(calls, 5), dense(calls, 0.5)[:, 5])


def test_shares_sum_to_1_without_sinks_and_empty_rows() -> None:
    calls = [draw(2, 2, mask=rg.Causal()) for _ in range(5)]
    torch.testing.assert_close(rg.rollout(calls, -1).sum(-1), torch.ones(2, dtype=torch.float64))


def test_of_a_model_as_it_is_heard() -> None:
    layers = [rg.nn.MultiHeadAttention(8, heads=2) for _ in range(3)]
    heard: list[AttentionCall] = []
    x = torch.randn(1, 9, 8)
    with observing(heard.append), torch.no_grad():
        for layer in layers:
            x = x + layer(x, mask=rg.Causal())
    share = rg.rollout(heard, 4)
    assert share.shape == (1, 9) and (share[:, 5:] == 0).all() and not share.requires_grad
    torch.testing.assert_close(share.sum(-1), torch.ones(1))


def test_a_recording() -> None:
    """The tape or its calls give what the calls themselves give; the last token where none is named."""
    model = torch.nn.Sequential(*[rg.nn.MultiHeadAttention(8, heads=2) for _ in range(3)])
    with rg.record(model, facts=(rg.facts.Entropy(), rg.facts.Inputs())) as tape, torch.no_grad():
        model(torch.randn(1, 9, 8))
    calls = [call[rg.facts.Inputs()] for call in tape]
    assert len(calls) == 3 and torch.equal(rg.rollout(tape), rg.rollout(calls, 8))
    assert torch.equal(rg.rollout(tape.calls[:2], 3), rg.rollout(calls[:2], 3))


def test_calls_without_a_head_axis() -> None:
    call = draw(1, 1)
    bare = replace(call, q=call.q[:, 0], k=call.k[:, 0])
    assert torch.equal(rg.rollout([bare, bare], 3), rg.rollout([call, call], 3))


def test_sequences_of_one_length_are_told_apart() -> None:
    model = torch.nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
    with torch.no_grad(), rg.record(model, facts=(rg.facts.Inputs(),)) as tape:
        model(torch.randn(1, 5, 16), torch.randn(1, 5, 16))
    assert [call.kind for call in tape] == ["encoder", "self", "cross"]
    with pytest.raises(rg.ShapeError, match=r"calls\[2\] is cross-attention; .* leave it out"):
        rg.rollout(tape)
    with pytest.raises(rg.ShapeError, match=r"calls\[0\] is an encoder's and calls\[1\] is its decoder's"):
        rg.rollout(tape.calls[:2])
    for n in range(2):
        assert rg.rollout(tape.calls[n : n + 1]).shape == (1, 5)
    call = replace(draw(2, 2), cross=True)
    with pytest.raises(rg.ShapeError, match=r"calls\[0\] is cross-attention"):
        rg.rollout([call])


def test_what_is_refused() -> None:
    call = draw(2, 2)
    crossed = replace(call, k=call.k[:, :, :4], mask=rg.Everything())
    model = rg.nn.MultiHeadAttention(8, heads=2)
    with rg.record(model) as tape:
        model(torch.randn(1, 9, 8))
    shorter = replace(call, q=call.q[:, :, :4], k=call.k[:, :, :4], mask=rg.Everything())
    other = replace(call, q=call.q[:1], k=call.k[:1], mask=rg.Causal())
    refusals = [
        (lambda: rg.rollout([], 0), ValueError, "calls is empty"),
        (lambda: rg.rollout(tape), ValueError, r"calls\[0\] has no queries and keys; .*facts=\(rg.facts.Inputs"),
        (lambda: rg.rollout([call], 13), IndexError, "row is 13; there are 13 tokens."),
        (lambda: rg.rollout([call], 0, residual=1.5), ValueError, "residual is 1.5; expected a share from 0 to 1."),
        (lambda: rg.rollout([crossed, call], 0), rg.ShapeError, r"calls\[0\] has 13 queries and 4 keys"),
        (lambda: rg.rollout([call], 1.5), TypeError, r"row is 1\.5; expected an integer"),  # type: ignore[arg-type]
        (lambda: rg.rollout([call, other], 0), rg.ShapeError, r"calls\[0\] has batch axes \(2,\), .* \(1,\)"),
        (lambda: rg.rollout([call, shorter, shorter], 0), rg.ShapeError, r"calls\[0\] has 13 queries and 13 keys"),
    ]
    for make, kind, text in refusals:
        with pytest.raises(kind, match=text):
            make()
