"""Attention: one head, the same layer as MultiHeadAttention with heads=1, without the head axis."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import regard as rg

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
DOUBLE = {"dtype": torch.float64}
WIDTH, CONTEXT, NQ, NK, BATCH = 13, 5, 7, 11, 2

OPTIONS = {
    "plain": {},
    "cross": {"d_context": CONTEXT},
    "no bias": {"bias": False},
    "every option": {
        "rotary": rg.nn.Rotary(2),
        "qk_norm": nn.RMSNorm,
        "sink": 0.3,
        "score": rg.ScaledDot() >> rg.SoftCap(3.0),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_multi_head_attention_with_one_head(name: str) -> None:
    one = rg.nn.Attention(WIDTH, 4, 3, d_out=17, **OPTIONS[name], **DOUBLE)
    many = rg.nn.MultiHeadAttention(WIDTH, 1, d_k=4, d_v=3, d_out=17, **OPTIONS[name], **DOUBLE)
    many.load_state_dict(one.state_dict())
    x, c = torch.randn(BATCH, NQ, WIDTH, **DOUBLE), None
    if "d_context" in OPTIONS[name]:
        c = torch.randn(BATCH, NK, CONTEXT, **DOUBLE)
    assert torch.equal(one(x, c), many(x, c)) and one(x, c).shape == (BATCH, NQ, 17)
    assert torch.equal(one.attend(x, c), many.attend(x, c)[:, 0])
    assert torch.equal(one.weights(x, c), many.weights(x, c)[:, 0])
    rows = torch.tensor([3, -1])
    assert torch.equal(one.weights(x, c, rows=rows), many.weights(x, c)[:, 0, rows])


def test_dropout_and_a_named_backend_reach_it() -> None:
    layer, x = rg.nn.Attention(WIDTH, 4, 3, dropout=0.5, backend=rg.Tiled(2, 3)), torch.randn(BATCH, NQ, WIDTH)
    assert layer.dropout == rg.Dropout(0.5) and layer.backend == rg.Tiled(2, 3)
    assert not torch.equal(layer(x), layer(x)) and torch.equal(layer.eval()(x), layer(x))


def test_without_an_up_projection_it_is_the_formula() -> None:
    layer = rg.nn.Attention(WIDTH, 4, 3, d_context=CONTEXT, bias=False, **DOUBLE)
    x, c = torch.randn(NQ, WIDTH, **DOUBLE), torch.randn(NK, CONTEXT, **DOUBLE)
    w_q, w_k, w_v = (p.T for p in layer.parameters())
    weights = torch.softmax((x @ w_q) @ (c @ w_k).T / math.sqrt(4), -1)
    exact(layer.weights(x, c), weights)
    exact(layer(x, c), weights @ (c @ w_v))
    assert torch.equal(layer(x, c), layer.attend(x, c))


@pytest.mark.parametrize(
    "score",
    [
        rg.Dot(),
        rg.Cosine(2.0),
        rg.Distance(0.3),
        rg.Custom(lambda q, k: -torch.cdist(q, k, p=1)),
        rg.ScaledDot() >> rg.SoftCap(1.0),
    ],
    ids=repr,
)
def test_any_score_compares_the_projections(score: rg.Score) -> None:
    layer = rg.nn.Attention(WIDTH, 4, 3, score=score, **DOUBLE)
    x = torch.randn(BATCH, NQ, WIDTH, **DOUBLE)
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    exact(layer(x), rg.attention(q, k, v, score=score, backend=rg.Reference()))


@pytest.mark.parametrize("d_v", [None, 3])
@pytest.mark.parametrize("d_out", [None, 17])
def test_projections_that_are_not_wanted_are_not_there(d_v: int | None, d_out: int | None) -> None:
    score = rg.nn.AdditiveScore(WIDTH, CONTEXT, 19, **DOUBLE)
    layer = rg.nn.Attention(WIDTH, None, d_v, d_context=CONTEXT, d_out=d_out, score=score, bias=False, **DOUBLE)
    linears = [n for n, _ in layer.named_parameters() if n.endswith("weight")]
    assert linears == (["v_proj.weight"] if d_v else []) + (["out_proj.weight"] if d_out else [])
    x, c = torch.randn(BATCH, NQ, WIDTH, **DOUBLE), torch.randn(BATCH, NK, CONTEXT, **DOUBLE)
    values = layer.v_proj(c) if d_v else c
    exact(layer.attend(x, c), rg.attention(x, c, values, score=score(), backend=rg.Reference()))
    exact(layer(x, c), layer.out_proj(layer.attend(x, c)))
    layer(x, c).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in layer.parameters())


def test_without_any_projection_it_has_no_parameters() -> None:
    layer, x = rg.nn.Attention(WIDTH, None, None), torch.randn(NQ, WIDTH)
    assert not list(layer.parameters())
    assert torch.equal(layer(x), rg.attention(x[None, None], x[None, None], x[None, None])[0, 0])


def test_axes_before_the_sequence_are_batch_axes() -> None:
    layer, x = rg.nn.Attention(WIDTH, 4, 3, **DOUBLE), torch.randn(3, BATCH, NQ, WIDTH, **DOUBLE)
    assert layer(x).shape == (3, BATCH, NQ, 3) and layer.weights(x).shape == (3, BATCH, NQ, NQ)
    exact(layer(x)[2, 1], layer(x[2, 1]))
    exact(layer.weights(x)[2, 1], layer.weights(x[2, 1]))


def test_a_score_that_cannot_compare_the_widths_is_refused() -> None:
    layer = rg.nn.Attention(WIDTH, None, 3, d_context=CONTEXT)
    with pytest.raises(rg.ShapeError, match="q has width 13, k has width 5"):
        layer(torch.zeros(NQ, WIDTH), torch.zeros(NK, CONTEXT))
    with pytest.raises(ValueError, match=r"Rotary\(6, base=10000\) turns 6 features; a query has 13, a key 5"):
        rg.nn.Attention(WIDTH, None, 3, d_context=CONTEXT, rotary=rg.nn.Rotary(6))
