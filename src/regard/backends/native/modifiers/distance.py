"""Positions as the kernels read them, for the modifiers that ask how far apart they are, and for dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from regard.backends.native.modifiers.base import KernelModifier, by_head
from regard.call.problem import Problem
from regard.core.tracing import data_unavailable
from regard.scores.distance_penalty import DistancePenalty

P = TypeVar("P", bound=DistancePenalty)

MOST = 1 << 31  # keys, and distances, are 32-bit numbers inside a block


def near(problem: Problem) -> bool:
    """Whether all distances between positions are 32-bit numbers."""
    q, k = problem.frame.positions.q, problem.frame.positions.k
    if not q.numel() or not k.numel() or data_unavailable(q, k):
        return True
    return max(int(q.max()), int(k.max())) - min(int(q.min()), int(k.min())) < MOST


def why_not_near(problem: Problem) -> str | None:
    """Why the kernels cannot compute distances between positions, as a clause; None if they can."""
    return None if near(problem) else "positions lie 2^31 or more apart"


def place(problem: Problem) -> dict[str, Tensor]:
    """Where queries and keys stand, for slopes, log distances, masks that compare positions, and dropout."""
    at = problem.frame.positions
    return {"q_at": at.q.long().contiguous(), "k_at": at.k.long().contiguous()}


class DistancePenalties(KernelModifier[P]):
    """Penalties by the distance of positions, whose operands are numbers for each head: native/steps/distance.h."""

    @classmethod
    def why_not(cls, problem: Problem, stage: P) -> str | None:
        return why_not_near(problem)

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[P]) -> dict[str, Any]:
        (stage,) = stages
        return {name: by_head(getattr(stage, field)) for field, name in cls.learned().items()} | place(problem)
