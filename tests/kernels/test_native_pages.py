"""Keys and values in pages, read where they lie: the bits of the contiguous call, whatever the pages are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from kernel_checks import compare
from needed import needs_kernels
from regard import testing
from regard.backends.native.ffi import runnable
from regard.core.paged import Paged
from regard.nn import GrowingCache, PagedCache
from regard.runtime import plan_cache

pytestmark = needs_kernels

SIZES = (1, 4, 10, 16, 24, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS, FEW = (testing.frame(nq=n, nk=149, batch=(2,), heads=6) for n in (83, 2))


def paged(k: Tensor, v: Tensor, size: int, spare: int = 3) -> tuple[Paged, Paged]:
    """Keys and values cut into pages that lie in any order, among others that hold NaN, as do the ends of the last."""
    batch, n = k.shape[0], k.shape[-2]
    each = -(-n // size)
    table = torch.randperm(batch * each + spare)[: batch * each].reshape(batch, each)
    parts: list[Paged] = []
    numbers = table.int()
    for t in (k, v):
        pages = torch.full((batch * each + spare, t.shape[1], size, t.shape[-1]), torch.nan, dtype=t.dtype)
        padded = torch.nn.functional.pad(t, (0, 0, 0, each * size - n), value=torch.nan)
        pages[table] = padded.unflatten(2, (each, size)).transpose(1, 2)
        parts.append(Paged(pages, numbers, n))
    return parts[0], parts[1]


def read_in_place(*given: Tensor) -> bool:
    return all(isinstance(t, Paged) and t._written is None for t in given)


def native(case: testing.Case) -> bool:
    return rg.Native().why_not(case.leaves(torch.float32).problem, lse=False) is None


def calls() -> dict[str, tuple[testing.Case, bool]]:
    """Every call that the kernels know, for many queries and for few, and whether they read pages for it."""
    found: dict[str, tuple[testing.Case, bool]] = {}
    for name, at in (("blocks", BLOCKS), ("few rows", FEW)):
        for call, case in testing.calls(at):
            if native(case):
                similarity = case.problem.similarity
                in_place = type(similarity) is rg.Dot or similarity == rg.ScaledDot()
                found[f"{call} under {name}"] = case, in_place
    return found


CALLS = calls() if runnable() else {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_every_mask_and_score(name: str, dtype: torch.dtype) -> None:
    case, in_place = CALLS[name]
    case = case.leaves(dtype)
    q, k, v = (t.detach() for t in (case.q, case.k, case.v))
    given = {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}
    given |= {"dropout": case.dropout}
    with torch.no_grad():
        for size in (16, 128):
            keys, values = paged(k, v, size)
            for backend in (None, Unplanned()):
                out = rg.attention(q, keys, values, **given, backend=backend)
                assert torch.equal(out, rg.attention(q, k, v, **given, backend=backend))
            said = "read where they lie" in str(rg.explain(q, keys, values, **given))
            assert read_in_place(keys, values) == said
            assert said or not in_place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (32, 1)], ids=str)
@pytest.mark.parametrize("backend", [None, rg.Native(invariant=True)], ids=repr)
def test_a_prompt_in_chunks_and_tokens(
    isa: str, size: int, heads: tuple[int, int], dtype: torch.dtype, backend: rg.Native | None
) -> None:
    n, d, dv = 331, 24, 40
    q, k, v = (torch.randn(2, h, n, w).to(dtype) for h, w in zip((heads[0], *heads[1:] * 2), (d, d, dv), strict=True))
    cache, whole = PagedCache(2, heads[1], 2 * -(-n // size), size, d, dv, dtype), GrowingCache()
    for a, b in pairwise((0, 200, 201, 202, 205, 221, 222, n)):
        seen, plain = (c.append(k[:, :, a:b], v[:, :, a:b]) for c in (cache, whole))
        given = {"mask": rg.Causal() & cache.mask, "positions": cache.positions, "backend": backend}
        assert torch.equal(rg.attention(q[:, :, a:b], *seen, **given), rg.attention(q[:, :, a:b], *plain, **given))
        assert read_in_place(*seen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_ragged_sequences_and_shared_pages(isa: str, size: int, dtype: torch.dtype) -> None:
    n, lengths = 150, torch.tensor([150, 17, 0, 81])
    q, k, v = (torch.randn(4, h, n + 40, 24).to(dtype) for h in (4, 2, 2))
    cache = PagedCache(4, 2, 4 * -(-(n + 40) // size) + 4, size, 24, 24, dtype)
    cache.append(k[:, :, :n], v[:, :, :n])
    cache.crop(lengths)
    for a, b in ((n, n + 1), (n + 1, n + 3), (n + 3, n + 40)):
        seen = cache.append(k[:, :, a:b], v[:, :, a:b])
        for mask in (rg.Causal(), rg.Window(before=20, after=0), rg.Causal() & (rg.Window(30, 0) | rg.Prefix(3))):
            given = {"mask": mask & cache.mask, "positions": cache.positions}
            out = rg.attention(q[:, :, a:b], *seen, **given)
            assert read_in_place(*seen)
            assert torch.equal(out, rg.attention(q[:, :, a:b], *(t.written_out().clone() for t in seen), **given))
            seen = Paged(seen[0].pages, seen[0].block_table, cache.length), seen[1]
            seen = seen[0], Paged(seen[1].pages, seen[0].block_table, cache.length)
        cache.reorder(torch.tensor([3, 3, 0, 1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [BLOCKS, FEW], ids=["blocks", "few rows"])
def test_against_the_definition(isa: str, at: rg.core.region.Frame, dtype: torch.dtype) -> None:
    for size in (7, 128):
        case = testing.draw(at, key_heads=2, dk=19, dv=35, mask=rg.Causal())
        keys, values = paged(case.k, case.v, size)
        assert torch.equal(keys.written_out(), case.k) and torch.equal(values.written_out(), case.v)
        compare(testing.Case(case.q, keys, values, case.score, mask=case.mask, positions=case.positions), dtype)


@pytest.mark.parametrize("nk", [1, 127, 128, 129, 255, 256, 257, 513, 2049, 5000])
def test_long_rows_that_are_fetched_ahead(isa: str, nk: int) -> None:
    q, k, v = (torch.randn(1, 2, n, 80) for n in (17, nk, nk))
    for size in (16, 128, 384):
        for nq in (1, 17):
            given = {"mask": rg.Window(before=300, after=0), "positions": rg.tail(nq, nk)}
            out = rg.attention(q[:, :, :nq], *paged(k, v, size), **given)
            assert torch.equal(out, rg.attention(q[:, :, :nq], k, v, **given))


GATHERED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a gradient": (lambda q, *kv: rg.attention(q.clone().requires_grad_(), *kv), "the backward reads ordinary tensors"),
    "cosine": (lambda q, *kv: rg.attention(q, *kv, score=rg.Cosine(1.0)), "prepares the keys"),
    "streamed": (lambda q, *kv: rg.attention(q, *kv, backend=rg.Tiled()), "contiguous keys and values"),
    "weights": (lambda q, k, v: rg.attention_weights(q, k), ""),
    "torch": (lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v), ""),
    "vmap": (lambda q, k, v: torch.func.vmap(lambda one: rg.attention(one, k, v))(q[None])[0], ""),
    "facts": (lambda q, k, v: rg.look(q, k, facts=(rg.facts.Entropy(),))[rg.facts.Entropy()], ""),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_reads_no_pages_gathers(name: str) -> None:
    call, _ = GATHERED[name]
    q, k, v = (torch.randn(2, h, n, 16) for h, n in ((4, 5), (4, 33), (4, 33)))
    keys, values = paged(k, v, 4)
    torch.testing.assert_close(call(q, keys, values), call(q, k, v), rtol=0, atol=0)
    assert keys._written is not None


def test_explain_says_whether_pages_are_read() -> None:
    q, k, v = (torch.randn(2, 4, n, 16) for n in (5, 33, 33))

    def said(q: Tensor = q, dtype: torch.dtype = torch.float32, **given: object) -> str:
        return str(rg.explain(q.to(dtype), *paged(k.to(dtype), v.to(dtype), 4), **given))

    assert "pages            read where they lie" in said()
    assert "pages            gathered into contiguous tensors: it reads contiguous keys" in said(backend=rg.Tiled())
    assert "gathered into contiguous tensors: Cosine() prepares the keys" in said(score=rg.Cosine(1.0))
    learned = rg.ScaledDot(torch.tensor(0.3))
    assert "widens the keys to float32" in said(dtype=torch.bfloat16, score=learned)
    assert "pages            read where they lie" in said(score=learned)
    assert "pages" not in str(rg.explain(q, k, v))


def test_a_sequence_that_several_batch_elements_read() -> None:
    q, k, v = (torch.randn(b, 4, n, 16) for b, n in ((3, 5), (1, 33), (1, 33)))
    keys, values = paged(k, v, 4)
    for _ in range(2):
        assert torch.equal(rg.attention(q, keys, values), rg.attention(q, k, v))
    assert "read where they lie" in str(rg.explain(q, keys, values)) and read_in_place(keys, values)


PEAK = """
import torch, regard as rg

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

cache, prompt = rg.nn.PagedCache(1, 8, 4096, 16, 64, 64), torch.zeros(1, 8, 128, 64)
rg.attention(prompt, prompt, prompt)  # what loads once is no growth
for _ in range(511):  # all pages but the last are written
    cache.append(prompt, prompt)
before = peak()
for new in (prompt, prompt[:, :, :1]):
    seen = cache.append(new, new)
    rg.attention(new, *seen, mask=rg.Causal(), positions=cache.positions)
    cache.crop(511 * 128)
print(peak() - before, seen[0].numel() * 4)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_copy_of_the_keys_is_made() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    grown, copy = map(int, done.stdout.split())
    assert copy > 100_000_000 and grown < copy // 20


def test_generations_are_one_plan() -> None:
    """Also where the block table gets more room."""
    plan_cache.clear()
    for pages in (70, 160):
        cache, whole = PagedCache(2, 2, pages, 4, 16, 16), GrowingCache()
        for _ in range(2 * pages - 3):
            one = torch.randn(2, 2, 1, 16)
            seen = cache.append(one, one)
            given = {"mask": rg.Causal() & cache.mask, "positions": cache.positions}
            out = rg.attention(one, *seen, **given)
            assert len(plan_cache.plans()) == 1 and read_in_place(*seen)
            assert torch.equal(out, rg.attention(one, *whole.append(one, one), **given, backend=Unplanned()))


def test_pools_of_other_numbers_of_pages_share_a_plan() -> None:
    plan_cache.clear()
    q, k, v = (torch.randn(2, 4, n, 16) for n in (5, 33, 33))
    for spare in (0, 40, 1):
        assert torch.equal(rg.attention(q, *paged(k, v, 8, spare)), rg.attention(q, k, v, backend=Unplanned()))
    assert len(plan_cache.plans()) == 1


@pytest.mark.parametrize("page", [-1, 12, 2**31 - 1])
def test_a_page_that_the_pool_does_not_have(page: int) -> None:
    q, k, v = (torch.randn(2, 4, n, 16) for n in (5, 33, 33))
    for backend in (None, Unplanned()):
        keys, values = paged(k, v, 8, spare=2)
        assert len(keys.pages) == 12
        rg.attention(q, keys, values, backend=backend)
        keys.block_table[1, 2] = page
        with pytest.raises(ValueError, match="a block table names a page that the pool does not have"):
            rg.attention(q, keys, values, backend=backend)
        # behind a sequence's last key, any number will do
        rg.attention(q, keys, values, mask=rg.Lengths(keys=torch.tensor([33, 16])), backend=backend)


def test_a_paged_tensor_is_read_like_any_other() -> None:
    k, v = torch.randn(2, 4, 33, 16), torch.randn(2, 4, 33, 8)
    keys, values = paged(k, v, 4)
    assert repr(keys) == "Paged((2, 4, 33, 16), torch.float32, pages of 4)"
    assert read_in_place(keys, values)
    assert torch.equal(keys, k) and torch.equal(values[:, 1:, ::2], v[:, 1:, ::2])
    assert (keys.numpy() == k.numpy()).all() and values.tolist() == v.tolist()
    assert torch.equal(torch.from_dlpack(keys), k)
    assert torch.equal(keys.transpose(1, 2).contiguous(), k.transpose(1, 2))
    with pytest.raises(TypeError, match="read only; write to a clone"):
        keys.mul_(2)
    keys.clone().mul_(2)
    assert torch.equal(keys, k)
