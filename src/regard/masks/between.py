"""Between: an interval of keys for each query, written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard.core.region import Frame, Region, Tiling
from regard.core.shapes import equal_shapes, listed
from regard.masks.algebra import Interval, Mask, cover_of


@dataclass(frozen=True)
class Between(Mask):
    """Keys start ≤ j < stop, indices, one interval a query: integer tensors (nq,) or (*batch, nq).

    Those of int32 the native kernels read where they are.

    >>> Between(torch.tensor([0, 1]), torch.tensor([2, 3])).draw(2, 3)
    ■■·
    ·■■
    """

    positional: ClassVar[bool] = False
    start: Tensor
    stop: Tensor

    def visible(self, at: Region) -> Tensor:
        return (at.col >= at.queries(self.start)) & (at.col < at.queries(self.stop))

    def cover(self, at: Tiling) -> Tensor:
        (start, last_start), (stop, last_stop) = at.queries(self.start), at.queries(self.stop)
        col, last_col = at.col
        return cover_of(none=(last_col < start) | (col >= last_stop), all_=(col >= last_start) & (last_col < stop))

    def rows(self, frame: Frame) -> Interval:
        return Interval(self.start[..., None, :], self.stop[..., None, :])

    def shape_error(self, frame: Frame) -> str | None:
        for name, t in (("start", self.start), ("stop", self.stop)):
            lead = t.shape[:-1]
            shared = not len(lead) or equal_shapes(lead, (1,))
            if t.shape[-1] != frame.nq or not (shared or equal_shapes(lead, frame.batch)):
                return f"Between.{name} has shape {listed(t.shape)}; expected ({frame.nq},) or (*batch, {frame.nq})."
        return None

    def batch(self) -> tuple[int, ...]:
        return tuple(self.start.shape[:-1])
