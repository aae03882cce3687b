"""Caches in torch's modes: inference mode, before and after it, transforms that refuse an append; and their copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import regard as rg
import regard.runtime.plan_cache as plan_cache
from needed import needs_kernels
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged
from regard.nn import FixedCache, GrowingCache, KVCache, PagedCache, RollingCache

BATCH, HEADS, KEY_HEADS, DK, DV, INT8 = 3, 6, 2, 5, 7, torch.int8
MOST, PAGES = 610, 930  # tokens of a sequence; pages of 2 tokens
PAGED = partial(PagedCache, BATCH, KEY_HEADS, PAGES, 2, DK, DV)
CACHES: dict[str, Callable[[], KVCache]] = {
    "growing": GrowingCache,
    "growing int8": partial(GrowingCache, INT8),
    "fixed": partial(FixedCache, BATCH, KEY_HEADS, MOST, DK, DV),
    "fixed int8": partial(FixedCache, BATCH, KEY_HEADS, MOST, DK, DV, INT8),
    "rolling": partial(RollingCache, 3),
    "rolling int8": partial(RollingCache, 3, INT8),
    "paged": PAGED,
    "paged int8": partial(PAGED, INT8),
}
COPIES: dict[str, Callable[[KVCache], KVCache]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def tokens(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, KEY_HEADS, n, DK).to(dtype), torch.randn(BATCH, KEY_HEADS, n, DV).to(dtype)


def nested(counts: list[int], heads: int, d: int) -> Tensor:
    return rg.pack([torch.randn(n, heads, d) for n in counts]).nested().transpose(1, 2)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The keys and values that were written out as ordinary tensors, in a process without plans."""
    found: list[object] = []
    for kind in (Paged, Int8Rows):

        def write_out(self: Tensor, write: Callable[[Tensor], Tensor] = kind._write_out) -> Tensor:
            found.append(self)
            return write(self)

        monkeypatch.setattr(kind, "_write_out", write_out)
    plan_cache.clear()
    return found


@needs_kernels
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["growing int8", "paged", "paged int8"])
def test_kernels_read_what_a_cache_holds_in_every_mode(
    name: str, dtype: torch.dtype, first: str, gathered: list[object]
) -> None:
    """Inference mode asks a tensor of rows for to(its own dtype), which writes nothing out and rounds nothing."""
    q, k, v = torch.randn(BATCH, HEADS, 2, DK).to(dtype), *tokens(2, dtype)
    outs = []
    for mode in (MODES[first], *MODES.values()):
        with mode():
            cache = PAGED(dtype) if name == "paged" else CACHES[name]()
            keys, values = cache.append(k, v)
            outs.append(rg.attention(q, keys, values, mask=rg.Causal() & cache.mask, positions=cache.positions))
    outs.append(rg.attention(q, keys, values, mask=rg.Causal(), positions=cache.positions))  # made in the mode
    assert not gathered
    assert all(out.equal(outs[0]) for out in outs)
    assert keys.to(dtype) is keys and not gathered
    exact = keys.float()
    with torch.inference_mode():
        assert keys.float().equal(exact)


@needs_kernels
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("dtype", [None, INT8])
def test_unequal_numbers_of_tokens_in_every_mode(dtype: torch.dtype | None, first: str, gathered: list[object]) -> None:
    counts = [5, 1, 3]
    for mode in (MODES[first], *MODES.values()):
        with mode():
            cache, q = PAGED(dtype), nested(counts, HEADS, DK)
            seen = cache.append(nested(counts, KEY_HEADS, DK), nested(counts, KEY_HEADS, DV))
            out = rg.attention(q, *seen, mask=rg.Causal() & cache.mask, positions=cache.positions)
        assert not gathered
        keys, values = (t + 0 for t in seen)
        for b, n in enumerate(counts):
            one = rg.attention(q[b][None], keys[b : b + 1, :, :n], values[b : b + 1, :, :n], mask=rg.Causal())
            torch.testing.assert_close(out[b], one[0])
        gathered.clear()


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", CACHES)
def test_a_copy_is_written_in_every_mode_and_alone(name: str, copied: str) -> None:
    for mode in (*MODES.values(), torch.enable_grad):
        cache = CACHES[name]()
        cache.append(*tokens(3))
        with mode():
            twin = COPIES[copied](cache)
        for n in (600, 1, 4):  # of the first, torch makes the copies
            first, other = tokens(n), tokens(n)
            seen = cache.append(*first)
            held = [t + 0 for t in cache.read()]
            twin.append(*other)
            assert all(torch.equal(t + 0, was) for t, was in zip(seen, held, strict=True))
            twin.crop(3)
            assert all(map(torch.equal, twin.append(*first), held))
            twin.crop(3)
            cache.crop(3)
            twin.reorder(torch.tensor([2, 0, 1]))
            cache.reorder(torch.tensor([2, 0, 1]))


@pytest.mark.parametrize("name", CACHES)
def test_an_append_that_torch_refuses_adds_nothing(name: str) -> None:
    cache, several = CACHES[name](), [t[None].expand(4, *t.shape) for t in tokens(5)]
    held = tokens(0)
    for n in (1, 2):
        with pytest.raises(RuntimeError, match="vmap"):
            torch.vmap(cache.append)(*several)
        if isinstance(cache, PagedCache):
            used = BATCH * -(-cache.length // cache.page_size)
            assert cache.free_pages == PAGES - used
        added = tokens(n)
        cache.append(*added)
        held = tuple(torch.cat(pair, -2) for pair in zip(held, added, strict=True))
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(cache.append)(*several)
    chosen = torch.tensor([2, 2, 0])
    cache.reorder(chosen)
    added = tokens(2)
    expected = [torch.cat([t[chosen], new], -2) for t, new in zip(held, added, strict=True)]
    for found, t in zip(cache.append(*added), expected, strict=True):
        torch.testing.assert_close(found + 0, t, rtol=0, atol=t.abs().max().item() / 127)


def test_a_first_append_that_torch_refuses_says_nothing_of_the_axes() -> None:
    cache = GrowingCache()
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(cache.append)(*[t[None].expand(4, *t.shape) for t in tokens(5)])
    k = torch.randn(4, 3, dtype=torch.float64)
    assert cache.lengths.shape == () and torch.equal(cache.append(k, k)[0], k)
