"""Reach: who may see whom in one sequence of a call, in linear memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.masks.algebra import Interval, View
from regard.shapes import blocks

STRIP = 256  # queries whose row of the mask is held at a time, where the mask is not made of intervals


@dataclass(frozen=True, eq=False)
class Reach:
    """What a mask lets through for one batch element, on the CPU.

    counts    (heads, nq)   how many keys each query may see
    readers   (heads, nk)   how many queries may see each key
    earliest  (nq,)         the first key that the query may see with any head; nk where it sees none
    cells     (rows, cols)  whether a cell of a Map holds a visible pair, of any head: boolean
    """

    counts: Tensor
    readers: Tensor
    earliest: Tensor
    cells: Tensor

    @staticmethod
    def of(view: View, element: int, rows: int, cols: int) -> Reach:
        """The reach of the batch element with that flat index, over a Map of rows × cols cells.

        >>> from regard.masks.positional import Causal
        >>> Reach.of(Causal().on(4), 0, 2, 2).cells
        tensor([[ True, False],
                [ True,  True]])
        """
        frame = view.frame
        place = _place(frame.batch, element)
        interval = view.rows()
        if interval is None:
            return _of_strips(view, place, rows, cols)
        start, stop = (t.expand(*frame.batch, frame.heads, frame.nq)[place].cpu() for t in interval)
        return _of_interval(Interval(start, torch.maximum(start, stop)), frame.nk, rows, cols)


def cell_of(n: int, cells: int) -> Tensor:
    """The cell of each of n tokens, as in Map: int64 (n,)."""
    return torch.arange(n) * cells // max(n, 1)


def edges(n: int, cells: int) -> Tensor:
    """The first token of each cell, and n: int64 (cells + 1,).

    >>> edges(5, 2)
    tensor([0, 3, 5])
    """
    return (torch.arange(cells + 1) * n + cells - 1) // max(cells, 1)


def _place(batch: tuple[int, ...], element: int) -> tuple[int, ...]:
    """The indices of a flat batch index. A mask without batch axes says the same of every element."""
    if math.prod(batch) == 1:
        return (0,) * len(batch)
    place: list[int] = []
    for size in reversed(batch):
        element, index = divmod(element, size)
        place.insert(0, index)
    return tuple(place)


def _of_interval(seen: Interval, nk: int, rows: int, cols: int) -> Reach:
    heads, nq = seen.start.shape
    some = (seen.stop > seen.start).long()
    # Adding 1 where an interval starts and -1 where it stops, then summing up, counts the intervals over a place.
    readers = torch.zeros(heads, nk + 1, dtype=torch.int64)
    readers.scatter_add_(1, seen.start, some).scatter_add_(1, seen.stop, -some)
    column, row = cell_of(nk, cols), cell_of(nq, rows).expand(heads, nq)
    first, last = column[seen.start.clamp(max=nk - 1)], column[(seen.stop - 1).clamp(min=0)]
    cells = torch.zeros(rows, cols + 1, dtype=torch.int64)
    cells.index_put_((row, first), some, accumulate=True).index_put_((row, last + 1), -some, accumulate=True)
    return Reach(
        seen.stop - seen.start,
        readers.cumsum(1)[:, :nk],
        torch.where(some > 0, seen.start, nk).amin(0),
        cells.cumsum(1)[:, :cols] > 0,
    )


def _of_strips(view: View, place: tuple[int, ...], rows: int, cols: int) -> Reach:
    frame = view.frame
    column, row = cell_of(frame.nk, cols), cell_of(frame.nq, rows)
    counts, earliest = list[Tensor](), list[Tensor]()
    readers = torch.zeros(frame.heads, frame.nk, dtype=torch.int64)
    cells = torch.zeros(rows, cols, dtype=torch.int64)
    for strip in blocks(frame.nq, STRIP):
        size = strip.stop - strip.start
        visible = view.mask.visible(frame.region(strip)).expand(*frame.batch, frame.heads, size, frame.nk)[place].cpu()
        any_head = visible.any(0)
        counts.append(visible.sum(-1))
        earliest.append(torch.where(any_head.any(-1), any_head.long().argmax(-1), frame.nk))
        readers += visible.sum(-2)
        pooled = torch.zeros(size, cols, dtype=torch.int64).index_add_(1, column, any_head.long())
        cells.index_add_(0, row[strip], pooled)
    return Reach(torch.cat(counts, -1), readers, torch.cat(earliest), cells > 0)
