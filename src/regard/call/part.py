"""Which part of a whole call a call computes, some of its queries and keys or of its heads, and regions of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.region import Frame, Index, Indices, Region, Tiling, moved
from regard.masks.intervals import OF_KEYS, IntervalRule


class PartOfCall(ABC):
    """Which part of a whole call a call computes. No Value: its tensors are no operands."""

    @abstractmethod
    def frame(self, at: Frame) -> Frame:
        """That of the whole, from the part's; positions stay the part's."""

    @abstractmethod
    def region(self, at: Region) -> Region:
        """A region of the part, as one of the whole: its indices and the tensors that it places are the whole's."""

    @abstractmethod
    def tiling(self, at: Tiling) -> Tiling:
        """A tiling of the part that takes tensors of the whole."""

    @abstractmethod
    def of_pairs(self, t: Tensor, whole: Frame) -> Tensor:
        """The part of a tensor that broadcasts to the whole's (*batch, heads, nq, nk)."""

    def rule(self, rule: IntervalRule) -> IntervalRule | None:
        """The whole's rule for the part; None where there is none."""
        return None


@dataclass(frozen=True, eq=False)
class QueriesAndKeys(PartOfCall):
    """Some queries and keys of a whole call, by index.

    rows, cols  integers (r,) and (c,), increasing; rows None: all queries
    nq, nk      how many the whole has; None where that is not known
    """

    rows: Indices | None
    cols: Indices
    nq: int | None
    nk: int | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueriesAndKeys) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        """Tensors are equal where they are the same."""
        return (*(id(x) if isinstance(x, Tensor) else x for x in (self.rows, self.cols)), self.nq, self.nk)

    def frame(self, at: Frame) -> Frame:
        return replace(at, nq=at.nq if self.nq is None else self.nq, nk=at.nk if self.nk is None else self.nk)

    def region(self, at: Region) -> Region:
        ranges = not isinstance(self.rows, Tensor) and not isinstance(self.cols, Tensor)
        return _RegionOfRanges(at, self) if ranges else _RegionOfIndices(at, self)

    def tiling(self, at: Tiling) -> Tiling:
        return _TilingOfWhole(at, self)

    def rule(self, rule: IntervalRule) -> IntervalRule | None:
        """With the part's numbers of documents, and with lengths as counts of the part's own tokens."""
        lengths: dict[str, Tensor] = {}
        for name, count in rule.by_sequence().items():
            indices = self.cols if name in OF_KEYS else self.rows
            own = count if indices is None else _below(indices, count)
            if own is None:
                return None
            lengths[name] = own
        q_ids = None if rule.q_ids is None else self.of_queries(rule.q_ids)
        k_ids = None if rule.k_ids is None else self.of_keys(rule.k_ids)
        return rule._replace(**lengths, q_ids=q_ids, k_ids=k_ids)

    def of_queries(self, t: Tensor, axis: int = -1) -> Tensor:
        """What belongs to the part's queries, of a tensor with one entry a query along an axis."""
        return t if self.rows is None else select(t, self.rows, axis)

    def of_keys(self, t: Tensor, axis: int = -1) -> Tensor:
        """What belongs to the part's keys, of a tensor with one entry a key along an axis."""
        return select(t, self.cols, axis)

    def of_pairs(self, t: Tensor, whole: Frame) -> Tensor:
        if t.dim() and not (t.shape[-1] == 1 != whole.nk):
            t = self.of_keys(t)
        if t.dim() > 1 and not (t.shape[-2] == 1 != whole.nq):
            t = self.of_queries(t, -2)
        return t


def select(t: Tensor, indices: Indices, axis: int = -1) -> Tensor:
    """The entries with these indices along an axis: a view where the indices are a range."""
    if isinstance(indices, Tensor):
        return t.index_select(axis, indices.to(t.device))
    axis = axis % t.dim()
    return t[(slice(None),) * axis + (slice(indices.start, indices.stop, indices.step),)]


def _below(indices: Indices, count: Tensor) -> Tensor | None:
    """How many of the indices are less than `count`, (..,); None where these are not the first ones."""
    if isinstance(indices, range):
        return ((count - indices.start + indices.step - 1) // indices.step).clamp(0, len(indices))
    indices = indices.to(count.device)
    return torch.searchsorted(indices, count.long()) if bool((indices[1:] >= indices[:-1]).all()) else None


class RegionOfPart(Region):
    """A region of a part, as one of the whole, whose every answer is one of the part's region: see the subclasses.

    The rows of the part's region may be unknown: those of a modifier's region while it is traced.
    """

    def __init__(self, at: Region, part: PartOfCall) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.at, self.part = at, part

    @property
    def frame(self) -> Frame:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.part.frame(self.at.frame)

    @property
    def rows(self) -> Index:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.at.rows

    @property
    def cols(self) -> Index:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.at.cols

    @property
    def i(self) -> Tensor:
        return self.at.i

    @property
    def j(self) -> Tensor:
        return self.at.j

    @property
    def row(self) -> Tensor:
        return self.at.row

    @property
    def col(self) -> Tensor:
        return self.at.col

    @property
    def b(self) -> Tensor:
        return self.at.b

    @property
    def h(self) -> Tensor:
        return self.at.h

    def queries(self, t: Tensor) -> Tensor:
        return self.at.queries(t)

    def keys(self, t: Tensor) -> Tensor:
        return self.at.keys(t)

    def sequences(self, t: Tensor) -> Tensor:
        return self.at.sequences(t)

    def heads(self, t: Tensor) -> Tensor:
        return self.at.heads(t)

    def pairs(self, t: Tensor) -> Tensor:
        return self.at.pairs(t)


class _RegionOfRanges(RegionOfPart):
    """Where the part's queries and keys are ranges of the whole's: indices are computed, and tensors are narrowed."""

    def __init__(self, at: Region, part: QueriesAndKeys) -> None:
        super().__init__(at, part)
        self._some = part

    @property
    def rows(self) -> Index:
        some = self._some.rows
        return self.at.rows if some is None else moved(self.at.rows, some, self.at.frame.nq, self.at.frame.device)

    @property
    def cols(self) -> Index:
        return moved(self.at.cols, self._some.cols, self.at.frame.nk, self.at.frame.device)

    @property
    def row(self) -> Tensor:
        return _in_whole(self.at.row, self._some.rows)

    @property
    def col(self) -> Tensor:
        return _in_whole(self.at.col, self._some.cols)

    def queries(self, t: Tensor) -> Tensor:
        return self.at.queries(self._some.of_queries(t))

    def keys(self, t: Tensor) -> Tensor:
        return self.at.keys(self._some.of_keys(t))

    def pairs(self, t: Tensor) -> Tensor:
        return self.at.pairs(self._some.of_pairs(t, self.frame))


def _in_whole(index: Tensor, indices: Indices | None) -> Tensor:
    """Indices in a range, as those of the whole."""
    assert not isinstance(indices, Tensor)
    return index if indices is None else index * indices.step + indices.start


class _RegionOfIndices(RegionOfPart):
    """Where they are tensors: the whole's tensors are read at their indices, without a copy of the part."""

    def __init__(self, at: Region, part: QueriesAndKeys) -> None:
        super().__init__(at.in_whole(part.frame(at.frame), part.rows, part.cols), part)
        self._placed = at

    @property
    def i(self) -> Tensor:
        return self._placed.i

    @property
    def j(self) -> Tensor:
        return self._placed.j


class _TilingOfWhole(Tiling):
    """A tiling of a part that takes tensors of the whole."""

    def __init__(self, at: Tiling, part: QueriesAndKeys) -> None:
        super().__init__(at.frame, at.r, at.c)
        self._part = part

    @property
    def i(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return super().queries(self.frame.positions.q)

    @property
    def j(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return super().keys(self.frame.positions.k)

    @property
    def row(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.queries(torch.arange(self._part.frame(self.frame).nq, device=self.frame.device, dtype=torch.int64))

    @property
    def col(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.keys(torch.arange(self._part.frame(self.frame).nk, device=self.frame.device, dtype=torch.int64))

    def queries(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return super().queries(self._part.of_queries(t))

    def keys(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return super().keys(self._part.of_keys(t))

    def pairs(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return super().pairs(self._part.of_pairs(t, self._part.frame(self.frame)))
