"""Every similarity against its formula, pair by pair in Python, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from math import tanh

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.call.arguments import build_problem
from regard.core.shapes import repeat_heads
from regard.scores.similarity import _sorted_median

BATCH, HEADS, KEY_HEADS, NQ, NK, DQ, DK = 2, 6, 3, 5, 7, 4, 4
HIDDEN, WIDE = 11, 9
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
NAN, INF = math.nan, math.inf


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def scores(score: rg.Score, q: Tensor, k: Tensor) -> Tensor:
    problem = build_problem(q, k, k[..., :0], score, rg.Everything(), rg.head(q.shape[-2], k.shape[-2]), None)[0]
    return problem.region_tile(problem.frame.region()).scores


Pair = Callable[[list[float], list[float], int, int], float]


def pair_by_pair(pair: Pair, q: Tensor, k: Tensor) -> Tensor:
    """pair(query, key, query head, key head) for each pair, on lists of Python numbers."""
    group = HEADS // KEY_HEADS
    return torch.tensor(
        [
            [
                [[pair(x, y, h, h // group) for y in k[b][h // group].tolist()] for x in q[b][h].tolist()]
                for h in range(HEADS)
            ]
            for b in range(BATCH)
        ],
        dtype=torch.float64,
    )


def dot(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def times(x: list[float], m: list[list[float]]) -> list[float]:
    return [dot(x, list(column)) for column in zip(*m, strict=True)]


def bilinear(m: Tensor) -> Pair:
    return lambda x, y, h, g: dot(times(x, m.expand(HEADS, *m.shape[-2:])[h].tolist()), y)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def leaky(x: float) -> float:
    return x if x > 0 else 0.2 * x


def additive(
    w_q: Tensor | None, w_k: Tensor | None, w: Tensor, b: Tensor | None, f: Callable[[float], float] = tanh
) -> Pair:
    def pair(x: list[float], y: list[float], h: int, g: int) -> float:
        x = x if w_q is None else times(x, w_q.expand(HEADS, -1, -1)[h].tolist())
        y = y if w_k is None else times(y, w_k.expand(KEY_HEADS, -1, -1)[g].tolist())
        shift = [0.0] * len(x) if b is None else b.expand(HEADS, -1)[h].tolist()
        hidden = [f(p + q + r) for p, q, r in zip(x, y, shift, strict=True)]
        return dot(w.expand(HEADS, -1)[h].tolist(), hidden)

    return pair


def cosine(scale: Tensor) -> Pair:
    return lambda x, y, h, g: float(scale.expand(HEADS)[h]) * dot(x, y) / (math.hypot(*x) * math.hypot(*y))


def distance(gamma: Tensor) -> Pair:
    return lambda x, y, h, g: -float(gamma.expand(HEADS)[h]) * math.dist(x, y) ** 2


def scaled(scale: Tensor) -> Pair:
    return lambda x, y, h, g: float(scale.expand(HEADS)[h]) * dot(x, y)


def formulas() -> dict[str, tuple[Callable[..., rg.Score], tuple[Tensor | None, ...], Callable[..., Pair], int, int]]:
    """By name: the score of some tensors, these tensors, the pair function of the same tensors, dq and dk."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=g)

    one, each = randn(1)[0].abs(), randn(HEADS).abs()
    mixed = (randn(HEADS, DQ, HIDDEN), randn(KEY_HEADS, WIDE, HIDDEN), randn(HEADS, HIDDEN), randn(HIDDEN))
    return {
        "Dot": (rg.Dot, (), lambda: scaled(torch.ones(1)), DQ, DK),
        "ScaledDot": (rg.ScaledDot, (), lambda: scaled(torch.tensor(1 / math.sqrt(DK))), DQ, DK),
        "ScaledDot ()": (rg.ScaledDot, (one,), scaled, DQ, DK),
        "ScaledDot (h,)": (rg.ScaledDot, (each,), scaled, DQ, DK),
        "Bilinear": (rg.Bilinear, (randn(DQ, WIDE),), bilinear, DQ, WIDE),
        "Bilinear (h, ...)": (rg.Bilinear, (randn(HEADS, WIDE, DK),), bilinear, WIDE, DK),
        "Additive": (rg.Additive, (randn(DQ, HIDDEN), randn(WIDE, HIDDEN), randn(HIDDEN), None), additive, DQ, WIDE),
        "Additive (h, ...)": (rg.Additive, mixed, additive, DQ, WIDE),
        "Additive b (h, ...)": (rg.Additive, (*mixed[:3], randn(HEADS, HIDDEN)), additive, DQ, WIDE),
        "Additive, q projected": (rg.Additive, (None, *mixed[1:]), additive, HIDDEN, WIDE),
        "Additive, k projected": (rg.Additive, (mixed[0], None, *mixed[2:]), additive, DQ, HIDDEN),
        "Additive, both projected": (rg.Additive, (None, None, randn(HIDDEN), None), additive, HIDDEN, HIDDEN),
        "Additive, sigmoid": (
            partial(rg.Additive, activation=rg.Sigmoid()),
            mixed,
            partial(additive, f=sigmoid),
            DQ,
            WIDE,
        ),
        "Additive, GATv2": (
            partial(rg.Additive, activation=rg.LeakyReLU()),
            mixed,
            partial(additive, f=leaky),
            DQ,
            WIDE,
        ),
        "Cosine": (rg.Cosine, (), lambda: cosine(torch.ones(1)), DQ, DK),
        "Cosine ()": (rg.Cosine, (one,), cosine, DQ, DK),
        "Cosine (h,)": (rg.Cosine, (each,), cosine, DQ, DK),
        "Distance": (rg.Distance, (), lambda: distance(torch.tensor(0.5)), DQ, DK),
        "Distance ()": (rg.Distance, (one,), distance, DQ, DK),
        "Distance (h,)": (rg.Distance, (each,), distance, DQ, DK),
    }


NAMES = list(formulas())


@pytest.mark.parametrize("name", NAMES)
def test_formulas(name: str) -> None:
    make, tensors, pair, dq, dk = formulas()[name]
    q, k = randn(BATCH, HEADS, NQ, dq), randn(BATCH, KEY_HEADS, NK, dk)
    torch.testing.assert_close(scores(make(*tensors), q, k), pair_by_pair(pair(*tensors), q, k), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_through_tiles(name: str) -> None:
    make, tensors, _, dq, dk = formulas()[name]
    given = [t for t in tensors if t is not None]
    inputs = [randn(1, HEADS, 3, dq), randn(1, KEY_HEADS, 5, dk), randn(1, KEY_HEADS, 5, 2), *given]
    for t in inputs:
        t.requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, *held: Tensor) -> Tensor:
        rest = iter(held)
        score = make(*(None if t is None else next(rest) for t in tensors))
        return rg.attention(q, k, v, score=score, mask=rg.Prefix(4), positions=AT, backend=rg.Tiled(rows=2, keys=3))

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


AT = rg.tail(3, 5)


def test_hand_worked_numbers() -> None:
    q, k = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0], [0.0, 0.0], [-6.0, -8.0]])
    for score, expected in (
        (rg.Dot(), [11.0, 0.0, -50.0]),
        (rg.ScaledDot(), [11 / 2**0.5, 0.0, -50 / 2**0.5]),
        (rg.ScaledDot(0.5), [5.5, 0.0, -25.0]),
        (rg.Bilinear(torch.tensor([[0.0, 1.0], [2.0, 0.0]])), [14.0, 0.0, -72.0]),
        (rg.Cosine(2.0), [2 * 11 / (5 * 5**0.5), 0.0, -2.0]),
        (rg.Distance(2.0), [-16.0, -50.0, -450.0]),
        (
            rg.Additive(None, None, torch.tensor([1.0, -1.0])),
            [tanh(4) - tanh(6), tanh(3) - tanh(4), tanh(-3) - tanh(-4)],
        ),
        (rg.Custom(lambda q, k: -torch.cdist(q, k, p=1)), [-4.0, -7.0, -21.0]),
    ):
        got = scores(score, q, k).flatten()
        torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=1e-5)


def test_custom_gets_its_tensors_and_their_gradients() -> None:
    w, q, k, v = (t.requires_grad_() for t in (randn(DQ), randn(2, 3, 5, DQ), randn(2, 3, 7, DQ), randn(2, 3, 7, 2)))

    def run(w: Tensor, *qkv: Tensor) -> Tensor:
        score = rg.Custom(
            lambda q, k, w: (q[..., :, None, :] * k[..., None, :, :] * w).sin().sum(-1), (w,), footprint=DQ
        )
        return rg.attention(*qkv, score=score, backend=rg.Tiled(rows=2, keys=3))

    assert torch.autograd.gradcheck(run, (w, q, k, v), fast_mode=True)
    assert rg.Custom(lambda q, k: q @ k.mT, footprint=5).footprint == 5


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("hidden", [0, 2, 9], ids=["none", "some", "most"])
@pytest.mark.parametrize("garbage", [0.0, 1e18, 3e38, INF, NAN])
def test_distances_keep_their_digits_whatever_is_hidden(offset: float, hidden: int, garbage: float) -> None:
    q, k = torch.randn(2, 3, 13, 5) + offset, torch.randn(2, 3, 13, 5) + offset
    n = 13 - hidden
    exact = -0.5 * (q.double()[..., :n, None, :] - k.double()[..., None, :n, :]).square().sum(-1)
    expected = torch.softmax(exact, -1).float()
    q[..., n:, :], k[..., n:, :] = garbage, garbage
    gamma = torch.tensor(0.5, requires_grad=True)
    q, k = q.requires_grad_(), k.requires_grad_()
    mask = rg.Lengths(keys=torch.tensor(n), queries=torch.tensor(n))
    got = rg.attention_weights(q, k, score=rg.Distance(gamma), mask=mask)
    torch.testing.assert_close(got[..., :n, :n], expected, rtol=1e-4, atol=1e-6)
    assert not got[..., n:].any() and not got[..., n:, :].any()
    v = torch.randn(2, 3, 13, 2)
    for backend in (rg.Reference(), rg.Tiled(rows=4, keys=5)):
        out = rg.attention(q, k, v, score=rg.Distance(gamma), mask=mask, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), (q, k, gamma))
        assert all(g.isfinite().all() for g in grads)
        assert not grads[0][..., n:, :].any() and not grads[1][..., n:, :].any()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_cosines_do_not_depend_on_lengths(size: float) -> None:
    q, k = torch.randn(5, 7), torch.randn(11, 7)
    expected = torch.cosine_similarity(q[:, None], k, dim=-1)
    torch.testing.assert_close(scores(rg.Cosine(), q * size, k * size)[0], expected)


def test_the_cosine_with_nothing_is_zero_with_gradient_zero() -> None:
    q = torch.zeros(1, 3, requires_grad=True)
    s = scores(rg.Cosine(), q, torch.ones(2, 3))
    (g,) = torch.autograd.grad(s.sum(), q)
    assert not s.any() and not g.any()
    assert scores(rg.Cosine(), torch.zeros(2, 0), torch.zeros(3, 0)).tolist() == [[[0.0] * 3] * 2]


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_padded_leaks_into_no_gradient(name: str, bad: float) -> None:
    make, tensors, _, dq, dk = formulas()[name]
    q, k, v = randn(1, HEADS, NQ, dq), randn(1, KEY_HEADS, NK, dk), randn(1, KEY_HEADS, NK, 3)
    q[..., -1, :], k[..., -2:, 0] = bad, bad
    leaves = [t.requires_grad_() for t in (q, k, v, *(t for t in tensors if t is not None))]
    mask = rg.Lengths(keys=torch.tensor([NK - 2]), queries=torch.tensor([NQ - 1]))
    for backend in (rg.Reference(), rg.Tiled(rows=2, keys=3)):
        out = rg.attention(q, k, v, score=make(*tensors), mask=mask, backend=backend)
        grads = torch.autograd.grad(out.sum(), leaves)
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
        assert not grads[0][..., -1, :].any() and not grads[1][..., -2:, :].any()


@pytest.mark.parametrize("name", [n for n in NAMES if "Distance" not in n])
def test_a_nan_that_is_seen_stays_seen(name: str) -> None:
    make, tensors, _, dq, dk = formulas()[name]
    q, k = randn(1, HEADS, NQ, dq), randn(1, KEY_HEADS, NK, dk)
    k[..., 3, 0] = NAN
    s = scores(make(*tensors), q, k)
    assert s[..., 3].isnan().all() and s[..., [0, 1, 2, 4, 5, 6]].isfinite().all()


def test_heads_are_grouped_in_order() -> None:
    q, k = randn(BATCH, HEADS, NQ, DK), randn(BATCH, KEY_HEADS, NK, DK)
    for score in (rg.Distance(), rg.Cosine(), rg.Additive(None, None, randn(DK))):
        torch.testing.assert_close(scores(score, q, k), scores(score, q, repeat_heads(k, HEADS)), **CLOSE)


X, Y = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 6)


@pytest.mark.parametrize(
    ("make", "q", "k", "error", "said"),
    [
        (lambda: rg.Dot(), X, Y, rg.ShapeError, r"q has width 4, k has width 6; Dot compares equal widths; Bilinear"),
        (lambda: rg.Distance(), X, Y, rg.ShapeError, "Distance compares equal widths"),
        (lambda: rg.Bilinear(randn(6, 4)), X, Y, rg.ShapeError, r"m has shape \(6, 4\); q and k need \(..., 4, 6\)"),
        (lambda: rg.Bilinear(randn(2, 4, 6)), X, Y, rg.ShapeError, r"expected \(dq, dk\) or \(3, dq, dk\)"),
        (lambda: rg.Bilinear(torch.ones(4, 6).long()), X, Y, TypeError, "Bilinear.m has dtype torch.int64"),
        (lambda: rg.ScaledDot(torch.ones(2)), X, X, rg.ShapeError, r"ScaledDot.scale has shape \(2,\); expected"),
        (lambda: rg.Cosine(torch.ones(3, 1)), X, X, rg.ShapeError, r"Cosine.scale has shape \(3, 1\)"),
        (lambda: rg.Distance("wide"), X, X, TypeError, "Distance.gamma is a str"),
        (lambda: rg.Additive(randn(6, 5), None, randn(5)), X, Y, rg.ShapeError, r"w_q has shape .* \(..., 4, 5\)"),
        (lambda: rg.Additive(None, None, randn(5)), X, Y, rg.ShapeError, "q has width 4; with w_q None it must be"),
        (lambda: rg.Additive(None, None, randn(4), randn(5)), X, X, rg.ShapeError, r"Additive.b has shape \(5,\)"),
        (lambda: rg.Additive(None, None, torch.tensor(1.0)), X, X, rg.ShapeError, "w or b has no axes"),
        (lambda: rg.Additive(None, None, randn(2, 4)), X, X, rg.ShapeError, r"Additive.w .* expected 1 axis, or"),
        (lambda: rg.Additive(None, randn(2, 4, 4), randn(4)), X, X, rg.ShapeError, r"w_k has shape .*; k has 3 heads"),
        (lambda: rg.Custom(lambda q, k: q), X, X, TypeError, r"returned \(2, 3, 5, 4\) .* expected \(2, 3, 5, 5\)"),
        (lambda: rg.Custom(lambda q, k: 1.0), X, X, TypeError, "Custom.fn returned float"),
        (lambda: rg.Custom(lambda q, k: q @ k.mT, (1.0,)), X, X, TypeError, "Custom.tensors is a float"),
        (lambda: rg.Similarity(), X, X, NotImplementedError, r"Similarity does not define compare\(q, k, at\)"),
    ],
)  # fmt: skip
def test_refusals(make: Callable[[], rg.Score], q: Tensor, k: Tensor, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        scores(make(), q, k)


def test_distances_to_keys_that_share_one_row_as_a_dot_product() -> None:
    """Their centre is that row: torch's nanmedian of an expanded tensor is made of numbers beside it."""
    q, row = torch.randn(1, 5, 3), torch.randn(1, 1, 3)
    expanded, copied = row.expand(1, 40, 3), row.repeat(1, 40, 1)
    found, expected = (rg.Distance().as_dot(q, k) for k in (expanded, copied))
    assert found is not None and expected is not None
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert not found[1][..., :3].any()


@pytest.mark.parametrize("shape", [(3, 2, 7, 4), (1, 1, 4), (2, 6, 5)])
def test_the_median_of_a_gpu_is_that_of_a_cpu(shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, torch.nan)
    rows[..., 0] = torch.nan
    expected = rows.nanmedian(-2, keepdim=True).values
    torch.testing.assert_close(_sorted_median(rows), expected, rtol=0, atol=0, equal_nan=True)
