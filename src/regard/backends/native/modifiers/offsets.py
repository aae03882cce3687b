"""Offsets of relative positions, a table of them a head: native/steps/offsets.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.backends.native.modifiers.base import KernelModifier
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
from regard.scores.algebra import finite_in
from regard.scores.buckets import Buckets, DifferenceBuckets
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
        buckets = stage.buckets
        if not isinstance(buckets, DifferenceBuckets) or type(buckets).index is not DifferenceBuckets.index:
            return f"its relative biases depend on a difference alone (DifferenceBuckets), not on {buckets!r}"
        if 0 in problem.frame.shape or buckets.farthest is not None or _by_index(problem, buckets):
            return None
        if data_unavailable(problem.frame.positions.q, problem.frame.positions.k):
            return "its relative biases need positions that count up by one, or that it may look at"
        least, most = _differences(problem, buckets)
        many = most - least + 1 > _WIDE * (problem.frame.nq + problem.frame.nk)
        return "positions lie too far apart for a table of what is between" if many else None

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[RelativeBias]) -> dict[str, Any]:
        (stage,) = stages
        table = _relative_table(problem, stage.buckets)
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
        table, index = g.new_zeros(stage.table.shape), _relative_table(problem, stage.buckets).buckets
        return table.index_add_(0, index, g.T.contiguous())


class RepeatedOffsets:
    """The table of a problem's relative bias for other calls of its structure and length: with their numbers.

    names    of the operands that are made anew
    tensors  which of the leaves of a call is the table
    lasts    whether there are other calls that it serves
    differentiable  whether it finds the gradient of the table
    """

    differentiable: ClassVar[bool] = False

    def __init__(self, problem: Problem) -> None:
        parts = problem.score.parts
        at = next(n for n, stage in enumerate(parts) if isinstance(stage, RelativeBias))
        first = sum(len(stage.tensors()) for stage in parts[:at])
        stage = parts[at]
        assert isinstance(stage, RelativeBias)
        self.names, self.tensors, self.lasts = ("offsets",), range(first, first + 1), len(stage.tensors()) == 1
        self._buckets = _relative_table(problem, stage.buckets).buckets

    def operands(self, frame: Frame, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
        """The operands of a call."""
        return {"offsets": _offsets(leaves[self.tensors[0]].detach(), self._buckets)}


def _offsets(table: Tensor, buckets: Tensor) -> Tensor:
    """The numbers of these buckets a head, and the room behind them."""
    return torch.nn.functional.pad(finite_in(table, torch.float32)[buckets].T.contiguous(), (0, ROOM))


@dataclass(frozen=True, eq=False)
class _Table:
    """What a table of offsets holds: the bucket of each difference of cells, and the cells, if they are no indices."""

    buckets: Tensor
    cells: dict[str, Tensor]


def _relative_table(problem: Problem, buckets: Buckets) -> _Table:
    """The table of a call's relative positions, from the least difference on."""
    assert isinstance(buckets, DifferenceBuckets)
    frame, at = problem.frame, problem.frame.positions
    if 0 in frame.shape:  # no pairs, and maybe no positions of which one is the least
        return _Table(torch.zeros(0, dtype=torch.int64, device="cpu"), {})
    if buckets.farthest is None and _by_index(problem, buckets):
        ahead = torch.arange(frame.nq + frame.nk - 1, dtype=torch.int64, device="cpu") - (frame.nk - 1)
        return _Table(buckets.between(ahead + at.q[..., :1] - at.k[..., :1]), {})
    least, most = _differences(problem, buckets)
    q, k = buckets.place(at.q), buckets.place(at.k)
    # what is added to both keeps differences, and makes those of cells indices of the table
    first = 0 if buckets.farthest is not None else int(k.min())
    cells = {"q_cell": (q - first - least).int().contiguous(), "k_cell": (k - first).int().contiguous()}
    return _Table(buckets.between(torch.arange(least, most + 1, dtype=torch.int64, device="cpu")), cells)


def _by_index(problem: Problem, buckets: DifferenceBuckets) -> bool:
    """Whether the difference of two indices is that of their positions."""
    own = type(buckets).place is not DifferenceBuckets.place
    return problem.frame.positions.consecutive and not own


def _differences(problem: Problem, buckets: DifferenceBuckets) -> tuple[int, int]:
    """The least and the largest difference of a query's place and a key's."""
    if buckets.farthest is not None:
        return -buckets.farthest, buckets.farthest
    q, k = buckets.place(problem.frame.positions.q), buckets.place(problem.frame.positions.k)
    return int(q.min()) - int(k.max()), int(q.max()) - int(k.min())
