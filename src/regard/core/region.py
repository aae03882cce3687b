"""Frame, Region, Tiling: the index space of one call, a rectangle of it, and its division into blocks.

A mask or a score is asked about a Region and answers for every (query, key) pair in it, by broadcasting: what depends
on the query has shape (..., 1, r, 1), what depends on the key (..., 1, 1, c). The same questions can be asked about a
single pair (see backends/flex), so a mask or score written once runs everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from regard.core.errors import ShapeError
from regard.core.positions import Positions, resolve_positions
from regard.core.shapes import blocks, listed
from regard.core.tracing import data_unavailable

Index = slice | Tensor
Indices = range | Tensor


@dataclass(frozen=True, eq=False)
class Frame:
    """The index space of one call: batch axes, heads, queries and keys, and where these stand.

    `headed` is False where the caller's tensors have no head axis; then heads is 1, and tensors that the caller gives
    with three axes or more get that axis. shape: (*batch, heads, nq, nk).
    """

    batch: tuple[int, ...]
    heads: int
    nq: int
    nk: int
    positions: Positions
    headed: bool = True
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (*self.batch, self.heads, self.nq, self.nk))

    @staticmethod
    def of(
        nq: int,
        nk: int | None = None,
        *,
        batch: tuple[int, ...] = (),
        heads: int = 1,
        positions: Positions | None = None,
        positional: object | None = None,
        device: torch.device | str | None = None,
    ) -> Frame:
        nk = nq if nk is None else nk
        return Frame(batch, heads, nq, nk, resolve_positions(positions, nq, nk, batch, positional, device))

    @property
    def device(self) -> torch.device:
        return self.positions.q.device

    @property
    def keys_sorted(self) -> bool:
        """Whether key positions never decrease, so that a range of positions is a range of indices.

        False where Python cannot read them.
        """
        k = self.positions.k
        if self.positions.consecutive:
            return True
        if data_unavailable(k):
            return False
        return bool((k[..., 1:] >= k[..., :-1]).all())

    def lift(self, t: Tensor) -> Tensor:
        """A tensor of the caller's axes (..., nq, nk), with the head axis that the caller may lack."""
        return t if self.headed or t.dim() < 3 else t.unsqueeze(-3)

    def region(self, rows: Index | None = None, cols: Index | None = None) -> Region:
        """Some of the queries and keys; None: all of them."""
        return Region(self, slice(None) if rows is None else rows, slice(None) if cols is None else cols)

    def tiling(self, r: int, c: int) -> Tiling:
        return Tiling(self, r, c)


class Region:
    """The pairs (rows × cols) of a frame: what masks and scores are asked about.

    i, j      absolute positions of the queries (..., 1, r, 1) and keys (..., 1, 1, c)
    row, col  their indices in the call
    b, h      flat batch index (*batch, 1, 1, 1) and head index (heads, 1, 1)
    """

    def __init__(self, frame: Frame, rows: Index, cols: Index) -> None:
        self.frame, self.rows, self.cols = frame, rows, cols
        self._row: Tensor | None = None  # not cached_property, whose lock no compiler enters
        self._col: Tensor | None = None

    @property
    def i(self) -> Tensor:
        return self.queries(self.frame.positions.q)

    @property
    def j(self) -> Tensor:
        return self.keys(self.frame.positions.k)

    @property
    def row(self) -> Tensor:
        if self._row is None:
            self._row = self.queries(torch.arange(self.frame.nq, device=self.frame.device, dtype=torch.int64))
        return self._row

    @property
    def col(self) -> Tensor:
        if self._col is None:
            self._col = self.keys(torch.arange(self.frame.nk, device=self.frame.device, dtype=torch.int64))
        return self._col

    @property
    def b(self) -> Tensor:
        batch = self.frame.batch
        return torch.arange(math.prod(batch), device=self.frame.device, dtype=torch.int64).reshape(*batch, 1, 1, 1)

    @property
    def h(self) -> Tensor:
        return torch.arange(self.frame.heads, device=self.frame.device, dtype=torch.int64)[:, None, None]

    def queries(self, t: Tensor) -> Tensor:
        """One number a query, (nq,) or (*batch, nq)."""
        return t[..., self.rows][..., None, :, None]

    def keys(self, t: Tensor) -> Tensor:
        """One number a key, (nk,) or (*batch, nk)."""
        return t[..., self.cols][..., None, None, :]

    def sequences(self, t: Tensor) -> Tensor:
        """One number a batch element, (*batch) or ()."""
        return t[..., None, None, None]

    def heads(self, t: Tensor) -> Tensor:
        """One number a head, (heads,) or (). Raises ShapeError for another number of them."""
        if t.dim() and t.shape[-1] != 1 and t.shape[-1] != self.frame.heads:  # in graphs `in` knows no symbols
            raise ShapeError(
                f"at.heads(t): t has shape {listed(t.shape)}; expected one number a head, ({self.frame.heads},)."
            )
        return t[..., None, None] if t.dim() else t

    def pairs(self, t: Tensor) -> Tensor:
        """One number a pair, broadcastable to the caller's (*batch, heads, nq, nk). A view where both are slices."""
        t = self.frame.lift(t)
        if t.dim() >= 2 and not (t.shape[-2] == 1 != self.frame.nq):
            t = t[..., self.rows, :]
        return t[..., self.cols] if t.dim() and not (t.shape[-1] == 1 != self.frame.nk) else t

    def in_whole(self, whole: Frame, rows: Indices | None, cols: Indices) -> Region:
        """These pairs in a frame in which the queries and keys of this one have these indices; rows None: the same."""
        moved_rows = self.rows if rows is None else moved(self.rows, rows, self.frame.nq, whole.device)
        return Region(whole, moved_rows, moved(self.cols, cols, self.frame.nk, whole.device))


def moved(index: Index, indices: Indices, count: int, device: torch.device) -> Index:
    """What an index of `count` entries is, where these have the given indices."""
    if isinstance(indices, Tensor):
        return indices.to(device)[index]
    if isinstance(index, Tensor):
        return index * indices.step + indices.start
    chosen = indices[slice(*index.indices(count))]
    return slice(chosen.start, chosen.stop, chosen.step)


class Tiling:
    """A frame cut into R × C blocks of at most r × c pairs. What it answers broadcasts to (*batch, heads, R, C)."""

    def __init__(self, frame: Frame, r: int, c: int) -> None:
        self.frame, self.r, self.c = frame, r, c
        self.row_blocks, self.col_blocks = blocks(frame.nq, r), blocks(frame.nk, c)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.row_blocks), len(self.col_blocks)

    @cached_property
    def i(self) -> tuple[Tensor, Tensor]:
        """The least and the largest query position in each row of blocks."""
        return self.queries(self.frame.positions.q)

    @cached_property
    def j(self) -> tuple[Tensor, Tensor]:
        """The least and the largest key position in each column of blocks."""
        return self.keys(self.frame.positions.k)

    @cached_property
    def row(self) -> tuple[Tensor, Tensor]:
        return self.queries(torch.arange(self.frame.nq, device=self.frame.device, dtype=torch.int64))

    @cached_property
    def col(self) -> tuple[Tensor, Tensor]:
        return self.keys(torch.arange(self.frame.nk, device=self.frame.device, dtype=torch.int64))

    def queries(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest of one number a query, (nq,) or (*batch, nq)."""
        least, largest = extremes(t, self.r)
        return least[..., None, :, None], largest[..., None, :, None]

    def keys(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest of one number a key, (nk,) or (*batch, nk)."""
        least, largest = extremes(t, self.c)
        return least[..., None, None, :], largest[..., None, None, :]

    def sequences(self, t: Tensor) -> Tensor:
        """One number a batch element, (*batch) or ()."""
        return t[..., None, None, None]

    def pairs(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest of one number a pair, broadcastable to the caller's (*batch, heads, nq, nk)."""
        t = self.frame.lift(t)
        t = t.reshape((1,) * (2 - t.dim()) + tuple(t.shape)) if t.dim() < 2 else t
        least = largest = t
        if not (t.shape[-1] == 1 != self.frame.nk):
            least, largest = extremes(t, self.c)
        if not (t.shape[-2] == 1 != self.frame.nq):
            least = extremes(least.mT, self.r)[0].mT
            largest = extremes(largest.mT, self.r)[1].mT
        return least, largest


def extremes(t: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each block of `size` along the last axis: (..., n) -> twice (..., ceil(n / size))."""
    n = t.shape[-1]
    whole = n // size * size
    parts = [t[..., :whole].unflatten(-1, (-1, size))] if whole else []
    parts += [t[..., None, whole:]] if whole < n else []
    if not parts:
        return t, t
    return torch.cat([p.amin(-1) for p in parts], -1), torch.cat([p.amax(-1) for p in parts], -1)
