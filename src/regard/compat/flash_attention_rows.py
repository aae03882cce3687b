"""Rows of flash-attention's caches and pools: turned by their position, written behind others, read from pages."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.compat.flash_attention_checks import check_pages, check_rotation, checked_table
from regard.core.dtypes import accumulator
from regard.core.errors import ShapeError
from regard.core.shapes import count_of
from regard.masks.convert import running_totals
from regard.nn.rotary import Rotary, RotaryInterleaved


def rotated(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, *, advance: bool) -> Tensor:
    """x (batch, n, heads, d) turned by the rows of cos and sin from `first` (batch,) on, or all of it by that row."""
    at = first[:, None] + torch.arange(x.shape[1] if advance else 1, device=x.device, dtype=torch.int64)
    check_rotation(cos, sin, at, x.shape[-1])
    width, wide = 2 * cos.shape[1], accumulator(x.dtype)
    turn = (RotaryInterleaved if interleaved else Rotary)(width).rotate
    turned = turn(x[..., :width].to(wide), cos[at][:, :, None].to(wide), sin[at][:, :, None].to(wide))
    return torch.cat([turned.to(x.dtype), x[..., width:]], -1)


def write_rows(pools: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], table: Tensor, held: Tensor) -> None:
    """Copies new keys and values (batch, n, hk, d) behind the `held` tokens (batch,) of each sequence."""
    size = pools[0].shape[1]
    at = held[:, None] + torch.arange(new[0].shape[1], device=held.device, dtype=torch.int64)
    page, row = table.long().gather(1, at // size), at % size
    check_pages(page, len(pools[0]))
    for pool, t in zip(pools, new, strict=True):
        pool[page, row] = t


def packed_rows(pool: Tensor, block_table: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The rows that a block table names in a pool (pages, page_size, hk, d), one behind another: (total, hk, d)."""
    lengths, size = running_totals(cu_seqlens, "cu_seqlens_k").diff(), pool.shape[1]
    table = checked_table(block_table, "block_table", len(lengths), len(pool))
    room, longest = table.shape[1] * size, int(lengths.max()) if len(lengths) else 0
    if longest > room:
        raise ShapeError(f"block_table has room for {count_of(room, 'row')} of a sequence; cu_seqlens_k has {longest}.")
    index = torch.arange(len(lengths), device=pool.device, dtype=torch.int64).repeat_interleave(lengths)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    row = torch.arange(len(index), device=pool.device, dtype=torch.int64) - starts
    page = table[index, row // size]
    check_pages(page, len(pool))
    return pool[page, row % size]
