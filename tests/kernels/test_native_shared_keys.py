"""Keys that batch elements share (a prefix, expanded) are read once: values and gradients are the definition's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from exact_checks import check_threads
from needed import needs_kernels
from regard import testing

pytestmark = needs_kernels

# batch axes of the queries, and of the keys before they are expanded
BATCHES = {
    "one axis": ((7,), (1,)),
    "many": ((33,), (1,)),
    "the first of two": ((5, 2), (1, 2)),
    "the last of two": ((2, 5), (2, 1)),
    "both, others between": ((3, 2, 5), (1, 2, 1)),
    "no batch element": ((0,), (1,)),
}
OWN = {"keys of their own": ((5,), (5,))}
SIZES = [(1, (8, 8)), (1, (6, 2)), (3, (1, 1)), (8, (2, 2)), (9, (6, 2))]  # queries; their heads, those of the keys
GROUPS = [(9, (6, 2)), (15, (8, 2)), (20, (16, 2)), (24, (4, 2)), (31, (8, 2))]  # more queries of a group's heads
DTYPES = [torch.float32, torch.bfloat16]
GIVEN: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"mask": rg.Causal(), "positions": "tail"},
    "lengths a sequence": {"mask": "lengths"},
    "soft cap": {"score": rg.ScaledDot() >> rg.SoftCap(3.0)},
    # what tells batch elements or heads apart: not packed
    "slopes": {"score": rg.ScaledDot() >> rg.Alibi(torch.tensor(0.1)), "positions": "tail"},
    "dropout": {"dropout": rg.Dropout(0.3, seed=5)},
    "documents": {"mask": "documents"},
}


def given_for(kind: str, batch: tuple[int, ...], nq: int, nk: int) -> dict[str, Any]:
    given = dict(GIVEN[kind])
    if "positions" in given:
        given["positions"] = rg.tail(nq, nk)
    if given.get("mask") == "lengths":
        index = torch.arange(torch.Size(batch).numel()).reshape(batch)
        given["mask"] = rg.Lengths(keys=(index * 37 + 3) % (nk + 1))
    if given.get("mask") == "documents":
        given["mask"] = rg.Documents(torch.zeros(nq, dtype=torch.int64), torch.arange(nk) % 3)
    return given


def drawn(batches: str, heads: tuple[int, int], nq: int, nk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, shared = (BATCHES | OWN)[batches]
    q, k, v = torch.randn(*batch, heads[0], nq, 24), *torch.randn(2, *shared, heads[1], nk, 24).unbind(0)
    return q.to(dtype), k.to(dtype), v[..., :19].to(dtype)


def results(q: Tensor, k: Tensor, v: Tensor, g: Tensor, dtype: torch.dtype, backend: Any, given: Any) -> list[Tensor]:
    """out, lse, and the gradients of q and of the keys and values before they are expanded."""
    q, k, v = (t.to(dtype).requires_grad_() for t in (q, k, v))
    shared = [t.expand(*q.shape[:-3], *t.shape[-3:]) for t in (k, v)]
    out = rg.attention(q, *shared, **given, backend=backend)
    lse = rg.attention_state(q, *shared, **given, backend=backend).finish()[1]
    # a row that sees nothing has an lse of -inf
    loss = (out * g.to(out.dtype)).sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))]


@lru_cache(maxsize=4)
def expected(
    batches: str, nq: int, heads: tuple[int, int], kind: str, dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], dict[str, Any], list[Tensor], list[Tensor]]:
    """q, k, v and a cotangent, what else a call is given, and the definition's results: in float64, and in its dtype.

    Once for all instruction sets.
    """
    nk = 331
    q, k, v = drawn(batches, heads, nq, nk, dtype)
    given, g = given_for(kind, (BATCHES | OWN)[batches][0], nq, nk), torch.randn(*q.shape[:-1], v.shape[-1])
    truth, plain = (results(q, k, v, g, of, rg.Reference(), given) for of in (torch.float64, dtype))
    return (q, k, v, g), given, truth, plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize(("nq", "heads"), SIZES, ids=str)
@pytest.mark.parametrize("batches", BATCHES)
def test_values_and_gradients(
    isa: str, batches: str, nq: int, heads: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    tensors, given, truth, plain = expected(batches, nq, heads, kind, dtype)
    for mine, right, usual in zip(results(*tensors, dtype, rg.Native(), given), truth, plain, strict=True):
        assert testing.error(mine, right) <= testing.tolerance(right, usual)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["everything", "causal", "lengths a sequence", "slopes"])
@pytest.mark.parametrize(("nq", "heads"), GROUPS, ids=str)
def test_heads_of_a_group(isa: str, nq: int, heads: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    """Values and gradients where the few queries of several heads fill a block, and bits for one thread and two."""
    (q, k, v, g), given, truth, plain = expected("keys of their own", nq, heads, kind, dtype)
    for mine, right, usual in zip(results(q, k, v, g, dtype, rg.Native(), given), truth, plain, strict=True):
        assert testing.error(mine, right) <= testing.tolerance(right, usual)
    check_threads(lambda: rg.attention(q, k, v, **given))


@pytest.mark.parametrize("nq", [1, 2, 8])
@pytest.mark.parametrize("elements", [2, 7, 16, 64, 70])
@pytest.mark.parametrize("key_heads", [1, 8])
def test_they_are_heads_of_a_group(isa: str, key_heads: int, elements: int, nq: int) -> None:
    """Batch elements that share keys have the bits of as many query heads of one sequence."""
    q = torch.randn(elements, key_heads, nq, 24)
    k, v = torch.randn(2, 1, key_heads, 331, 24).unbind(0)
    expanded = [t.expand(elements, -1, -1, -1) for t in (k, v)]
    given: dict[str, Any] = {"mask": rg.Causal(), "positions": rg.tail(nq, 331), "backend": rg.Native()}
    out, lse = rg.attention_state(q, *expanded, **given).finish()
    grouped, grouped_lse = rg.attention_state(q.transpose(0, 1).reshape(1, -1, nq, 24), k, v, **given).finish()
    assert torch.equal(out, grouped.reshape(key_heads, elements, nq, 24).transpose(0, 1))
    assert torch.equal(lse, grouped_lse.reshape(key_heads, elements, nq).transpose(0, 1))


def test_queries_and_results_lie_as_they_like(isa: str) -> None:
    q = torch.randn(7, 3, 4, 24).transpose(1, 2)
    k, v = (t.transpose(1, 2).expand(7, -1, -1, -1) for t in torch.randn(2, 1, 331, 2, 24))
    given: dict[str, Any] = {"mask": rg.Causal(), "positions": rg.tail(3, 331)}
    for _ in range(2):  # the second time by a plan
        torch.testing.assert_close(
            rg.attention(q, k, v, **given), rg.attention(q, k, v, **given, backend=rg.Reference()), rtol=1e-5, atol=1e-5
        )


def test_values_alone_that_are_shared(isa: str) -> None:
    q, k, v = torch.randn(7, 2, 1, 24), torch.randn(7, 2, 331, 24), torch.randn(1, 2, 331, 24).expand(7, -1, -1, -1)
    for keys, values in ((k, v), (v, k)):
        expected = rg.attention(q, keys, values, backend=rg.Reference())
        torch.testing.assert_close(rg.attention(q, keys, values), expected, rtol=1e-5, atol=1e-5)


def test_a_prefix_and_continuations() -> None:
    """The states of a shared prefix and of each sequence's own keys, merged, are attention over both."""
    q, k, v = torch.randn(16, 8, 1, 64), *torch.randn(2, 16, 8, 29, 64).unbind(0)
    pk, pv = torch.randn(2, 1, 8, 211, 64).unbind(0)
    shared_k, shared_v = pk.expand(16, -1, -1, -1), pv.expand(16, -1, -1, -1)
    merged = (rg.attention_state(q, shared_k, shared_v) | rg.attention_state(q, k, v)).finish()[0]
    whole = rg.attention(q, torch.cat([shared_k, k], 2), torch.cat([shared_v, v], 2))
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
