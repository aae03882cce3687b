"""Whether what flash-attention's functions are given fits: running totals, block tables, lengths, slopes by sequence.

flash-attention reads beside its tensors where these are wrong. Here they raise errors before anything is read or
written.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.core.arrays import integers
from regard.core.errors import ShapeError
from regard.core.shapes import count_of, listed
from regard.masks.convert import running_totals


def checked_totals(cu_seqlens: Any, name: str, rows: int) -> Tensor:
    """Running totals of lengths (batch + 1,), from 0 to the number of rows."""
    t = running_totals(cu_seqlens, name)
    if int(t[-1]) != rows:
        raise ShapeError(f"{name} ends at {int(t[-1])}; expected the number of packed rows, {rows}.")
    return t


def checked_table(table: Any, name: str, batch: int, pages: int) -> Tensor:
    """The pages of each sequence, int64 (batch, most pages); numbers that no pool has are the number of pages.

    What lies behind the last page of a sequence is not read, and may be any number.
    """
    t = integers(table, name)
    if t.dim() != 2 or t.shape[0] != batch:
        raise ShapeError(f"{name} has shape {listed(t.shape)}; expected ({batch}, most pages).")
    return t.masked_fill((t < 0) | (t >= pages), pages)


def checked_rows(indices: Any, batch: int, rows: int) -> Tensor:
    """The row of the cache that each sequence has, int64 (batch,)."""
    t = integers(indices, "cache_batch_idx")
    if t.shape != (batch,):
        raise ShapeError(f"cache_batch_idx has shape {listed(t.shape)}; expected ({batch},).")
    if t.numel() and not 0 <= int(t.min()) <= int(t.max()) < rows:
        raise ValueError(f"cache_batch_idx is {t.tolist()}; expected rows of the cache, 0 to {rows - 1}.")
    return t


def checked_lengths(lengths: Any, batch: int) -> Tensor:
    """The number of tokens that a cache holds, int64 () or (batch,)."""
    t = integers(lengths, "cache_seqlens")
    if t.shape not in ((), (1,), (batch,)):
        raise ShapeError(f"cache_seqlens has shape {listed(t.shape)}; expected a number, or ({batch},).")
    if t.numel() and int(t.min()) < 0:
        raise ValueError(f"cache_seqlens is {t.tolist()}; expected lengths of 0 or more.")
    return t


def check_pages(page: Tensor, pages: int) -> None:
    """ShapeError where pages that are read or written are none of a pool of so many."""
    if page.numel() and not 0 <= int(page.min()) <= int(page.max()) < pages:
        raise ShapeError(f"block_table names a page that the pool, of {count_of(pages, 'page')}, does not have.")


def check_slopes(slopes: Tensor, batch: int, heads: int) -> None:
    """ShapeError where slopes (batch, heads) are of other sequences or heads."""
    if tuple(slopes.shape) not in ((batch, heads), (batch, 1)):
        raise ShapeError(f"alibi_slopes has shape {listed(slopes.shape)}; expected ({heads},) or ({batch}, {heads}).")


def check_rotation(cos: Tensor, sin: Tensor, at: Tensor) -> None:
    """ShapeError where cos and sin have no row for a position."""
    rows, last = min(len(cos), len(sin)), int(at.max()) if at.numel() else -1
    if last >= rows:
        raise ShapeError(f"rotary_cos and rotary_sin have {count_of(rows, 'row')}; position {last} is rotated too.")
