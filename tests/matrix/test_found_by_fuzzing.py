"""Calls in which a fuzz against an oracle of its own (tests/fuzz) found a wrong answer, each in its smallest form."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_custom_score_in_half_precision_meets_its_own_tensors_in_float32(dtype: torch.dtype) -> None:
    """Whoever looks for hidden parameters hands fn what the call hands it: the accumulation dtype."""
    q, w = torch.randn(5, 7, dtype=dtype), torch.randn(7, requires_grad=True)
    seen: list[torch.dtype] = []

    def compare(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append(q.dtype)
        return (q * w).sin() @ k.mT

    out = rg.attention(q, q, q, score=rg.Custom(compare, tensors=(w,)))
    out.float().sum().backward()
    assert out.dtype == dtype and w.grad is not None and set(seen) == {torch.float32}


def test_no_heads_under_a_mask_that_is_no_interval() -> None:
    q = torch.zeros(2, 0, 5, 4)
    for mask in (rg.Where(lambda b, h, i, j: (i + j) % 2 == 0), rg.Dilated(2), rg.Causal()):
        assert rg.attention(q, q, q, mask=mask).shape == (2, 0, 5, 4)


@pytest.mark.parametrize("backend", [None, rg.Tiled(), rg.Reference()], ids=repr)
def test_an_additive_score_without_hidden_features_weighs_equally(backend: rg.Backend | None) -> None:
    v, w = torch.randn(1, 1, 5, 3, requires_grad=True), torch.zeros(0)
    out = rg.attention(
        torch.zeros(1, 1, 4, 0), torch.zeros(1, 1, 5, 0), v, score=rg.Additive(None, None, w), backend=backend
    )
    torch.testing.assert_close(torch.autograd.grad(out.sum(), v)[0], torch.full((1, 1, 5, 3), 0.8))


@pytest.mark.parametrize("nq", [4, 20, 70])
@pytest.mark.parametrize("sink", [None, 0.0])
@pytest.mark.parametrize("backend", [None, rg.Native(), rg.Tiled(), rg.Reference()], ids=repr)
def test_a_row_that_a_bias_hides_has_no_gradient_beside_a_value_that_is_nan(
    backend: rg.Backend | None, nq: int, sink: float | None
) -> None:
    q, k, v = (torch.randn(1, 1, n, 8) for n in (nq, 40, 40))
    v[..., 2, :] = math.nan
    q.requires_grad_()
    bias = torch.zeros(nq, 40)
    bias[:, 2] = bias[1] = -math.inf
    score = rg.ScaledDot() >> rg.Bias(bias)
    out = rg.attention(q, k, v, score=score, sink=sink, backend=backend)[..., 1, :]
    assert (out == 0).all()
    assert (torch.autograd.grad(out.sum(), q)[0][0, 0, 1] == 0).all()


def test_the_entropy_of_a_row_whose_sink_has_nearly_all_the_mass() -> None:
    """dH/dsink = p_sink (1 - p_sink - H), where 1 - p_sink is the mass of the keys: it keeps its own digits."""
    q, k = torch.randn(3, 8), torch.randn(5, 8)
    for sink in (9.0, 14.0):
        found = []
        for dtype in (torch.float32, torch.float64):
            logit = torch.tensor([sink], dtype=dtype, requires_grad=True)
            rg.entropy(q.to(dtype), k.to(dtype), sink=logit).sum().backward()
            found.append(logit.grad)
        torch.testing.assert_close(found[0].double(), found[1], rtol=3e-6, atol=0)


@pytest.mark.parametrize("nq", [2, 43])
@pytest.mark.parametrize("sink", [None, 0.0])
def test_additive_scores_that_a_bias_hides_have_no_weight_in_the_native_backward(nq: int, sink: float | None) -> None:
    """Hidden weights are marked by -1; the marks stood in the gradient of v where a bias alone hides."""
    q, k, v = (torch.randn(1, 2, n, 3, requires_grad=True) for n in (nq, 8, 8))
    bias = torch.zeros(nq, 8)
    bias[::2] = bias[:, 3] = bias[1:, 5] = -math.inf
    score = rg.Additive(None, None, torch.randn(3)) >> rg.Bias(bias)
    g = torch.randn(1, 2, nq, 3)
    found = [
        torch.autograd.grad(rg.attention(q, k, v, score=score, sink=sink, backend=backend), (q, k, v), g)
        for backend in (rg.Native(), rg.Reference())
    ]
    torch.testing.assert_close(*found)


def test_weights_of_a_row_that_sees_a_nan_give_no_gradient_to_a_key_that_nobody_sees() -> None:
    q, k = torch.randn(4, 4), torch.randn(4, 4)
    k[1, 0] = math.nan
    k.requires_grad_()
    weights = rg.attention_weights(q, k, score=rg.Dot(), mask=~rg.Where(lambda b, h, i, j: j >= i))
    assert (torch.autograd.grad(weights, k, torch.randn(4, 4))[0][3] == 0).all()


@pytest.mark.parametrize("nq", [4, 20, 32, 64, 65])
@pytest.mark.parametrize("activation", [rg.Tanh(), rg.Sigmoid(), rg.LeakyReLU(0.2)], ids=repr)
def test_weights_of_large_additive_scores_sum_to_1_in_the_native_backward(nq: int, activation: rg.Tanh) -> None:
    """Forward and backward make the same scores: by rows, or by blocks of queries, which round them differently."""
    q, k = torch.randn(nq, 6), torch.randn(28, 6)
    v = torch.randn(28, 4, requires_grad=True)
    score = rg.Additive(None, None, torch.randn(6) * 1e4, None, activation)
    out = rg.attention(q, k, v, score=score, backend=rg.Native())
    total = torch.autograd.grad(out.sum(), v)[0].sum(0)
    torch.testing.assert_close(total, torch.full((4,), float(nq)), rtol=2e-6, atol=0)


@pytest.mark.parametrize("backend", [None, rg.Tiled(), rg.Tiled(rows=7, keys=9), rg.Reference()], ids=repr)
def test_distances_of_points_that_are_spread_widely(backend: rg.Backend | None) -> None:
    """A point's distance to itself is 0, and to others 10^4: |q|² - 2 q·k + |k|² rounds both to 64; a sink tells."""
    x = (torch.randn(193, 2) * 1e4).requires_grad_()
    v = torch.randn(193, 2)
    out = rg.attention(x, x, v, score=rg.Distance(0.5), sink=0.0, backend=backend)
    exact = rg.attention(x.double(), x.double(), v.double(), score=rg.Distance(0.5), sink=0.0, backend=rg.Reference())
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
