"""Reach: which cells of a map, and which keys of a row, a mask lets through for one sequence; in linear memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.region import Frame
from regard.core.shapes import blocks
from regard.inspect.facts.pooled import Cells
from regard.masks.algebra import View

STRIP = 256  # queries whose row of the mask is held at a time, where the mask is not made of intervals


@dataclass(frozen=True, eq=False)
class Reach:
    """What a mask lets through for one batch element, with any head, on the CPU.

    earliest  (nq,)         the first key that the query may see; nk where it sees none
    latest    (nq,)         the last one; -1 where it sees none
    cells     (rows, cols)  whether a cell of a Map holds a visible pair: boolean
    """

    earliest: Tensor
    latest: Tensor
    cells: Tensor

    @staticmethod
    def of(view: View, element: int, rows: int, cols: int) -> Reach:
        """The reach of the batch element with that flat index, over a Map of rows × cols cells.

        >>> from regard.masks.positional import Causal
        >>> Reach.of(Causal().on(4), 0, 2, 2).cells
        tensor([[ True, False],
                [ True,  True]])
        """
        frame, interval = view.frame, view.rows()
        place = _place(frame.batch, element)
        row, column = (_index(n, count) for n, count in ((frame.nq, rows), (frame.nk, cols)))
        if interval is None:
            return _of_strips(view, element, row, column)
        start, stop = (t.expand(*frame.batch, frame.heads, frame.nq)[place].cpu() for t in interval)
        return _of_intervals(frame, start, torch.maximum(start, stop), row, column)


def visible(view: View, element: int, rows: slice = slice(None)) -> Tensor:
    """Which keys some queries may see, of one batch element, on the CPU: boolean (h, rows, nk)."""
    frame = view.frame
    size = len(range(frame.nq)[rows])
    seen = view.mask.visible(frame.region(rows)).expand(*frame.batch, frame.heads, size, frame.nk)
    return seen[_place(frame.batch, element)].cpu()


def _index(n: int, cells: int) -> Tensor:
    """The cell of each of n tokens."""
    return Cells(n, cells).index(slice(0, n), torch.device("cpu"))


def _place(batch: tuple[int, ...], element: int) -> tuple[int, ...]:
    """The indices of a flat batch index. A mask without batch axes says the same of every element."""
    if math.prod(batch) == 1:
        return (0,) * len(batch)
    place: list[int] = []
    for size in reversed(batch):
        element, index = divmod(element, size)
        place.insert(0, index)
    return tuple(place)


def _of_intervals(frame: Frame, start: Tensor, stop: Tensor, row: Tensor, column: Tensor) -> Reach:
    some = (stop > start).long()
    first, last = column[start.clamp(max=frame.nk - 1)], column[(stop - 1).clamp(min=0)]
    # Adding 1 where an interval starts and -1 after its end, then summing up, counts the intervals over a cell.
    counts = torch.zeros(int(row[-1]) + 1, int(column[-1]) + 2, dtype=torch.int64, device="cpu")
    places = row.expand_as(start)
    counts.index_put_((places, first), some, accumulate=True).index_put_((places, last + 1), -some, accumulate=True)
    earliest = torch.where(some > 0, start, frame.nk).amin(0)
    latest = torch.where(some > 0, stop - 1, -1).amax(0)
    return Reach(earliest, latest, counts.cumsum(1)[:, :-1] > 0)


def _of_strips(view: View, element: int, row: Tensor, column: Tensor) -> Reach:
    frame = view.frame
    earliest, latest = list[Tensor](), list[Tensor]()
    counts = torch.zeros(int(row[-1]) + 1, int(column[-1]) + 1, dtype=torch.int64, device="cpu")
    for strip in blocks(frame.nq, STRIP):
        size = strip.stop - strip.start
        any_head = visible(view, element, strip).any(0)
        sees = any_head.any(-1)
        earliest.append(torch.where(sees, any_head.long().argmax(-1), frame.nk))
        latest.append(torch.where(sees, frame.nk - 1 - any_head.flip(-1).long().argmax(-1), -1))
        pooled = torch.zeros(size, counts.shape[1], dtype=torch.int64, device="cpu").index_add_(
            1, column, any_head.long()
        )
        counts.index_add_(0, row[strip], pooled)
    return Reach(torch.cat(earliest), torch.cat(latest), counts > 0)
