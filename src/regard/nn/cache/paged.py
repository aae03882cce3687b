"""PagedCache: sequences of unequal lengths, whose keys and values lie in pages of one pool."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.core.errors import ShapeError
from regard.core.positions import Positions, tail
from regard.masks.algebra import Everything, Mask
from regard.masks.ragged import Lengths
from regard.nn.cache.base import KVCache, check_like, check_tokens


class PagedCache(KVCache):
    """Keys and values in a pool of `pages` pages of `page_size` tokens each, allocated once, that sequences share.

    key_pages    (pages, heads, page_size, dk)
    value_pages  (pages, heads, page_size, dv)
    block_table  int32 (batch, most pages of a sequence): the pages of each sequence in order, -1 after its last
    lengths      int64 (batch): tokens of each sequence

    Token t of sequence b is row t % page_size of page block_table[b, t // page_size]. A page may stand in the tables of
    several sequences: `reorder` copies tables, not pages, so that beams, or many continuations of one prompt, hold
    their common tokens once. A page that several sequences read is copied when one of them writes to it.

    `append` adds n tokens to every sequence. A batch of prompts that are padded at the end becomes one of ragged
    lengths by crop(lengths); from there on `positions` has a row for each sequence, and `mask` hides what lies behind
    its end. crop(0 for one sequence) makes room for a new one in its place.

    No kernel reads pages yet: `append` gathers all keys and values into contiguous tensors (batch, heads, most tokens,
    d), which takes their memory a second time, and the time to copy them, at each call. An append that needs more pages
    than are free raises ValueError, and adds nothing. See KVCache for the rest.
    Source: Kwon et al. 2023, PagedAttention (arXiv 2309.06180).

    >>> cache = PagedCache(batch=2, heads=8, pages=6, page_size=4, dk=64, dv=64)
    >>> prompts = torch.randn(2, 8, 7, 64)  # of 7 tokens and of 3, padded
    >>> keys, values = cache.append(prompts, prompts)
    >>> cache.crop(torch.tensor([7, 3]))
    >>> cache.block_table, cache.free_pages
    (tensor([[ 0,  1],
            [ 2, -1]], dtype=torch.int32), 3)
    >>> k, q = torch.randn(2, 2, 8, 1, 64)
    >>> rg.attention(q, *cache.append(k, k), mask=rg.Causal() & cache.mask, positions=cache.positions).shape
    torch.Size([2, 8, 1, 64])
    >>> cache.lengths
    tensor([8, 4])
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        pages: int,
        page_size: int,
        dk: int,
        dv: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"PagedCache(page_size={page_size}): expected 1 token or more.")
        with torch.inference_mode(False):  # a pool made in inference mode could be written in no other mode
            # zeros: what is gathered from behind a sequence's end is hidden, but finite
            self.key_pages = torch.zeros(pages, heads, page_size, dk, dtype=dtype, device=device)
            self.value_pages = torch.zeros(pages, heads, page_size, dv, dtype=dtype, device=device)
        self.page_size = page_size
        self._tables: list[list[int]] = [[] for _ in range(batch)]
        self._lengths = [0] * batch
        self._appended = 0  # tokens of the last append, a sequence
        self._readers = [0] * pages  # how many tables a page stands in
        self._free = list(range(pages))[::-1]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_tokens(k, v)
        lead = len(self._tables), self.key_pages.shape[1]
        check_like(self.key_pages, lead, k, "k")
        check_like(self.value_pages, lead, v, "v")
        n, device = k.shape[-2], self.key_pages.device
        self._reserve(n)
        at = torch.tensor(self._lengths)[:, None] + torch.arange(n)  # (batch, n)
        table = self.block_table.long()
        page, row = table.gather(1, at // self.page_size).to(device), (at % self.page_size).to(device)
        for pages, t in ((self.key_pages, k), (self.value_pages, v)):
            pages[page, :, row] = t.transpose(1, 2)
        self._lengths, self._appended = [length + n for length in self._lengths], n
        table = table.clamp(min=0).to(device)  # behind a sequence's end any page will do
        # (batch, pages of each, heads, page_size, d) -> (batch, heads, most tokens, d)
        keys, values = (pages[table].transpose(1, 2).flatten(2, 3) for pages in (self.key_pages, self.value_pages))
        return keys[:, :, : self.length], values[:, :, : self.length]

    def _reserve(self, n: int) -> None:
        """Gives every sequence pages of its own for n more tokens; ValueError, and no change, if too few are free."""
        if n == 0:
            return
        size = self.page_size
        partial = Counter(table[-1] for table, length in zip(self._tables, self._lengths, strict=True) if length % size)
        copies = sum(min(writers, self._readers[page] - 1) for page, writers in partial.items())
        new = sum(
            -(-(length + n) // size) - len(table) for table, length in zip(self._tables, self._lengths, strict=True)
        )
        if copies + new > len(self._free):
            raise ValueError(
                f"append: {copies + new} more pages are needed, {len(self._free)} of {len(self._readers)} are free. "
                "Crop or drop sequences, or make the cache with more pages."
            )
        for table, length in zip(self._tables, self._lengths, strict=True):
            if length % size and self._readers[table[-1]] > 1:
                shared, own = table[-1], self._take()
                for pages in (self.key_pages, self.value_pages):
                    pages[own] = pages[shared]
                self._release([shared])
                table[-1] = own
            table += [self._take() for _ in range(-(-(length + n) // size) - len(table))]

    def _take(self) -> int:
        page = self._free.pop()
        self._readers[page] = 1
        return page

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._readers[page] -= 1
            if not self._readers[page]:
                self._free.append(page)

    def reorder(self, indices: Tensor) -> None:
        indices = arrays.indices(indices, "indices")
        chosen: list[int] = arrays.existing(indices, len(self._tables), "indices", "sequences").tolist()
        before = [page for table in self._tables for page in table]
        self._tables = [list(self._tables[b]) for b in chosen]
        self._lengths = [self._lengths[b] for b in chosen]
        for table in self._tables:
            for page in table:
                self._readers[page] += 1
        self._release(before)

    def crop(self, length: int | Tensor) -> None:
        """Forgets all tokens but the first `length`, a number or one for each sequence, (batch,)."""
        if isinstance(length, Tensor) and length.dim():
            wanted: list[int] = arrays.indices(length, "length").tolist()
        else:
            wanted = [int(length)] * len(self._tables)
        if len(wanted) != len(self._tables):
            raise ShapeError(f"crop: {len(wanted)} lengths; expected one for each of {len(self._tables)} sequences.")
        if any(not 0 <= left <= had for left, had in zip(wanted, self._lengths, strict=True)):
            raise ValueError(f"crop: lengths {wanted}; the cache has {self._lengths}, expected from 0 to these.")
        for table, left in zip(self._tables, wanted, strict=True):
            kept = -(-left // self.page_size)
            self._release(table[kept:])
            del table[kept:]
        self._lengths, self._appended = wanted, 0

    def reset(self) -> None:
        self.crop(0)

    @property
    def block_table(self) -> Tensor:
        most = max(map(len, self._tables), default=0)
        rows = [table + [-1] * (most - len(table)) for table in self._tables]
        return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), most)

    @property
    def free_pages(self) -> int:
        """How many pages of the pool hold nothing."""
        return len(self._free)

    @property
    def length(self) -> int:
        return max(self._lengths, default=0)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor(self._lengths, dtype=torch.int64, device=self.key_pages.device)

    @property
    def positions(self) -> Positions:
        n, device = self._appended, self.key_pages.device
        if self._even:
            return tail(n, self.length, device)
        q = self.lengths[:, None] - n + torch.arange(n, device=device)
        return Positions(q, torch.arange(self.length, device=device))

    @property
    def mask(self) -> Mask:
        return Everything() if self._even else Lengths(keys=self.lengths)

    def next_positions(self, n: int) -> Tensor:
        ahead = torch.arange(n, device=self.key_pages.device)
        return self.length + ahead if self._even else self.lengths[:, None] + ahead

    @property
    def _even(self) -> bool:
        """Whether all sequences are of one length, so that positions and masks need no tensors."""
        return len(set(self._lengths)) < 2
