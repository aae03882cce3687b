"""Which heads of a call a rank computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from regard.call.part import PartOfCall, RegionOfPart
from regard.core.region import Frame, Region, Tiling
from regard.core.shapes import repeat_heads


@dataclass(frozen=True)
class HeadShare(PartOfCall):
    """`count` query heads from `first` on, of `total`, and the key heads that they read.

    Each of `key_heads` is read by count / len(key_heads) query heads that follow one another; one that more of them
    read stands there more than once.
    """

    first: int
    count: int
    total: int
    key_heads: tuple[int, ...]

    @staticmethod
    def split(heads: int, key_heads: int, ranks: int) -> list[HeadShare]:
        """The heads of each rank, of `ranks` <= heads: consecutive ones, as evenly as grouped queries allow.

        What is dealt out is a run of query heads that read one key head: a head group, or an equal part of one; the
        longest run with which the largest share is as small as it can be.

        >>> [(h.count, h.key_heads) for h in HeadShare.split(12, 3, 2)]   # runs of 2: key head 1 is read on both ranks
        [(6, (0, 0, 1)), (6, (1, 2, 2))]
        """
        group = heads // key_heads
        lengths = [n for n in range(1, group + 1) if group % n == 0 and heads // n >= ranks]
        run = min(lengths, key=lambda n: (-(heads // n // -ranks) * n, -n))
        bounds = [heads // run * rank // ranks for rank in range(ranks + 1)]
        return [
            HeadShare(a * run, (b - a) * run, heads, _once([n * run // group for n in range(a, b)]))
            for a, b in pairwise(bounds)
        ]

    def frame(self, at: Frame) -> Frame:
        return replace(at, heads=self.total)

    def region(self, at: Region) -> Region:
        return _RegionOfAllHeads(at, self)

    def tiling(self, at: Tiling) -> Tiling:
        return _TilingOfAllHeads(at, self)

    def of(self, t: Tensor, axis: int) -> Tensor:
        """Their part of a tensor with an entry a query head along `axis`, negative; all of it where that has one."""
        if self.count == self.total or t.dim() < -axis or t.shape[axis] == 1:
            return t
        return t.narrow(axis, self.first, self.count)

    def of_pairs(self, t: Tensor, whole: Frame) -> Tensor:
        # where it has fewer entries than there are heads, each is of several that follow one another
        return self.of(t if t.dim() < 3 or t.shape[-3] == 1 else repeat_heads(t, self.total), -3)

    def of_keys(self, t: Tensor, axis: int) -> Tensor:
        """The same of a tensor with an entry a key head along `axis`."""
        if self.count == self.total or t.dim() < -axis:
            return t
        return t.index_select(axis, torch.tensor(self.key_heads, device=t.device, dtype=torch.int64))


def _once(read: list[int]) -> tuple[int, ...]:
    """The key heads that runs of equal length read, each once where all are read by as many runs."""
    distinct = sorted(set(read))
    even = all(read.count(n) * len(distinct) == len(read) for n in distinct)
    return tuple(distinct if even else read)


class _RegionOfAllHeads(RegionOfPart):
    """A region of a call with some heads, which have there the numbers and the tensors that they have in the whole."""

    def __init__(self, at: Region, some: HeadShare) -> None:
        super().__init__(at, some)
        self._some = some

    @property
    def h(self) -> Tensor:
        return self.at.h + self._some.first

    def heads(self, t: Tensor) -> Tensor:
        return self.at.heads(self._some.of(t, -1))

    def pairs(self, t: Tensor) -> Tensor:
        return self.at.pairs(self._some.of(t, -3))


class _TilingOfAllHeads(Tiling):
    """A tiling of a call with some heads that takes tensors of the whole."""

    def __init__(self, at: Tiling, some: HeadShare) -> None:
        super().__init__(some.frame(at.frame), at.r, at.c)
        self._at, self._some = at, some

    @property
    def row(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._at.row

    @property
    def col(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._at.col

    def queries(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return self._at.queries(t)

    def keys(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return self._at.keys(t)

    @property
    def i(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._at.i

    @property
    def j(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._at.j

    def pairs(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return self._at.pairs(self._some.of(t, -3))
