"""AdditiveScore, BilinearScore, OwnedScore: parameters that a layer trains."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import regard as rg

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
DOUBLE = {"dtype": torch.float64}


def test_bilinear_returns_the_score_of_its_parameter() -> None:
    score = rg.nn.BilinearScore(5, 3, **DOUBLE)
    assert score() == rg.Bilinear(score.m) and score().m is score.m
    q, k = torch.randn(7, 5, **DOUBLE), torch.randn(11, 3, **DOUBLE)
    exact(rg.attention_weights(q, k, score=score()), torch.softmax(q @ score.m @ k.T, -1))


@pytest.mark.parametrize("bias", [False, True])
def test_additive_returns_the_score_of_its_parameters(bias: bool) -> None:
    score = rg.nn.AdditiveScore(5, 3, 13, bias=bias, **DOUBLE)
    assert (score.b is not None) == bias
    if score.b is not None:
        nn.init.normal_(score.b)
    q, k = torch.randn(7, 5, **DOUBLE), torch.randn(11, 3, **DOUBLE)
    hidden = torch.tanh((q @ score.w_q)[:, None] + (k @ score.w_k)[None] + (0 if score.b is None else score.b))
    exact(rg.attention_weights(q, k, score=score()), torch.softmax(hidden @ score.w, -1))


def test_an_activation_is_passed_along_and_no_part_of_the_state() -> None:
    plain, gat = rg.nn.AdditiveScore(5, 3, 13), rg.nn.AdditiveScore(5, 3, 13, activation=rg.LeakyReLU(0.1))
    assert plain().activation == rg.Tanh() and gat().activation == rg.LeakyReLU(0.1)
    assert "activation" not in repr(plain) and "LeakyReLU(slope=0.1)" in repr(gat)
    assert list(plain.state_dict()) == list(gat.state_dict()) == ["w_q", "w_k", "w"]


@pytest.mark.parametrize("heads", [None, 1, 6])
def test_parameters_have_a_head_axis_if_asked(heads: int | None) -> None:
    lead = () if heads is None else (heads,)
    additive = rg.nn.AdditiveScore(5, 3, 13, heads=heads, bias=True)
    shapes = {name: tuple(p.shape) for name, p in additive.named_parameters()}
    assert shapes == {"w_q": (*lead, 5, 13), "w_k": (*lead, 3, 13), "w": (*lead, 13), "b": (*lead, 13)}
    assert dict(rg.nn.BilinearScore(5, 3, heads=heads).named_parameters())["m"].shape == (*lead, 5, 3)


def test_each_head_has_its_own_weights_and_keys_may_have_fewer() -> None:
    score = rg.nn.AdditiveScore(5, 3, 13, heads=6, key_heads=2, **DOUBLE)
    q, k = torch.randn(2, 6, 7, 5, **DOUBLE), torch.randn(2, 2, 11, 3, **DOUBLE)
    weights = rg.attention_weights(q, k, score=score())
    for h in range(6):
        one = rg.Additive(score.w_q[h], score.w_k[h // 3], score.w[h])
        exact(weights[:, h], rg.attention_weights(q[:, h], k[:, h // 3], score=one))


def test_bilinear_scores_start_with_variance_1() -> None:
    score = rg.nn.BilinearScore(67, 41, heads=5)
    variance = (score.m * (67 * 41) ** 0.5).square().mean()  # of 13,735 numbers: deviates by 0.012
    assert 0.95 < variance < 1.05


def test_additive_starts_as_documented() -> None:
    score = rg.nn.AdditiveScore(67, 41, 211, heads=7, bias=True)
    for weight, scale in ((score.w_q, 67 + 41), (score.w_k, 67 + 41), (score.w, 211)):
        assert 0.85 < (weight * scale**0.5).square().mean() < 1.15
    assert score.b is not None and bool((score.b == 0).all())


SCORES = {
    "bilinear": lambda: rg.nn.BilinearScore(4, 4, heads=3, **DOUBLE),
    "additive": lambda: rg.nn.AdditiveScore(4, 4, 5, heads=3, bias=True, **DOUBLE),
    "relative": lambda: (
        rg.ScaledDot() >> rg.RelativeBias(nn.Parameter(torch.randn(5, 3, **DOUBLE)), rg.ClippedBuckets(2, 2))
    ),
    "temperature": lambda: rg.ScaledDot(nn.Parameter(torch.ones(3, **DOUBLE))) >> rg.SoftCap(5.0),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_layer_trains_the_parameters_of_its_score(name: str) -> None:
    layer = rg.nn.MultiHeadAttention(12, 3, score=SCORES[name](), **DOUBLE)
    learned = {n: p for n, p in layer.named_parameters() if n.startswith("score.")}
    assert learned and {n for n in layer.state_dict() if n.startswith("score.")} == set(learned)
    x, target = torch.randn(2, 7, 12, **DOUBLE), torch.randn(2, 7, 12, **DOUBLE)
    loss = (layer(x) - target).square().sum()
    loss.backward()
    for n, p in learned.items():
        assert p.grad is not None and bool(p.grad.abs().max() > 1e-9), n
    torch.optim.SGD(learned.values(), lr=1e-3).step()
    assert (layer(x) - target).square().sum() < loss


@pytest.mark.parametrize("name", SCORES)
def test_a_layer_with_such_a_score_copies_pickles_and_loads(name: str) -> None:
    layer, x = rg.nn.MultiHeadAttention(12, 3, score=SCORES[name](), **DOUBLE), torch.randn(2, 7, 12, **DOUBLE)
    other = rg.nn.MultiHeadAttention(12, 3, score=SCORES[name](), **DOUBLE)
    other.load_state_dict(layer.state_dict())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        assert torch.equal(twin(x), layer(x))
        mine, its = dict(layer.named_parameters()), dict(twin.named_parameters())
        assert all(mine[n] is not its[n] for n in mine)


def test_tensors_that_are_not_learned_move_with_the_layer_and_are_not_saved() -> None:
    score = rg.ScaledDot() >> rg.Alibi(rg.Alibi.geometric(3))
    layer = rg.nn.MultiHeadAttention(12, 3, score=score)
    assert not [n for n in layer.state_dict() if n.startswith("score")]
    assert [tuple(b.shape) for b in layer.buffers()] == [(3,)]
    assert layer.scoring()["score"] == score
    assert layer.double().scoring()["score"].tensors()[0].dtype == torch.float64
    assert layer.to("meta").scoring()["score"].tensors()[0].is_meta


def test_a_score_without_tensors_stays_what_it_is() -> None:
    score = rg.ScaledDot() >> rg.SoftCap(5.0)
    assert rg.nn.MultiHeadAttention(12, 3, score=score).score is score


def test_owned_parameters_are_the_very_same() -> None:
    table = nn.Parameter(torch.zeros(5, 1))
    score = rg.nn.OwnedScore(rg.Dot() >> rg.RelativeBias(table, rg.ClippedBuckets(2, 2)))
    assert score().tensors()[0] is table and list(score.parameters()) == [table]


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="score is a str; expected a Score, or a module that returns one when called"):
        rg.nn.MultiHeadAttention(12, 3, score="dot")  # type: ignore[arg-type]

    class Three(nn.Module):
        def forward(self) -> float:
            return 3.0

    layer = rg.nn.MultiHeadAttention(12, 3, score=Three())
    with pytest.raises(TypeError, match=r"score is a float; a factor is ScaledDot\(scale\)"):
        layer(torch.zeros(7, 12))
