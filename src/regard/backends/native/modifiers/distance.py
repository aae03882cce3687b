"""Distances of positions: where the kernels read them, how far they reach, and the penalties by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from regard.backends.native.modifiers.base import KernelModifier, S, by_head
from regard.backends.native.operands import Sizes
from regard.call.problem import Problem
from regard.core.positions import Positions
from regard.core.tracing import data_unavailable
from regard.scores.distance_penalty import DistancePenalty

P = TypeVar("P", bound=DistancePenalty)

MOST = 1 << 31  # keys, and distances, are 32-bit numbers inside a block
NOT_NEAR = "positions lie 2^31 or more apart"


def near(positions: Positions) -> bool:
    """Whether all distances between positions are 32-bit numbers; True where nobody can read them yet."""
    return _near(positions.q, positions.k)


def _near(q: Tensor, k: Tensor) -> bool:
    if not q.numel() or not k.numel() or data_unavailable(q, k):
        return True
    bounds = [int(bound) for t in (q, k) for bound in t.aminmax()]
    return max(bounds) - min(bounds) < MOST


def position_operands(positions: Positions) -> dict[str, Tensor]:
    """Where queries and keys stand, for slopes, log distances, masks that compare positions, and dropout."""
    return {"q_at": positions.q.long().contiguous(), "k_at": positions.k.long().contiguous()}


class MeasuringModifier(KernelModifier[S]):
    """Modifiers that compute distances between positions, as 32-bit numbers: native/steps/distance.h."""

    @classmethod
    def measures_positions(cls, stage: S) -> bool:
        return True

    @classmethod
    def why_not(cls, problem: Problem, stage: S) -> str | None:
        return None if not cls.measures_positions(stage) or near(problem.frame.positions) else NOT_NEAR

    @classmethod
    def check(cls, operands: Mapping[str, Tensor], sizes: Sizes) -> None:
        """Raises ValueError for positions that `why_not` could not read, as in a graph: their distances would wrap."""
        q, k = operands.get("q_at"), operands.get("k_at")
        if q is not None and k is not None and not _near(q, k):
            raise ValueError(
                f"{NOT_NEAR}, and {cls.stage.__name__} measures their distances as 32-bit numbers in the kernels of a "
                "graph. Pass backend=Tiled(), which has 64 bits, or positions that lie nearer to each other."
            )


class DistancePenalties(MeasuringModifier[P]):
    """Penalties by the distance of positions, whose operands are numbers for each head."""

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[P]) -> dict[str, Any]:
        (stage,) = stages
        learned = {name: by_head(getattr(stage, field)) for field, name in cls.learned().items()}
        return {**learned, **position_operands(problem.frame.positions)}
