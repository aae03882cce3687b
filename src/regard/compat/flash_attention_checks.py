"""Whether what flash-attention's functions are given fits: running totals, block tables, lengths, slopes by sequence.

flash-attention reads beside its tensors where these are wrong. Here they raise errors before anything is read or
written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.core.arrays import integers
from regard.core.errors import ShapeError, Unsupported
from regard.core.shapes import count_of, listed
from regard.masks.convert import running_totals


def check_axes(*given: tuple[str, Tensor], shape: str) -> None:
    """ShapeError where a tensor has another number of axes than `shape`."""
    for name, t in given:
        if t.dim() != shape.count(",") + 1:
            raise ShapeError(f"{name} has shape {listed(t.shape)}; expected {shape}.")


def refuse_probabilities(return_attn_probs: bool, dropout_p: float) -> None:
    """Unsupported for weights with the pattern of dropout."""
    if return_attn_probs and dropout_p:
        raise Unsupported(
            "return_attn_probs with dropout_p asks for the weights with the pattern of dropout. Without dropout_p it "
            "gives (out, lse, None); regard.attention_weights gives the weights before dropout."
        )


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


def pages_in_use(table: Tensor, lengths: Tensor, size: int, pages: int) -> Tensor:
    """A checked table with a page that there is, 0, where none is read: behind the `lengths` tokens of a sequence.

    ShapeError where a page that is read is none of the pool.
    """
    first = torch.arange(table.shape[1], device=table.device, dtype=torch.int64) * size
    read = first < lengths.to(table.device)[:, None]
    check_pages(table[read], pages)
    return table.masked_fill(~read, 0)


def check_together(**given: Any) -> None:
    """ValueError where one of two arguments is given, and the other is None."""
    (name, x), (other, y) = given.items()
    if (x is None) != (y is None):
        name, other = (name, other) if y is None else (other, name)
        raise ValueError(f"{name} is given without {other}; pass both, or neither.")


def check_pools(k: Tensor, v: Tensor, names: str, paged: bool) -> None:
    """ShapeError where the keys and the values of a cache (rows, room, hk, d) are not of the same tokens."""
    if k.shape[:3] != v.shape[:3]:
        expected = "(pages, page_size, hk)" if paged else "(batch, room, hk)"
        raise ShapeError(f"{names} have shapes {listed(k.shape)} and {listed(v.shape)}; expected the same {expected}.")


def check_new_rows(k: Tensor | None, v: Tensor | None, caches: tuple[Tensor, Tensor], batch: int) -> None:
    """Raises where new keys and values (batch, n, hk, d) are not those of the caches (..., hk, d), or have no room."""
    check_together(k=k, v=v)
    for name, new, cache in (("k", k, caches[0]), ("v", v, caches[1])):
        if new is None or k is None:
            continue
        expected = (batch, k.shape[1] if k.dim() == 4 else 1, *cache.shape[2:])
        if tuple(new.shape) != expected:
            raise ShapeError(
                f"{name} has shape {listed(new.shape)}; expected {listed(expected)}, (batch, new tokens, hk, d), as "
                f"{name}_cache of shape {listed(cache.shape)} holds them."
            )
        if cache.stride(0) == 0 and len(cache) > 1:
            raise ValueError(
                f"{name}_cache repeats one row, by expand: new rows of all sequences would be written to it. Pass "
                f"{name}_cache.contiguous()."
            )
        if new.dtype != cache.dtype:
            raise TypeError(f"{name} has dtype {new.dtype}, {name}_cache {cache.dtype}; expected the same.")


def check_slopes(slopes: Tensor, batch: int, heads: int) -> None:
    """ShapeError where slopes (batch, heads) are of other sequences or heads."""
    if tuple(slopes.shape) not in ((batch, heads), (batch, 1)):
        raise ShapeError(f"alibi_slopes has shape {listed(slopes.shape)}; expected ({heads},) or ({batch}, {heads}).")


def check_rotation(cos: Tensor, sin: Tensor, at: Tensor, width: int) -> None:
    """ShapeError where cos and sin are not alike, turn more than `width` features, or have no row for a position."""
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > width:
        raise ShapeError(
            f"rotary_cos has shape {listed(cos.shape)}, rotary_sin {listed(sin.shape)}; expected both "
            f"(positions, width / 2), for a width of at most {width} features."
        )
    rows, last = len(cos), int(at.max()) if at.numel() else -1
    if last >= rows:
        raise ShapeError(f"rotary_cos and rotary_sin have {count_of(rows, 'row')}; position {last} is rotated too.")
