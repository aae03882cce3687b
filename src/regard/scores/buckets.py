"""Buckets: which row of a relative-bias table belongs to a pair of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.region import Frame
from regard.core.tracing import data_unavailable, watched
from regard.core.value import Value


@dataclass(frozen=True)
class Buckets(Value):
    """A map from a pair of positions to a row of a table. Subclass with `count` and `index`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Parity(Buckets):
    ...     count = 2
    ...     def index(self, i, j):
    ...         return (i - j) % 2
    >>> Parity().index(torch.tensor([[3]]), torch.tensor([[0, 1, 2]]))
    tensor([[1, 0, 1]])
    """

    @property
    def count(self) -> int:
        """The number of rows of the table."""
        raise NotImplementedError

    def index(self, i: Tensor, j: Tensor) -> Tensor:
        """The row for queries at i (..., r, 1) and keys at j (..., 1, c), hidden ones too: int64 in 0..count - 1."""
        raise NotImplementedError

    def shape_error(self, frame: Frame) -> str | None:
        """Why these buckets have no row for some pair of that call, as a sentence; None if they have."""
        return None


@dataclass(frozen=True)
class DifferenceBuckets(Buckets):
    """Buckets that depend only on a difference of positions, or of the numbers that `place` returns for them.

    Subclass with `count` and `between`, and with `place` and `farthest` if differences of positions do not determine
    the bucket. The native kernels read one table of all differences; buckets with only `index` run tile by tile in
    PyTorch.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Parity(DifferenceBuckets):
    ...     count = 2
    ...     def between(self, ahead):
    ...         return ahead % 2
    >>> Parity().index(torch.tensor([[3]]), torch.tensor([[0, 1, 2]]))
    tensor([[1, 0, 1]])
    """

    def place(self, at: Tensor) -> Tensor:
        """The numbers whose differences determine the bucket, int64: the positions by default."""
        return at

    def between(self, ahead: Tensor) -> Tensor:
        """The bucket of each difference, place(query) - place(key)."""
        raise NotImplementedError

    @property
    def farthest(self) -> int | None:
        """The largest difference of either sign; None where it depends on the positions."""
        return None

    def index(self, i: Tensor, j: Tensor) -> Tensor:
        return self.between(self.place(i) - self.place(j))


@dataclass(frozen=True)
class ClippedBuckets(DifferenceBuckets):
    """One bucket for each distance j - i from -before to after; longer distances use the first or last bucket.

    Source: Shaw et al. 2018 (arXiv 1803.02155).

    >>> ClippedBuckets(before=1, after=1).index(torch.tensor([[5]]), torch.tensor([[1, 4, 5, 6, 9]]))
    tensor([[0, 0, 1, 2, 2]])
    """

    before: int
    after: int

    def __post_init__(self) -> None:
        if min(self.before, self.after) < 0:
            raise ValueError(f"{self!r}: expected distances of 0 or more.")

    @property
    def count(self) -> int:
        return self.before + self.after + 1

    def between(self, ahead: Tensor) -> Tensor:
        return (-ahead).clamp(-self.before, self.after) + self.before


@dataclass(frozen=True)
class T5CausalBuckets(DifferenceBuckets):
    """T5's buckets for a decoder: half of them exact distances behind the query, the rest logarithmic up to `reach`.

    Keys ahead of the query share bucket 0 with the query itself. Source: Raffel et al. 2020 (arXiv 1910.10683).

    >>> T5CausalBuckets(8, 16).index(torch.tensor([[15]]), torch.tensor([[0, 10, 14, 15]]))
    tensor([[7, 4, 1, 0]])
    """

    size: int = 32
    reach: int = 128

    def __post_init__(self) -> None:
        if self.size < 2 or self.reach <= self.size // 2:
            raise ValueError(f"{self!r}: expected a size of 2 or more, and a reach above size / 2.")

    @property
    def count(self) -> int:
        return self.size

    def between(self, ahead: Tensor) -> Tensor:
        return _logarithmic(ahead.clamp(min=0), self.size, self.reach)


@dataclass(frozen=True)
class T5Buckets(DifferenceBuckets):
    """T5's buckets for an encoder: half for keys at or behind the query, half for those ahead, each as T5CausalBuckets.

    Source: Raffel et al. 2020 (arXiv 1910.10683).

    >>> T5Buckets(8, 16).index(torch.tensor([[5]]), torch.tensor([[4, 5, 6]]))
    tensor([[1, 0, 5]])
    """

    size: int = 32
    reach: int = 128

    def __post_init__(self) -> None:
        if self.size < 4 or self.size % 2 or self.reach <= self.size // 4:
            raise ValueError(f"{self!r}: expected an even size of 4 or more, and a reach above size / 4.")

    @property
    def count(self) -> int:
        return self.size

    def between(self, ahead: Tensor) -> Tensor:
        half = self.size // 2
        return (ahead < 0) * half + _logarithmic(ahead.abs(), half, self.reach)


@dataclass(frozen=True)
class GridBuckets(DifferenceBuckets):
    """One bucket for each offset (rows, columns) of two cells of a height × width grid, cells numbered row by row.

    The table of a Swin window: (2 height - 1)(2 width - 1) rows. Source: Liu et al. 2021 (arXiv 2103.14030).

    >>> GridBuckets(2, 2).index(torch.tensor([[0], [3]]), torch.tensor([[0, 3]]))
    tensor([[4, 0],
            [8, 4]])
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1:
            raise ValueError(f"{self!r}: expected a grid of 1 × 1 or more.")

    def shape_error(self, frame: Frame) -> str | None:
        cells = self.height * self.width
        for name, x in (("queries", frame.positions.q), ("keys", frame.positions.k)):
            if x.numel() and not data_unavailable(x) and bool(((x < 0) | (x >= cells)).any()):
                return f"the {name} stand at {int(x.min())} to {int(x.max())}; {self!r} has the cells 0 to {cells - 1}."
        return None

    @property
    def count(self) -> int:
        return (2 * self.height - 1) * (2 * self.width - 1)

    def place(self, at: Tensor) -> Tensor:
        return at // self.width * (2 * self.width - 1) + at % self.width

    def between(self, ahead: Tensor) -> Tensor:
        return ahead + self.farthest

    @property
    def farthest(self) -> int:
        return self.count // 2


def missing_rows(buckets: Buckets, rows: Tensor) -> str | None:
    """Which rows these buckets return that no table of theirs has, as a clause; None: none, or nobody can read them."""
    if not rows.numel() or watched() or data_unavailable(rows):
        return None
    least, most = (int(row) for row in rows.aminmax())
    if least >= 0 and most < buckets.count:
        return None
    return f"{buckets!r} returns rows {least} to {most}; its table has the rows 0 to {buckets.count - 1}"


def _logarithmic(distance: Tensor, size: int, reach: int) -> Tensor:
    """T5's scale: distances below size / 2 exactly, then logarithmic up to reach, and one bucket beyond."""
    exact = size // 2
    ratio = distance.clamp(min=1).float().div(exact).log() / math.log(reach / exact)
    far = exact + (ratio * (size - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=size - 1))
