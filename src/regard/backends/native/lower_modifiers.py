"""Modifiers as the native kernels read them: soft caps, slopes, points, log distances, biases, tables of offsets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.abi import DIMS
from regard.backends.native.ffi import DTYPE_CODES
from regard.backends.native.lower_mask import full
from regard.core.problem import Problem
from regard.core.tracing import data_unavailable
from regard.scores.algebra import Score, finite_in, plus
from regard.scores.buckets import Buckets, DifferenceBuckets
from regard.scores.modifiers import Alibi, Bias, LogDistance, RelativeBias, SoftCap

MOST = 1 << 31  # keys, and distances, are 32-bit numbers inside a block
ROOM = 64  # floats behind a table of offsets: the kernels load whole blocks
_WIDE = 16  # differences of places, for each query and key, that a table of offsets may hold


def why_not_modifiers(problem: Problem) -> str | None:
    """Why the kernels do not have the steps of a score after its similarity, as a clause; None if they have."""
    stages = problem.score.parts[1:]
    kinds = [type(stage) for stage in stages]
    if SoftCap in kinds[1:-1]:
        return "its soft cap comes first or last"
    twice = next((kind for n, kind in enumerate(kinds) if kind in kinds[:n] and kind is not Bias), None)
    if twice is not None:
        return f"it takes one {twice.__name__}"
    found = (_why_not_modifier(stage, problem) for stage in stages)
    return next((why for why in found if why is not None), None) or _why_not_sum(problem)


def _why_not_sum(problem: Problem) -> str | None:
    biases = _biases(problem)
    if not biases:
        return None
    total = torch.broadcast_shapes(*(b.shape for b in biases))
    held = any(b.shape == total for b in biases)
    return None if held else "the sum of its biases would be larger than each of them"


def _why_not_modifier(stage: Score, problem: Problem) -> str | None:
    # by type, not isinstance: a subclass may mean something else
    if type(stage) in (Bias, SoftCap):
        return None
    if type(stage) is RelativeBias:
        return _why_not_buckets(stage.buckets, problem)
    if type(stage) not in (Alibi, LogDistance):
        return f"it has no step {stage!r}"
    if not isinstance(stage, Alibi) or stage.coordinates is None:
        return None if near(problem) else "positions lie 2^31 or more apart"
    dims = stage.coordinates.shape[1]
    return None if dims <= DIMS else f"its points have up to {DIMS} coordinates, not {dims}"


def _why_not_buckets(buckets: Buckets, problem: Problem) -> str | None:
    if not isinstance(buckets, DifferenceBuckets) or type(buckets).index is not DifferenceBuckets.index:
        return f"its relative biases depend on a difference alone (DifferenceBuckets), not on {buckets!r}"
    if 0 in problem.frame.shape or buckets.farthest is not None or _by_index(problem, buckets):
        return None
    if data_unavailable(problem.frame.positions.q, problem.frame.positions.k):
        return "its relative biases need positions that count up by one, or that it may look at"
    least, most = _differences(problem, buckets)
    many = most - least + 1 > _WIDE * (problem.frame.nq + problem.frame.nk)
    return "positions lie too far apart for a table of what is between" if many else None


def near(problem: Problem) -> bool:
    """Whether all distances between positions are 32-bit numbers."""
    q, k = problem.frame.positions.q, problem.frame.positions.k
    if not q.numel() or not k.numel() or data_unavailable(q, k):
        return True
    return max(int(q.max()), int(k.max())) - min(int(q.min()), int(k.min())) < MOST


def lower_modifiers(problem: Problem) -> dict[str, Any]:
    """The operands of the steps after the similarity, by their names in KernelArgs."""
    stages = problem.score.parts[1:]
    operands: dict[str, Any] = {}
    for n, stage in enumerate(stages):
        if isinstance(stage, SoftCap):
            operands |= _cap(stage.cap, last=n > 0)
        elif isinstance(stage, Alibi):
            operands |= {"slopes": _by_head(stage.slopes)}
            operands |= place(problem) if stage.coordinates is None else _points(stage)
        elif isinstance(stage, LogDistance):
            operands |= {"log_distance_weights": _by_head(stage.weight), "log_distance_rates": _by_head(stage.rate)}
            operands |= place(problem)
        elif isinstance(stage, RelativeBias):
            table = relative_table(problem, stage.buckets)
            offsets = finite_in(stage.table, torch.float32)[table.buckets].T.contiguous()
            operands |= {"offsets": torch.nn.functional.pad(offsets, (0, ROOM)), **table.cells}
    biases = _biases(problem)
    if len(biases) > 1:
        operands["bias"] = reduce(plus, (finite_in(b, torch.float32) for b in biases))
    elif biases:
        operands["bias"] = biases[0] if biases[0].dtype in DTYPE_CODES else finite_in(biases[0], torch.float32)
    return operands


def _cap(cap: float | Tensor, last: bool) -> dict[str, Any]:
    if not isinstance(cap, Tensor):
        return {"cap": float(cap), "cap_last": last}
    return {"cap": 1.0, "cap_last": last, "caps": _by_head(cap)}


def _by_head(x: float | Tensor) -> Tensor:
    """A number for each head, float32 (h,), or (1,) where they share it."""
    return torch.as_tensor(x).float().reshape(-1).contiguous()


def _points(stage: Alibi) -> dict[str, Tensor]:
    k = stage.coordinates
    q = k if stage.query_coordinates is None else stage.query_coordinates
    assert q is not None and k is not None
    if torch.float64 in (q.dtype, k.dtype):
        # only differences count: float32 would lose them where the points lie far from 0
        centre = k.masked_fill(~k.isfinite(), 0).double().mean(0).nan_to_num(0, 0, 0)
        q, k = q - centre, k - centre
    return {"points_of_q": q.float().T.contiguous(), "points_of_k": k.float().T.contiguous()}


def _biases(problem: Problem) -> list[Tensor]:
    """The biases with an axis of heads at least."""
    return [full(problem.frame.lift(stage.bias)) for stage in problem.score.parts if isinstance(stage, Bias)]


@dataclass(frozen=True, eq=False)
class Table:
    """What a table of offsets holds: the bucket of each difference of cells, and the cells, if they are no indices."""

    buckets: Tensor
    cells: dict[str, Tensor]


def relative_table(problem: Problem, buckets: Buckets) -> Table:
    """The table of a call's relative positions, from the least difference on."""
    assert isinstance(buckets, DifferenceBuckets)
    frame, at = problem.frame, problem.frame.positions
    if 0 in frame.shape:  # no pairs, and maybe no positions of which one is the least
        return Table(torch.zeros(0, dtype=torch.int64), {})
    if buckets.farthest is None and _by_index(problem, buckets):
        ahead = torch.arange(frame.nq + frame.nk - 1) - (frame.nk - 1)
        return Table(buckets.between(ahead + at.q[..., :1] - at.k[..., :1]), {})
    least, most = _differences(problem, buckets)
    q, k = buckets.place(at.q), buckets.place(at.k)
    # what is added to both keeps differences, and makes those of cells indices of the table
    first = 0 if buckets.farthest is not None else int(k.min())
    cells = {"q_cell": (q - first - least).int().contiguous(), "k_cell": (k - first).int().contiguous()}
    return Table(buckets.between(torch.arange(least, most + 1)), cells)


def _by_index(problem: Problem, buckets: DifferenceBuckets) -> bool:
    """Whether the difference of two indices tells that of the places."""
    own = type(buckets).place is not DifferenceBuckets.place
    return problem.frame.positions.consecutive and not own


def _differences(problem: Problem, buckets: DifferenceBuckets) -> tuple[int, int]:
    """The least and the largest difference of a query's place and a key's."""
    if buckets.farthest is not None:
        return -buckets.farthest, buckets.farthest
    q, k = buckets.place(problem.frame.positions.q), buckets.place(problem.frame.positions.k)
    return int(q.min()) - int(k.max()), int(q.max()) - int(k.min())


def place(problem: Problem) -> dict[str, Tensor]:
    """Where queries and keys stand, for slopes, log distances and dropout."""
    at = problem.frame.positions
    return {"q_at": at.q.long().contiguous(), "k_at": at.k.long().contiguous()}
