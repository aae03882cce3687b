"""Gradients of the native kernels where something is hidden, or is no number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.backends.library import runnable

pytestmark = pytest.mark.skipif(not runnable(), reason="needs the native kernels: no C++ compiler was found")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "mask", [rg.Lengths(keys=torch.tensor([100])), rg.Dense(torch.arange(130) < 100)], ids=["interval", "booleans"]
)
def test_what_is_hidden_leaks_nowhere(isa: str, dtype: torch.dtype, bad: float, mask: rg.Mask) -> None:
    """Hidden keys and values, and the queries and cotangents of rows that see nothing."""
    rows = rg.Dense((torch.arange(70) < 60)[:, None])
    at = testing.frame(nq=70, nk=130, batch=(1,), heads=2)
    score = rg.ScaledDot() >> rg.SoftCap(3.0)

    def run(spoil: bool) -> list[Tensor]:
        torch.manual_seed(0)
        case = testing.draw(at, dk=16, dv=8, score=score)
        q, k, v = (t.detach().to(dtype) for t in (case.q, case.k, case.v))
        g = torch.randn(1, 2, 70, 8).to(dtype)
        if spoil:
            q[..., 60:, :], g[..., 60:, :], k[..., 100:, :], v[..., 100:, :] = bad, bad, bad, bad
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        out = rg.attention(q, k, v, score=score, mask=mask & rows, backend=rg.Native())
        return [out, *torch.autograd.grad(out, (q, k, v), g)]

    near = 4 * torch.finfo(dtype).eps  # products that leave pairs out round in another order
    for clean, spoiled in zip(run(False), run(True), strict=True):
        assert clean.isfinite().all()
        torch.testing.assert_close(spoiled, clean, rtol=near, atol=near)
    _, g_q, g_k, g_v = run(True)
    assert not g_q[..., 60:, :].any() and not g_k[..., 100:, :].any() and not g_v[..., 100:, :].any()
    assert g_q[..., :60, :].any() and g_k[..., :100, :].any()


@pytest.mark.parametrize("what", ["q", "k", "v", "g"])
def test_what_is_seen_and_no_number_stays_visible(isa: str, what: str) -> None:
    torch.manual_seed(0)
    given = {name: torch.randn(1, 1, 130, 16) for name in ("q", "k", "v", "g")}
    given[what][..., 70, 3] = torch.nan
    q, k, v = (given[name].requires_grad_() for name in ("q", "k", "v"))
    out = rg.attention(q, k, v, mask=rg.Causal(), backend=rg.Native())
    g_q, g_k, g_v = (g[0, 0] for g in torch.autograd.grad(out, (q, k, v), given["g"]))
    if what in ("q", "g"):  # one row is lost, and every key that it sees
        assert g_q[70].isnan().any() and g_k[:71].isnan().any(-1).all() and g_v[:71].isnan().any(-1).all()
        assert g_q[:70].isfinite().all() and g_q[71:].isfinite().all()
        assert g_k[71:].isfinite().all() and g_v[71:].isfinite().all()
    else:  # every row that sees the key
        assert g_q[:70].isfinite().all() and g_q[70:].isnan().any(-1).all()


def test_keys_that_nobody_sees_get_nothing(isa: str) -> None:
    q, k, v = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (40, 300, 300))
    mask = rg.Window(before=20, after=0)
    out, lse = rg.attention_state(q, k, v, mask=mask, positions=rg.tail(40, 300), backend=rg.Native()).finish()
    _, g_k, g_v = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert not g_k[..., :240, :].any() and not g_v[..., :240, :].any() and g_k[..., 240:, :].any()
