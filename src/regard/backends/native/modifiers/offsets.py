"""Offsets of relative positions, a table of them a head: native/steps/offsets.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.modifiers.base import KernelModifier, RepeatedGradients, RepeatedModifiers, of_operand
from regard.backends.native.operands import (
    BATCH,
    EACH_KEY,
    EACH_QUERY,
    HEAD,
    Axis,
    Count,
    KernelOperand,
    Sizes,
)
from regard.call.problem import Problem
from regard.core.errors import ShapeError
from regard.core.region import Frame
from regard.core.tracing import data_unavailable
from regard.core.value import is_regards_own
from regard.scores.buckets import Buckets, DifferenceBuckets, missing_rows
from regard.scores.finite import finite_in
from regard.scores.modifiers import RelativeBias

ROOM = 64  # floats behind a table of offsets: the kernels load whole blocks
_WIDE = 16  # differences of places, for each query and key, that a table of offsets may hold


_DIFFERENCE = Axis("difference of cells, and room", lambda s: None, shared=False)
_CELLS = "added is offsets[q_cell[i] - k_cell[j]]; without cells those of query i and key j are i + nk - 1 and j"


def _count(offsets: Tensor) -> int:
    return offsets.shape[1] - ROOM


class RelativeOffsets(KernelModifier[RelativeBias]):
    """A table of offsets, with a number for each difference of positions."""

    stage = RelativeBias
    step, header = "Offsets", "offsets.h"
    operands = (
        KernelOperand(
            *("offsets", torch.float32, (HEAD, _DIFFERENCE), "what is added for a difference of cells"),
            of_lengths=True,
            of_positions=True,
            learned="table",
            count=Count("offsets_count", _count),
        ),
        KernelOperand(
            *("q_cell", torch.int32, (BATCH, EACH_QUERY), _CELLS),
            of_lengths=True,
            of_positions=True,
        ),
        KernelOperand("k_cell", torch.int32, (BATCH, EACH_KEY), _CELLS, of_lengths=True, of_positions=True),
    )

    @classmethod
    def why_not(cls, problem: Problem, stage: RelativeBias) -> str | None:
        return _why_no_table(problem.frame, stage.buckets)

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[RelativeBias]) -> dict[str, Any]:
        (stage,) = stages
        table = _relative_table(problem.frame, stage.buckets)
        return {"offsets": _offsets(stage.table, table.buckets), **table.cells}

    @classmethod
    def check(cls, operands: Mapping[str, Tensor], sizes: Sizes) -> None:
        """Raises ValueError where the table does not reach: nothing else would stop a read beside it."""
        offsets, q, k = (operands.get(name) for name in ("offsets", "q_cell", "k_cell"))
        if offsets is None:
            return
        if q is None or k is None:
            count, needed = _count(offsets), max(sizes.nq + sizes.nk - 1, 0)
            if count != needed:
                raise ShapeError(
                    f"The table of a relative bias holds {count} differences of positions; {sizes.nq} queries and "
                    f"{sizes.nk} keys have {needed}."
                )
        elif q.numel() and k.numel():
            least, most, count = int(q.min()) - int(k.max()), int(q.max()) - int(k.min()), _count(offsets)
            if least < 0 or most >= count:
                reach = count // 2
                raise ValueError(
                    f"The places of queries and keys differ by {least - reach} to {most - reach}; the buckets of the "
                    f"relative bias say that they differ by {reach} at most (DifferenceBuckets.farthest)."
                )

    @classmethod
    def empty_gradient(cls, name: str, operand: Tensor, heads: int) -> Tensor:
        return torch.zeros(heads, _count(operand), dtype=torch.float32, device="cpu")

    @classmethod
    def stage_gradient(cls, problem: Problem, t: Tensor, g: Tensor) -> Tensor:
        stage = next(stage for stage in problem.score.parts if isinstance(stage, RelativeBias))
        return _added(g, _relative_table(problem.frame, stage.buckets).buckets, stage.table)


class RepeatedOffsets(RepeatedModifiers):
    """The table of a problem's relative bias for other calls of its structure: with their lengths and positions."""

    def __init__(self, problem: Problem) -> None:
        parts = problem.score.parts
        at = next(n for n, stage in enumerate(parts) if isinstance(stage, RelativeBias))
        first = sum(len(stage.tensors()) for stage in parts[:at])
        stage = parts[at]
        assert isinstance(stage, RelativeBias)
        self.names = tuple(operand.name for operand in RelativeOffsets.operands)
        self.tensors, self.lasts = range(first, first + 1), len(stage.tensors()) == 1
        self._buckets = stage.buckets
        self._last: tuple[object, _Table | None] = None, None

    def operands(self, frame: Frame, leaves: Sequence[Tensor]) -> dict[str, Tensor] | None:
        table = self._table(frame)
        if table is None:
            return None
        return {"offsets": _offsets(leaves[self.tensors[0]].detach(), table.buckets), **table.cells}

    def gradients(self, frame: Frame, leaves: Sequence[Tensor], wanted: Sequence[bool]) -> OffsetGradients | None:
        table = self._table(frame)
        return None if table is None else OffsetGradients(leaves[self.tensors[0]].detach(), table, frame.heads, *wanted)

    def _table(self, frame: Frame) -> _Table | None:
        """The table of a call; None where the kernels have none, and a call without a plan says why.

        The layers of a model have the same positions at each step: the last table is kept.
        """
        span = frame.positions.span
        known, last = self._last
        if span is not None and known == span[:2]:
            return last
        if self._buckets.shape_error(frame) is not None or _why_no_table(frame, self._buckets) is not None:
            return None
        found = _relative_table(frame, self._buckets)
        if span is not None:
            self._last = span[:2], found
        return found


class OffsetGradients(RepeatedGradients):
    """The gradient of a table of relative biases, if it is wanted."""

    def __init__(self, table: Tensor, found: _Table, heads: int, wanted: bool) -> None:
        self.operands = {"offsets": _offsets(table, found.buckets), **found.cells}
        self._table, self._buckets, self._heads, self._wanted = table, found.buckets, heads, wanted

    def empty(self) -> dict[str, Tensor]:
        offsets = self.operands["offsets"]
        return {"offsets": RelativeOffsets.empty_gradient("offsets", offsets, self._heads)} if self._wanted else {}

    def of_tensors(self, found: Mapping[str, Tensor]) -> list[Tensor]:
        if not self._wanted:
            return []
        return [_added(of_operand(found["offsets"], self.operands["offsets"]), self._buckets, self._table)]


def _offsets(table: Tensor, buckets: Tensor) -> Tensor:
    """The numbers of these buckets a head, and the room behind them."""
    return torch.nn.functional.pad(finite_in(table, torch.float32)[buckets].T.contiguous(), (0, ROOM))


def _added(g: Tensor, buckets: Tensor, table: Tensor) -> Tensor:
    """The gradient of a table, float32, from that of its offsets (heads or 1, differences)."""
    return g.new_zeros(table.shape).index_add_(0, buckets, g.T.contiguous())


@dataclass(frozen=True, eq=False)
class _Table:
    """What a table of offsets holds: the bucket of each difference of cells, and the cells, if they are no indices."""

    buckets: Tensor
    cells: dict[str, Tensor]


def _why_no_table(frame: Frame, buckets: Buckets) -> str | None:
    """Why there is no table of differences for the kernels, as a clause; None if there is one."""
    if not isinstance(buckets, DifferenceBuckets) or type(buckets).index is not DifferenceBuckets.index:
        return f"its relative biases depend on a difference alone (DifferenceBuckets), not on {buckets!r}"
    if 0 in frame.shape:
        return None
    if buckets.farthest is None and not _by_index(frame, buckets):
        if data_unavailable(frame.positions.q, frame.positions.k):
            return "its relative biases need positions that count up by one, or that it may look at"
        least, most = _differences(frame, buckets)
        if most - least + 1 > _WIDE * (frame.nq + frame.nk):
            return "positions lie too far apart for a table of what is between"
    # maybe for differences that no pair has: then Tiled, which reads the rows of pairs alone, can run the call
    return None if is_regards_own(type(buckets)) else missing_rows(buckets, _table_rows(frame, buckets))


def _relative_table(frame: Frame, buckets: Buckets) -> _Table:
    """The table of a call's relative positions, from the least difference on."""
    assert isinstance(buckets, DifferenceBuckets)
    at = frame.positions
    if 0 in frame.shape:  # no pairs, and maybe no positions of which one is the least
        return _Table(torch.zeros(0, dtype=torch.int64, device="cpu"), {})
    rows = _table_rows(frame, buckets)
    if buckets.farthest is None and _by_index(frame, buckets):
        return _Table(rows, {})
    least, _ = _differences(frame, buckets)
    q, k = buckets.place(at.q), buckets.place(at.k)
    # what is added to both keeps differences, and makes those of cells indices of the table, as int32
    first = int(k.min()) if buckets.farthest is None else k.flatten()[:1]  # which no graph need read
    cells = {"q_cell": (q - first - least).int().contiguous(), "k_cell": (k - first).int().contiguous()}
    return _Table(rows, cells)


def _table_rows(frame: Frame, buckets: DifferenceBuckets) -> Tensor:
    """The row of each difference that the table of a call holds."""
    if buckets.farthest is None and _by_index(frame, buckets):
        at = frame.positions
        ahead = torch.arange(frame.nq + frame.nk - 1, dtype=torch.int64, device="cpu") - (frame.nk - 1)
        return buckets.between(ahead + at.q[..., :1] - at.k[..., :1])
    least, most = _differences(frame, buckets)
    return buckets.between(torch.arange(least, most + 1, dtype=torch.int64, device="cpu"))


def _by_index(frame: Frame, buckets: DifferenceBuckets) -> bool:
    """Whether the difference of two indices is that of their positions."""
    own = type(buckets).place is not DifferenceBuckets.place
    return frame.positions.consecutive and not own


def _differences(frame: Frame, buckets: DifferenceBuckets) -> tuple[int, int]:
    """The least and the largest difference of a query's place and a key's."""
    if buckets.farthest is not None:
        return -buckets.farthest, buckets.farthest
    q, k = buckets.place(frame.positions.q), buckets.place(frame.positions.k)
    return int(q.min()) - int(k.max()), int(q.max()) - int(k.min())
