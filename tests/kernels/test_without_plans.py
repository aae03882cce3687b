"""Where torch has no DLPack exchange API: no plan is kept, results stay right, and explain and the doctor say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.native import direct
from regard.compat import doctor
from regard.core.torch_features import EXCHANGE
from regard.nn import FixedCache, GrowingCache, PagedCache
from regard.runtime import plan_cache, ragged

pytestmark = needs_kernels

WHY = "has no DLPack exchange API; torch 2.10 and later have it"


def forget() -> None:
    plan_cache.clear()
    ragged._plans.clear()
    direct._can_write.cache_clear()


@pytest.fixture(autouse=True)
def _no_exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    monkeypatch.setattr(direct, "EXCHANGE", replace(EXCHANGE, at="torch:nothing"))
    yield
    forget()


def results(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, **how: object) -> list[Tensor]:
    given = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    out = rg.attention(*given, **how)  # pyright: ignore
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


MASKS = {
    "none": rg.Everything(),
    "causal": rg.Causal(),
    "lengths": rg.Lengths(keys=torch.tensor([31, 7])) & rg.Causal(),
    "union": rg.Window(3, 0) | rg.Prefix(2),
}


@pytest.mark.parametrize("nq", [1, 23])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients(mask: str, nq: int) -> None:
    q, k, v = (torch.randn(2, h, n, d) for h, n, d in ((6, nq, 16), (2, 31, 16), (2, 31, 8)))
    how = {"score": rg.ScaledDot() >> rg.SoftCap(5.0), "mask": MASKS[mask], "positions": rg.tail(nq, 31)}
    true = results(q, k, v, torch.float64, **how, backend=rg.Reference())
    plain = results(q, k, v, torch.float32, **how, backend=rg.Reference())
    for _ in range(2):
        found = results(q, k, v, torch.float32, **how)
        for mine, exact, rough in zip(found, true, plain, strict=True):
            assert testing.error(mine, exact) <= testing.tolerance(exact, rough)
    with torch.no_grad():
        assert torch.equal(rg.attention(q, k, v, **how), found[0])
    assert plan_cache.plans() == []


@pytest.mark.parametrize(
    "cache", [FixedCache(2, 2, 40, 16, 8), GrowingCache(), PagedCache(2, 2, 20, 4, 16, 8)], ids=repr
)
def test_a_cache_that_grows(cache: FixedCache | GrowingCache | PagedCache) -> None:
    k, v = torch.randn(2, 2, 31, 16), torch.randn(2, 2, 31, 8)
    parts = (0, 20), (20, 21), (21, 22), (22, 31)
    for first, last in parts:
        q = torch.randn(2, 6, last - first, 16)
        seen = cache.append(k[:, :, first:last], v[:, :, first:last])
        out = rg.attention(q, *seen, mask=rg.Causal() & cache.mask, positions=cache.positions)
        at = rg.tail(last - first, last)
        exact = rg.attention(q, k[:, :, :last], v[:, :, :last], mask=rg.Causal(), positions=at, backend=rg.Reference())
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-5)


def test_sequences_of_any_number_of_queries() -> None:
    q = [torch.randn(n, 4, 16) for n in (7, 1, 5)]
    k, v = torch.randn(3, 2, 19, 16), torch.randn(3, 2, 19, 8)
    nested = rg.pack(q).nested().transpose(1, 2)
    for _ in range(2):
        out = rg.attention(nested, k, v).transpose(1, 2).unbind()
        for b, mine in enumerate(out):
            exact = rg.attention(q[b].transpose(0, 1)[None], k[b : b + 1], v[b : b + 1], backend=rg.Reference())
            torch.testing.assert_close(mine.transpose(0, 1)[None], exact, rtol=0, atol=1e-5)
    assert ragged._plans == {}
    assert "3 sequences in 3 calls" in dict(rg.explain(nested, k, v).facts)["nested"]


def test_explain_and_the_doctor_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"each call is prepared anew in Python, none from a plan: torch {torch.__version__} {WHY}"
    q = torch.randn(2, 4, 5, 16)
    assert dict(rg.explain(q, q, q).facts)["calls"] == said
    assert said in doctor.here()
    monkeypatch.setattr(direct, "EXCHANGE", replace(EXCHANGE, at="torch:Tensor"))
    assert "calls" not in dict(rg.explain(q, q, q).facts)
    assert "prepared anew" not in doctor.here()
