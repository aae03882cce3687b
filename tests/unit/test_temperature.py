"""Temperature against its formula, its gradient, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg

HEADS, NQ, NK, WIDTH = 3, 5, 7, 4
CLOSE = {"rtol": 1e-13, "atol": 1e-13}


def qk() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, HEADS, n, WIDTH, dtype=torch.float64, generator=random) for n in (NQ, NK))


@pytest.mark.parametrize("t", [0.5, torch.tensor(0.5), torch.tensor([0.5, 2.0, 30.0])], ids=["number", "()", "(h,)"])
def test_it_divides_what_stands_before_it(t: float | Tensor) -> None:
    (q, k), bias = qk(), rg.Bias(torch.randn(NQ, NK, dtype=torch.float64))
    s, each = rg.attention_scores(q, k, score=rg.ScaledDot()), torch.as_tensor(t).double().expand(HEADS)
    each = each[:, None, None]
    torch.testing.assert_close(rg.attention_scores(q, k, score=rg.ScaledDot() >> rg.Temperature(t)), s / each, **CLOSE)
    before, after = rg.ScaledDot() >> rg.Temperature(t) >> bias, rg.ScaledDot() >> bias >> rg.Temperature(t)
    torch.testing.assert_close(rg.attention_scores(q, k, score=before), s / each + bias.bias, **CLOSE)
    torch.testing.assert_close(rg.attention_scores(q, k, score=after), (s + bias.bias) / each, **CLOSE)


@pytest.mark.parametrize("backend", [rg.Reference(), rg.Tiled(2, 3)], ids=repr)
@pytest.mark.parametrize("shape", [(), (1,), (HEADS,)], ids=str)
def test_its_gradient(shape: tuple[int, ...], backend: rg.Reference | rg.Tiled) -> None:
    q, k = (x.requires_grad_() for x in qk())
    t = torch.linspace(0.5, 2, math.prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()

    def run(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        score, at = rg.ScaledDot() >> rg.Temperature(t), rg.tail(NQ, NK)
        return rg.attention(q, k, k, score=score, mask=rg.Prefix(5), positions=at, backend=backend)

    assert torch.autograd.gradcheck(run, (q, k, t), fast_mode=True)


@pytest.mark.parametrize("hidden", [3e38, math.inf, math.nan], ids=str)
def test_a_hidden_score_that_is_not_finite_spoils_no_gradient(hidden: float) -> None:
    q, k = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4)
    k[..., 1, :], k[..., 2, :] = 2, hidden
    exact = k[..., :2, :]
    found = list[Tensor]()
    for keys in (exact, k):
        t = torch.tensor(2.0, requires_grad=True)
        score, at = rg.Dot() >> rg.Temperature(t), rg.head(2, keys.shape[-2])
        out = rg.attention(
            q,
            keys,
            exact[..., :1, :].expand_as(keys) * torch.arange(keys.shape[-2])[:, None],
            score=score,
            mask=rg.Prefix(2),
            positions=at,
            backend=rg.Tiled(),
        )
        found += torch.autograd.grad(out.sum(), t)
    assert found[0] != 0
    torch.testing.assert_close(found[1], found[0])


X = torch.zeros(2, HEADS, NQ, WIDTH)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: rg.Temperature(0.0), ValueError, r"Temperature\(t=0.0\): expected a finite number above 0"),
        (lambda: rg.Temperature(-1), ValueError, "expected a finite number above 0"),
        (lambda: rg.Temperature(math.inf), ValueError, "expected a finite number above 0"),
        (lambda: rg.Temperature(math.nan), ValueError, "expected a finite number above 0"),
        (lambda: rg.Temperature(torch.ones(2)), rg.ShapeError, r"Temperature.t has shape \(2,\); .* head, \(3,\)"),
        (lambda: rg.Temperature(torch.ones(3).long()), TypeError, "Temperature.t has dtype torch.int64"),
    ],
)
def test_refusals(make: Callable[[], rg.Score], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        rg.attention(X, X, X, score=rg.Dot() >> make(), backend=rg.Reference())
