"""Caches: reading what they hold, and removing the last tokens of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.nn import FixedCache, GrowingCache, KVCache, PagedCache, RollingCache

exact = partial(torch.testing.assert_close, rtol=0, atol=0)
BATCH, HEADS, DK, DV, ROOM = 3, 2, 5, 7, 300
DTYPES = {"as given": None, "int8": torch.int8}
CACHES: dict[str, Callable[[torch.dtype | None], KVCache]] = {
    "growing": GrowingCache,
    "fixed": lambda dtype: FixedCache(BATCH, HEADS, ROOM, DK, DV, dtype),
    "rolling": lambda dtype: RollingCache(4, dtype),
    "paged": lambda dtype: PagedCache(BATCH, HEADS, 3 * (ROOM // 8 + 1), 8, DK, DV, dtype),
}


def tokens(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, HEADS, n, DK), torch.randn(BATCH, HEADS, n, DV)


def numbers(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A copy: what an append returns may refer to memory that is written to later."""
    return rows[0].clone(), rows[1].clone()


@pytest.fixture(params=[(name, dtype) for name in CACHES for dtype in DTYPES], ids=" ".join)
def cache(request: pytest.FixtureRequest) -> KVCache:
    name, dtype = request.param
    return CACHES[name](DTYPES[dtype])


def test_read_is_what_the_last_append_returned(cache: KVCache) -> None:
    for n in (200, 1, 3):  # the window of 4 has dropped a tile of keys by then
        returned = numbers(cache.append(*tokens(n)))
        exact(cache.read(), returned)
        assert cache.positions.k is not None and len(cache.positions.k) == returned[0].shape[-2]


def test_read_follows_crop_and_reorder(cache: KVCache) -> None:
    cache.append(*tokens(9))
    keys, values = numbers(cache.append(*tokens(5)))
    cache.crop(11)
    exact(cache.read(), (keys[..., :11, :], values[..., :11, :]))
    cache.reorder(torch.tensor([2, 0]))
    exact(cache.read(), (keys[[2, 0], :, :11], values[[2, 0], :, :11]))


def test_later_queries_attend_to_what_is_read(cache: KVCache) -> None:
    cache.append(*tokens(9))
    keys, values = cache.append(*tokens(2))
    q = torch.randn(BATCH, HEADS, 2, DK)
    options = {"mask": rg.Causal() & cache.mask, "positions": cache.positions}
    exact(rg.attention(q, *cache.read(), **options), rg.attention(q, keys, values, **options))


@pytest.mark.full
def test_a_graph_reads_too(cache: KVCache) -> None:
    """PagedCache leaves the graph for it, since no graph follows its tables."""
    compiled = torch.compile(lambda: [2 * t for t in cache.read()], backend="eager")
    for n in (5, 1, 1, 1):
        keys, values = cache.append(*tokens(n))
        exact(compiled(), [2 * keys, 2 * values])


def test_nothing_is_read_before_the_first_tokens(cache: KVCache) -> None:
    with pytest.raises(ValueError, match="read: no tokens have been appended"):
        cache.read()


def test_remove_last_is_crop_from_the_end(cache: KVCache) -> None:
    cache.append(*tokens(9))
    keys, values = numbers(cache.append(*tokens(5)))
    cache.remove_last(3)
    assert cache.length == 11
    exact(cache.read(), (keys[..., :11, :], values[..., :11, :]))
    cache.remove_last(0)
    assert cache.length == 11
    for n, message in ((12, r"remove_last\(12\): the cache has"), (-1, "remove_last: n is -1; expected 0 or more")):
        with pytest.raises(ValueError, match=message):
            cache.remove_last(n)
    assert cache.length == 11


def test_remove_last_leaves_each_sequence_its_own_length() -> None:
    cache = CACHES["paged"](None)
    cache.append(*tokens(9))
    cache.crop(torch.tensor([9, 2, 5]))
    cache.remove_last(2)
    assert cache.lengths.tolist() == [7, 0, 3]
    with pytest.raises(ValueError, match=r"remove_last\(1\): the cache has sequences of \[7, 0, 3\] tokens"):
        cache.remove_last(1)
    assert cache.lengths.tolist() == [7, 0, 3]


def test_a_paged_cache_of_no_sequences_counts_its_tokens() -> None:
    cache = CACHES["paged"](None)
    cache.append(*tokens(4))
    cache.reorder(torch.tensor([], dtype=torch.int64))
    cache.append(torch.randn(0, HEADS, 2, DK), torch.randn(0, HEADS, 2, DV))
    assert cache.positions.q is not None and cache.positions.q.shape == (2,)
    assert [t.shape[0] for t in cache.read()] == [0, 0]
