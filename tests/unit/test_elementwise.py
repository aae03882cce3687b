"""Elementwise: its definition, the laws of its sum over features, its gradients, its memory, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.parallel.call_on_heads import score_of_heads
from regard.parallel.heads import HeadShare
from regard.scores import elementwise

F64 = torch.float64
HEADS, KEY_HEADS, WIDTH = 6, 3, 37  # features: two runs of 16 and some
AT = testing.frame(batch=(2,), heads=HEADS, nq=5, nk=7)
close = torch.testing.assert_close


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def manhattan(q: Tensor, k: Tensor) -> Tensor:
    return -(q - k).abs()


def gaussian(q: Tensor, k: Tensor, width: Tensor, scale: Tensor) -> Tensor:
    return -scale * ((q - k) / width.exp()) ** 2


def gat(q: Tensor, k: Tensor, a: Tensor) -> Tensor:
    return a * torch.nn.functional.leaky_relu(q + k, 0.2)


def gated(q: Tensor, k: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return q * k * torch.sigmoid(gate * q + bias)


def keys_alone(q: Tensor, k: Tensor, a: Tensor) -> Tensor:
    return (a * k).sin()


SCORES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "manhattan": (manhattan, ()),
    "gaussian": (gaussian, ((WIDTH,), ())),
    "gat": (gat, ((HEADS, WIDTH),)),
    "gated": (gated, ((HEADS, 1), (1,))),
    "one row for all heads": (gat, ((1, WIDTH),)),
    "of keys alone": (keys_alone, ((WIDTH,),)),
}


def drawn(name: str) -> rg.Elementwise:
    fn, shapes = SCORES[name]
    return rg.Elementwise(fn, tensors=tuple(randn(*shape) for shape in shapes))


@pytest.fixture(params=[1, 1 << 20], ids=["features in runs", "features at once"])
def runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "_BUDGET", request.param)


def dense(score: rg.Elementwise, q: Tensor, k: Tensor) -> Tensor:
    """The definition, feature by feature, from tensors that have a number for each head and feature."""
    k = k.repeat_interleave(HEADS // KEY_HEADS, -3)
    total = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=q.dtype)
    for f in range(WIDTH):
        each = [t.expand(HEADS, WIDTH)[:, f, None, None] for t in score.inputs]
        total = total + score.fn(q[..., :, None, f], k[..., None, :, f], *each)
    return total


@pytest.mark.parametrize("name", SCORES)
def test_the_sum_over_features_of_the_function(name: str, runs: None) -> None:
    score = drawn(name)
    case = testing.draw(AT, key_heads=KEY_HEADS, dk=WIDTH, score=score)
    close(rg.attention_scores(case.q, case.k, score=score), dense(score, case.q, case.k))


@pytest.mark.parametrize("name", SCORES)
def test_tiles_agree_with_the_definition(name: str, runs: None) -> None:
    case = testing.draw(AT, key_heads=KEY_HEADS, dk=WIDTH, score=drawn(name), mask=rg.Prefix(4), sink=True)
    exact = testing.answers(case, rg.Reference(), F64)
    for backend in (rg.Tiled(rows=2, keys=3), rg.Tiled()):
        got = testing.answers(case, backend, F64)
        assert list(got) == list(exact)
        for what, x in got.items():
            close(x, exact[what])


@pytest.mark.parametrize("name", SCORES)
def test_gradients(name: str, runs: None) -> None:
    fn, shapes = SCORES[name]
    inputs = [randn(1, HEADS, 2, WIDTH), randn(1, KEY_HEADS, 5, WIDTH), randn(1, KEY_HEADS, 5, 2)]
    inputs = [t.requires_grad_() for t in (*inputs, *(randn(*shape) for shape in shapes))]

    def run(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        return rg.attention(q, k, v, score=rg.Elementwise(fn, tensors), backend=rg.Tiled(rows=2, keys=3))

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_second_derivatives() -> None:
    inputs = [
        t.requires_grad_() for t in (randn(1, 3, 2, 5), randn(1, 3, 3, 5), randn(1, 3, 3, 2), randn(3, 1), randn(1))
    ]

    def run(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        return rg.attention(q, k, v, score=rg.Elementwise(gated, tensors))

    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_gatv2_is_an_additive_score() -> None:
    a, (q, k, v) = randn(HEADS, WIDTH), (randn(2, HEADS, 5, WIDTH) for _ in range(3))
    additive = rg.Additive(None, None, a, activation=rg.LeakyReLU(0.2))
    close(rg.attention(q, k, v, score=rg.Elementwise(gat, (a,))), rg.attention(q, k, v, score=additive))


def test_products_are_a_dot_product() -> None:
    case = testing.draw(AT, key_heads=KEY_HEADS, dk=WIDTH)
    scaled = rg.Elementwise(lambda q, k: q * k / math.sqrt(WIDTH))
    close(rg.attention(case.q, case.k, case.v, score=scaled), rg.attention(case.q, case.k, case.v))


def test_the_width_of_a_gaussian_is_learned() -> None:
    """Keys that differ from the queries in one feature only: that one's width shrinks."""
    q = k = torch.tensor([[0.0, 0.0], [0.1, 3.0]])
    width = torch.zeros(2, requires_grad=True)
    score = rg.Elementwise(lambda q, k, width: -(((q - k) / width.exp()) ** 2), (width,))
    rg.attention_weights(q, k, score=score).diagonal().sum().backward()
    assert width.grad is not None and width.grad[1] < width.grad[0] < 0


@pytest.mark.parametrize("grad", [False, True])
def test_no_pair_holds_all_features_at_once(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that fn sees, forward and backward: it does not grow with the sequence."""
    monkeypatch.setattr(elementwise, "_BUDGET", 1 << 14)
    sizes: list[int] = []

    def fn(q: Tensor, k: Tensor, a: Tensor) -> Tensor:
        terms = a * (q - k).abs()
        sizes.append(terms.numel())
        return terms

    q, k, v = (torch.randn(1, 1, 520, 131, requires_grad=grad) for _ in range(3))
    out = rg.attention(q, k, v, score=rg.Elementwise(fn, (torch.rand(131, requires_grad=grad),)), backend=rg.Tiled())
    if grad:
        out.sum().backward()
    assert max(sizes) <= 1 << 20 and len(sizes) > 9  # all features of a tile would be 8 times as many


def test_some_of_the_heads() -> None:
    a, b = randn(HEADS, WIDTH), randn(WIDTH)
    some = score_of_heads(rg.Elementwise(lambda q, k, a, b: a * (q - k) * b, (a, b)), HeadShare(2, 3, HEADS, (1, 2, 2)))
    first = some.stages[0]
    assert isinstance(first, rg.Elementwise)
    close(first.inputs[0], a[2:5])
    assert first.inputs[1] is b


def test_half_precision_is_summed_in_float32() -> None:
    case = testing.draw(AT, key_heads=KEY_HEADS, dk=WIDTH, score=drawn("gaussian")).leaves(torch.bfloat16)
    got = rg.attention_scores(case.q, case.k, score=case.score)
    assert got.dtype == torch.float32
    wide = case.leaves(F64)
    close(got, rg.attention_scores(wide.q, wide.k, score=wide.score).float(), rtol=1e-5, atol=1e-5)


QKV = tuple(torch.randn(2, 3, 5, 4) for _ in range(3))
LEARNED = torch.ones(4, requires_grad=True)
ELEMENTWISE: Any = rg.Elementwise  # of arguments that no type checker lets pass
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no function": (lambda: ELEMENTWISE(3), TypeError, "Elementwise.fn is an int; expected a function"),
    "no features": (lambda: ELEMENTWISE(lambda q, k: (q * k).sum(-1)), TypeError, r"returned \(1, 2, 3\) .* each"),
    "one feature": (lambda: ELEMENTWISE(lambda q, k: (q * k).sum(-1, True)), TypeError, r"expected \(1, 2, 3, 3\)"),
    "no tensor": (lambda: ELEMENTWISE(lambda q, k: 1.0), TypeError, "returned float"),
    "one argument": (lambda: ELEMENTWISE(lambda q: q), TypeError, r"cannot be called as fn\(q, k\)"),
    "over features": (lambda: ELEMENTWISE(lambda q, k: (q * k).softmax(-1)), TypeError, "is not elementwise"),
    "over keys": (lambda: ELEMENTWISE(lambda q, k: q - k.mean(-2, True)), TypeError, "is not elementwise"),
    "turned": (lambda: ELEMENTWISE(lambda q, k: q * k.flip(-1)), TypeError, "is not elementwise"),
    "chance": (lambda: ELEMENTWISE(lambda q, k: q * torch.rand_like(k)), TypeError, "is not elementwise"),
    "held": (lambda: ELEMENTWISE(lambda q, k: q * k * torch.ones(3)), TypeError, "pass tensors with a number for"),
    "whole numbers": (lambda: ELEMENTWISE(gat, (torch.ones(4).long(),)), TypeError, "dtype torch.int64"),
    "three axes": (lambda: ELEMENTWISE(gat, (torch.ones(3, 1, 4),)), TypeError, r"\(3, 1, 4\); expected \(\), \(d,"),
    "inputs": (lambda: ELEMENTWISE(gat, inputs=(LEARNED,)), TypeError, "write tensors="),
    "heads": (lambda: ELEMENTWISE(gat, (torch.ones(2, 4),)), rg.ShapeError, r"\(2, 4\); expected .* \(3, d\)"),
    "width": (lambda: ELEMENTWISE(gat, (torch.ones(3),)), rg.ShapeError, r"width 4; a number .* is \(heads, 1\)"),
    "hidden": (lambda: ELEMENTWISE(lambda q, k: q * k * LEARNED[0]), ValueError, r"Elementwise\(fn\): fn uses a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, error, said = REFUSED[name]
    with pytest.raises(error, match=said):
        rg.attention(*QKV, score=make())


def test_other_widths_are_refused() -> None:
    q, k, v = QKV
    with pytest.raises(rg.ShapeError, match="Elementwise compares equal widths"):
        rg.attention(q, k[..., :3], v, score=rg.Elementwise(manhattan))


def test_tensors_may_come_from_an_iterator() -> None:
    """Such as the parameters of a module."""
    layer = torch.nn.Linear(3, 1, bias=False)
    score = rg.Elementwise(lambda q, k, w: q * k * w, tensors=(p[0] for p in layer.parameters()))
    assert len(score.tensors()) == len(rg.Custom(lambda q, k, w: q @ k.mT, layer.parameters()).tensors()) == 1
