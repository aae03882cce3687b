"""Paged: keys or values that lie in the pages of a pool, as a tensor that is gathered only where that is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.core.deferred import DeferredRows, wrapper


class Paged(DeferredRows):
    """Keys (or values) of a batch of sequences, a tensor (batch, heads, n, d) whose rows lie in pages of a pool.

    pages        (pages, heads, page_size, d)
    block_table  int32 (batch, m): the pages of each sequence in order; behind its last, any page of the pool

    Row t of sequence b is row t % page_size of page block_table[b, t // page_size]. regard.attention reads the pages
    where they lie; `explain` says whether a call does. Any other operation gathers them first: it computes with a
    contiguous copy, which is made once and kept. It may be read until the cache that it belongs to is written after a
    `crop` or `reorder`, and not be written: an operation in place raises TypeError.

    >>> pages = torch.arange(12.0).reshape(3, 1, 2, 2)  # 3 pages of 2 rows
    >>> x = Paged(pages, torch.tensor([[2, 0]], dtype=torch.int32), 3)
    >>> x.shape, (x + 0).tolist()
    (torch.Size([1, 1, 3, 2]), [[[[8.0, 9.0], [10.0, 11.0], [0.0, 1.0]]]])
    """

    pages: Tensor
    block_table: Tensor
    page_size: int

    @staticmethod
    def __new__(cls: type[Paged], pages: Tensor, block_table: Tensor, n: int) -> Paged:
        _, heads, page_size, d = pages.shape
        made = wrapper(cls, (block_table.shape[0], heads, n, d), dtype=pages.dtype, device=pages.device)
        made.pages, made.block_table, made.page_size, made._written = pages, block_table, page_size, None
        return made

    def shared_by(self, batch: int) -> Paged:
        """The rows of one sequence for each of `batch` batch elements."""
        return Paged(self.pages, self.block_table.expand(batch, -1), self.shape[-2])

    @property
    def in_pages(self) -> bool:
        return True

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.pages, self.block_table

    def lies_like(self, other: Any) -> bool:
        """Whether `other` lies in pages of the same size, which the same block table names."""
        if type(other) is not Paged or self.page_size != other.page_size:
            return False
        a, b = self.block_table, other.block_table
        return a is b or (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())

    def _write_out(self) -> Tensor:
        return gather_rows(self.pages, self.block_table, self.shape[-2])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Paged({tuple(self.shape)}, {self.dtype}, pages of {self.page_size})"


def gather_rows(pages: Tensor, block_table: Tensor, n: int) -> Tensor:
    """The first n rows of each sequence, (batch, heads, n, d), without gaps."""
    table = block_table[:, : -(-n // pages.shape[2])].to(pages.device, torch.int64)
    rows = pages.new_empty(len(table), pages.shape[1], n, pages.shape[3])
    for b in range(len(table)):  # one sequence at a time: whole pages are copied twice
        rows[b] = pages[table[b]].transpose(0, 1).flatten(1, 2)[:, :n]
    return rows


def share_pages(k: Any, v: Any) -> bool:
    """Whether keys and values lie in pages, and one block table says where."""
    return type(k) is Paged and k.lies_like(v)
