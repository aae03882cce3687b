"""attention_state by a kept plan: the bits of the general way, one plan for all lengths, and gradients beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard import testing
from regard.backends.native.ffi import runnable
from regard.runtime import plan_cache

pytestmark = needs_kernels

AT = testing.frame(nq=23, nk=23, batch=(2,), heads=4)


def native(case: testing.Case) -> bool:
    return rg.Native().why_not(case.leaves(torch.float32).problem, lse=True) is None


CALLS = {name: case for name, case in testing.calls(AT) if runnable() and native(case)}


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()


def same(q: Tensor, k: Tensor, v: Tensor, **given: object) -> rg.State:
    """The state by a plan, made or kept, once it is compared with that of the general way."""
    found, wanted = (rg.attention_state(q, k, v, **given, **way) for way in ({}, {"backend": Unplanned()}))  # pyright: ignore
    assert all(map(torch.equal, (found.m, found.l, found.o), (wanted.m, wanted.l, wanted.o)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_for_every_mask_and_score(name: str, dtype: torch.dtype) -> None:
    case = CALLS[name]
    for _ in range(2):
        other = testing.draw(AT, score=case.score, mask=case.mask).leaves(dtype)
        with torch.no_grad():
            same(other.q.detach(), other.k.detach(), other.v.detach(), score=other.score, mask=other.mask)


@pytest.mark.parametrize("shape", [(9, 16), (2, 9, 16), (2, 4, 9, 16), (3, 2, 4, 9, 16), (2, 4, 0, 16)])
def test_every_number_of_axes(shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(3, *shape)
    for _ in range(2):
        state = same(q, k, v, sink=0.5)
        assert state.m.shape == shape[:-1] and state.o.shape == shape
    assert len(plan_cache.plans()) == (0 not in shape)


def test_keys_that_grow_have_one_plan() -> None:
    k, v = torch.randn(2, 2, 4, 40, 16)
    for n in range(7, 40):
        same(torch.randn(2, 4, 1, 16), k[:, :, :n], v[:, :, :n], mask=rg.Causal(), positions=rg.tail(1, n))
    assert len(plan_cache.plans()) == 1


def test_rows_that_see_nothing_are_empty() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    for _ in range(2):
        state = same(q, k, v, mask=rg.Lengths(keys=torch.tensor([0, 5])))
    assert (state.l[0] == 0).all() and (state.m[0] == -torch.inf).all() and (state.l[1] > 0).all()


def test_pages_and_a_shared_prefix() -> None:
    cache = rg.nn.PagedCache(2, 4, 10, 5, 16, 16)
    k, v = torch.randn(2, 1, 4, 31, 16)
    q = torch.randn(2, 4, 1, 16)
    for _ in range(11):
        shared = same(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
        pages = cache.append(*torch.randn(2, 2, 4, 1, 16))
        own = same(q, *pages)
    keys, values = (
        torch.cat([t.expand(2, -1, -1, -1), u.written_out()], -2) for t, u in zip((k, v), pages, strict=True)
    )
    assert len(plan_cache.plans()) == 2
    torch.testing.assert_close((shared | own).finish()[0], rg.attention(q, keys, values))


def test_dropout_draws_a_seed_a_call() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    for _ in range(2):
        same(q, k, v, dropout=rg.Dropout(0.3, seed=7))
    first, second = (rg.attention_state(q, k, v, dropout=rg.Dropout(0.3)).o for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("of", ["q", "k", "v", "sink"])
def test_gradients_are_those_of_the_general_way(of: str) -> None:
    given = dict(zip("qkv", torch.randn(3, 2, 4, 9, 16), strict=True)) | {"sink": torch.randn(4)}
    given[of].requires_grad_()

    def gradient(**way: rg.Backend) -> Tensor:
        out, lse = rg.attention_state(**given, **way).finish()  # pyright: ignore
        return torch.autograd.grad(out.square().sum() + lse.sum(), given[of])[0]

    assert torch.equal(gradient(), gradient(backend=Unplanned()))
    with torch.no_grad():
        assert not rg.attention_state(**given).o.requires_grad  # pyright: ignore


def _numpy(*given: Tensor) -> tuple[object, ...]:
    return tuple(t.numpy() for t in given)


def _double(*given: Tensor) -> tuple[object, ...]:
    return tuple(t.double() for t in given)


@pytest.mark.parametrize("change", [_numpy, _double])
def test_what_has_no_plan_goes_the_general_way(change: Callable[..., tuple[object, ...]]) -> None:
    given = torch.randn(3, 2, 4, 9, 16).unbind()
    out = rg.attention_state(*change(*given)).finish()[0]
    torch.testing.assert_close(out.float(), rg.attention(*given))
