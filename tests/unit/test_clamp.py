"""Clamp against its formula, its gradient, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import regard as rg


def test_it_clamps_what_stands_before_it() -> None:
    q, k, b = torch.randn(2, 3, 5, 4).double(), torch.randn(2, 3, 7, 4).double(), torch.randn(5, 7).double()
    s = rg.attention_scores(q, k, score=rg.Dot())
    for low, high in ((-1.0, 0.5), (-math.inf, 0.0), (0.25, math.inf)):
        score = rg.Dot() >> rg.Clamp(low, high) >> rg.Bias(b)
        assert torch.equal(rg.attention_scores(q, k, score=score), s.clamp(low, high) + b)


@pytest.mark.parametrize("backend", [rg.Reference(), rg.Tiled(2, 3)], ids=repr)
def test_its_gradient(backend: rg.Backend) -> None:
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rg.attention(q, k, v, score=rg.Dot() >> rg.Clamp(-1, 0.5), backend=backend)

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)
    inside = rg.attention(q, k, v, score=rg.Dot() >> rg.Clamp(-1e-9, 1e-9), backend=backend)
    assert not any(g.any() for g in torch.autograd.grad(inside.sum(), (q, k)))


def test_bounds_alone_make_hidden_pairs_no_visible_ones() -> None:
    q, k = torch.ones(1, 4), torch.ones(3, 4)
    weights = rg.attention_weights(
        q, k, score=rg.Dot() >> rg.Clamp(-1, 1), mask=rg.Dense(torch.tensor([[True, False, True]]))
    )
    assert weights.tolist() == [[0.5, 0.0, 0.5]]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((1.0, -1.0), ValueError, r"Clamp\(low=1.0, high=-1.0\): expected low < high"),
        ((0.0, 0.0), ValueError, "expected low < high"),
        ((), ValueError, "one of them finite"),
        ((math.nan, 1.0), ValueError, "expected low < high"),
        (("a", 1.0), TypeError, "Clamp.low is a str; expected a number"),
        ((0.0, torch.tensor(1.0)), TypeError, "Clamp.high is a Tensor of float32; expected a number"),
        ((False, 1.0), TypeError, "Clamp.low is a bool"),
    ],
    ids=str,
)
def test_wrong_bounds(given: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rg.Clamp(*given)
