"""Gradients where queries, keys or values are not finite: what is visible passes NaN on, what is hidden does not."""

import math

import pytest
import torch

import regard as rg
from regard.backends.base import Backend

N, WIDTH, AT = 6, 4, 3


@pytest.mark.parametrize("backend", [rg.Reference(), rg.Tiled(), rg.Native()], ids=repr)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("hidden", [False, True])
def test_gradients_are_nan_where_a_row_sees_what_makes_it_nan(
    backend: Backend, where: str, bad: float, hidden: bool
) -> None:
    # positive numbers: an infinite feature makes all scores infinite alike
    q, k, v = (torch.rand(1, 1, N, WIDTH, generator=torch.Generator().manual_seed(n)) + 0.1 for n in range(3))
    {"q": q, "k": k, "v": v}[where][0, 0, AT, 1] = bad
    visible = torch.ones(N, N, dtype=torch.bool).tril()
    if hidden:
        visible[AT] = visible[:, AT] = False
    for t in (q, k, v):
        t.requires_grad_()
    out = rg.attention(q, k, v, mask=rg.Dense(visible), backend=backend)
    out.sum().backward()

    # dS = P (dO V^T - rowsum(dO O)): a row whose output is NaN, or multiplied by an infinite value, has it everywhere
    seen = torch.where(visible[..., None], v.detach()[0, 0], 0.0)
    spoilt = out[0, 0].isnan().any(-1) | ~seen.isfinite().all(-1).all(-1)
    of_keys = (visible & spoilt[:, None]).any(0)
    of_values = (visible & out[0, 0].isnan().any(-1)[:, None]).any(0) if where != "v" else torch.zeros(N).bool()
    for t, expected in ((q, spoilt), (k, of_keys), (v, of_values)):
        assert t.grad is not None
        assert torch.equal(~t.grad[0, 0].isfinite().all(-1), expected)
    score_of_minus_inf = bad == -math.inf and where != "v"  # hides the pair, as a mask does
    assert spoilt.any() == (not hidden and not score_of_minus_inf)


@pytest.mark.parametrize("backend", [rg.Reference(), rg.Tiled(), rg.Native()], ids=repr)
@pytest.mark.parametrize("nq", [5, 70])
def test_an_additive_score_that_is_saturated_has_the_gradients_of_the_others(backend: Backend, nq: int) -> None:
    drawn = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (nq, 80, 81)]
    w = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    drawn[0][2, 1], drawn[1][3, 0], drawn[1][70, 2] = math.inf, math.inf, -math.inf
    drawn[2] = drawn[2][:80]
    wide = [t.double().requires_grad_() for t in (*drawn, w)]
    q, k, v, weight = wide
    hidden = torch.ones(nq, 80).tril().bool().logical_not()
    s = ((q[:, None] + k).tanh() * weight).sum(-1).masked_fill(hidden, -math.inf)
    right = torch.autograd.grad((s.softmax(-1) @ v).square().sum(), wide)

    given = [t[None, None].requires_grad_() for t in drawn]
    w.requires_grad_()
    mask, score = rg.Dense(~hidden), rg.Additive(None, None, w)
    out = rg.attention(*given, mask=mask, score=score, backend=backend)
    found = torch.autograd.grad(out.square().sum(), (*given, w))
    for mine, expected in zip(found, right, strict=True):
        torch.testing.assert_close(mine.reshape(expected.shape).double(), expected, rtol=1e-4, atol=1e-5)
