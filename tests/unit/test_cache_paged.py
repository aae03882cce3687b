"""PagedCache: the pages of a pool, who reads them, and sequences of unequal lengths."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import regard as rg
from regard.nn import PagedCache

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
BATCH, HEADS, KEY_HEADS, N, DK, DV, SIZE, PAGES = 3, 4, 2, 11, 5, 7, 4, 13
LENGTHS = torch.tensor([11, 2, 8])
DOUBLE = torch.float64


def tensors(n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (HEADS, n, DK), (KEY_HEADS, n, DK), (KEY_HEADS, n, DV)
    q, k, v = (torch.randn(BATCH, *shape, dtype=DOUBLE) for shape in shapes)
    return q, k, v


def cache_of(pages: int = PAGES) -> PagedCache:
    return PagedCache(BATCH, KEY_HEADS, pages, SIZE, DK, DV, DOUBLE)


def read(cache: PagedCache, b: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, row by row, by the definition of the block table."""
    size, table = cache.page_size, cache.block_table[b]
    at = [(int(table[t // size]), t % size) for t in range(int(cache.lengths[b]))]
    pages = cache.key_pages, cache.value_pages
    keys, values = (torch.stack([p[page, :, row] for page, row in at], 1) if at else p[0, :, :0] for p in pages)
    return keys, values


def test_the_block_table_says_where_each_token_lies() -> None:
    _, k, v = tensors()
    cache = cache_of()
    for a, b in ((0, 1), (1, 6), (6, 11)):
        cache.append(k[..., a:b, :], v[..., a:b, :])
    assert cache.block_table.shape == (BATCH, 3) and cache.block_table.dtype == torch.int32
    assert cache.block_table.unique().numel() == 9 and cache.free_pages == PAGES - 9
    for b in range(BATCH):
        keys, values = read(cache, b)
        assert torch.equal(keys, k[b]) and torch.equal(values, v[b])


@pytest.mark.parametrize("mask", [rg.Causal(), rg.Causal() & rg.Window(before=4, after=0), rg.Everything()], ids=repr)
def test_ragged_sequences_are_each_as_if_alone(mask: rg.Mask) -> None:
    q, k, v = tensors(N + 6)
    cache = cache_of(PAGES + 5)
    cache.append(k[..., :N, :], v[..., :N, :])
    cache.crop(LENGTHS)
    assert cache.lengths.tolist() == LENGTHS.tolist() and cache.length == 11
    assert (cache.block_table >= 0).sum(-1).tolist() == [3, 1, 2]
    for a, b in ((N, N + 1), (N + 1, N + 3), (N + 3, N + 6)):
        later = cache.next_positions(b - a)
        seen = cache.append(k[..., a:b, :], v[..., a:b, :])
        assert torch.equal(cache.positions.q, later)
        out = rg.attention(q[..., a:b, :], *seen, mask=mask & cache.mask, positions=cache.positions)
        for one, length in enumerate(LENGTHS.tolist()):
            alone = (torch.cat([t[one, :, :length], t[one, :, N:b]], -2)[None] for t in (k, v))
            at = rg.tail(b - a, length + b - N)
            exact(out[one], rg.attention(q[one : one + 1, :, a:b], *alone, mask=mask, positions=at)[0])


def test_what_lies_behind_an_end_is_hidden_whatever_it_holds() -> None:
    q, k, v = tensors()
    cache = cache_of()
    k[1, :, 2:], v[1, :, 2:] = torch.nan, torch.inf  # padding
    cache.append(k, v)
    cache.crop(LENGTHS)
    one = [torch.randn(BATCH, KEY_HEADS, 1, d, dtype=DOUBLE) for d in (DK, DV)]
    out = rg.attention(q[..., :1, :], *cache.append(*one), mask=cache.mask, positions=cache.positions)
    assert bool(out.isfinite().all())


def test_continuations_hold_their_prompt_once() -> None:
    _, k, v = tensors()
    cache = PagedCache(1, KEY_HEADS, PAGES, SIZE, DK, DV, DOUBLE)
    cache.append(k[:1, :, :10], v[:1, :, :10])
    cache.reorder(torch.zeros(BATCH, dtype=torch.int64))
    assert cache.free_pages == PAGES - 3 and cache.block_table.tolist() == [[0, 1, 2]] * BATCH
    seen = cache.append(k[..., 10:11, :], v[..., 10:11, :])
    # the last page, half full, became one of each sequence; the last writer kept it
    assert cache.free_pages == PAGES - 5 and cache.block_table[:, :2].tolist() == [[0, 1]] * BATCH
    assert cache.block_table[:, 2].unique().numel() == BATCH
    for b in range(BATCH):
        assert torch.equal(seen[0][b], torch.cat([k[0, :, :10], k[b, :, 10:11]], -2))
        assert torch.equal(seen[1][b], torch.cat([v[0, :, :10], v[b, :, 10:11]], -2))
        assert all(map(torch.equal, read(cache, b), (t[b] for t in seen)))
    cache.reorder(torch.tensor([1]))
    assert cache.free_pages == PAGES - 3


def test_a_page_that_others_read_is_copied_only_where_one_is_free() -> None:
    _, k, v = tensors()
    cache = PagedCache(1, KEY_HEADS, 4, SIZE, DK, DV, DOUBLE)
    cache.append(k[:1, :, :6], v[:1, :, :6])
    cache.reorder(torch.zeros(4, dtype=torch.int64))
    token = [t[:1, :, 6:7].expand(4, -1, -1, -1) for t in (k, v)]
    with pytest.raises(ValueError, match=r"append: 3 more pages are needed, 2 of 4 are free"):
        cache.append(*token)
    assert cache.block_table.tolist() == [[0, 1]] * 4 and cache.free_pages == 2
    cache.reorder(torch.arange(3))
    cache.append(*(t[:3] for t in token))
    assert cache.free_pages == 0


@given(st.lists(st.tuples(st.sampled_from(["append", "reorder", "crop"]), st.integers(0, 2**30)), max_size=12))
def test_it_holds_what_a_list_of_sequences_would(steps: list[tuple[str, int]]) -> None:
    """Whatever is done in whatever order: contents, pages that are free, and pages that are shared."""
    cache, held = cache_of(40), [torch.zeros(KEY_HEADS, 0, DK, dtype=DOUBLE)] * BATCH
    for step, seed in steps:
        draw = torch.Generator().manual_seed(seed)
        if step == "append":
            n = seed % 7
            k = torch.randn(len(held), KEY_HEADS, n, DK, dtype=DOUBLE, generator=draw)
            try:
                cache.append(k, torch.cat([k, k[..., :2]], -1))
            except ValueError:
                assert cache.free_pages < 2 * len(held)
                continue
            held = [torch.cat([old, new], -2) for old, new in zip(held, k, strict=True)]
        elif step == "reorder":
            chosen = torch.randint(len(held), (1 + seed % 4,), generator=draw)
            cache.reorder(chosen)
            held = [held[b] for b in chosen.tolist()]
        else:
            lengths = [seed % (t.shape[-2] + 1) for t in held]
            cache.crop(torch.tensor(lengths))
            held = [t[:, :n] for t, n in zip(held, lengths, strict=True)]
        assert cache.lengths.tolist() == [t.shape[-2] for t in held]
        for b, expected in enumerate(held):
            keys, values = read(cache, b)
            assert torch.equal(keys, expected) and torch.equal(values[..., :DK], expected)
        used = cache.block_table[cache.block_table >= 0].unique().numel()
        assert cache.free_pages == 40 - used
    cache.reset()
    assert cache.free_pages == 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_written_as_torch_writes_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By native/python/, by the kernel and by operations of torch, however new keys and values lie."""

    def filled() -> PagedCache:
        torch.manual_seed(0)
        cache = PagedCache(BATCH, KEY_HEADS, 40, SIZE, DK, DV, dtype)
        for lay in (
            lambda t: t,
            lambda t: t.mT.contiguous().mT,
            lambda t: t[:1, :1].expand_as(t),
            lambda t: t[..., :1, :],
        ):
            cache.append(*(lay(torch.randn(BATCH, KEY_HEADS, 6, d).to(dtype)) for d in (DK, DV)))
            cache.reorder(torch.tensor([2, 2, 0]))
            cache.crop(torch.minimum(cache.lengths, torch.tensor([9, 20, 14])))
        return cache

    ways = [filled()]
    for way, nothing in (("write_page_rows", None), ("write_pages", False)):
        monkeypatch.setattr(f"regard.nn.cache.paged.{way}", lambda *_, nothing=nothing: nothing)
        ways.append(filled())
    *ours, theirs = ways
    for cache in ours:
        assert cache.lengths.tolist() == theirs.lengths.tolist() == [9, 15, 10]
        assert torch.equal(cache.key_pages, theirs.key_pages) and torch.equal(cache.value_pages, theirs.value_pages)
        assert torch.equal(cache.block_table, theirs.block_table)


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_no_sequence_is_left(dtype: torch.dtype | None) -> None:
    """Where all sequences have ended, and the loop that decodes them has not."""
    cache = PagedCache(2, 2, 12, 4, 5, 7, dtype)
    cache.append(torch.randn(2, 2, 3, 5), torch.randn(2, 2, 3, 7))
    cache.reorder(torch.tensor([], dtype=torch.int64))
    assert cache.free_pages == 12 and len(cache.lengths) == 0
    for n in (1, 2, 0):
        kv = cache.append(torch.zeros(0, 2, n, 5), torch.zeros(0, 2, n, 7))
        q, mask = torch.zeros(0, 4, n, 5), rg.Causal() & cache.mask
        assert rg.attention(q, *kv, mask=mask, positions=cache.positions).shape == (0, 4, n, 7)


def test_wrong_arguments_are_refused() -> None:
    _, k, v = tensors()
    cache = cache_of()
    cache.append(k, v)
    with pytest.raises(rg.ShapeError, match=r"crop: 2 lengths; expected one for each of 3 sequences"):
        cache.crop(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"crop: lengths \[1, 12, 0\]; the cache has \[11, 11, 11\]"):
        cache.crop(torch.tensor([1, 12, 0]))
    with pytest.raises(TypeError, match=r"length has dtype torch.float32"):
        cache.crop(torch.tensor([1.0, 2.0, 0.0]))
    with pytest.raises(rg.ShapeError, match=r"k has shape \(2, 11, 5\); this cache holds \(3, 2, n, 5\)"):
        cache.append(k[0], v[0])
    with pytest.raises(ValueError, match=r"PagedCache.page_size is 0; expected 1 or more"):
        PagedCache(1, 1, 1, 0, 1, 1)
    assert cache.length == 11


def test_lengths_to_crop_to_may_be_a_list() -> None:
    cache = rg.nn.PagedCache(2, 4, 20, 4, 8, 8)
    cache.append(torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8))
    cache.crop([3, 5])
    assert cache.lengths.tolist() == [3, 5]
