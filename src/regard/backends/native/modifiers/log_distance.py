"""Log distances (KERPLE): native/steps/log_distance.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from regard.backends.native.c_structs import Member, members
from regard.backends.native.modifiers.base import KernelModifier, by_head
from regard.backends.native.modifiers.distance import place, why_not_near
from regard.core.problem import Problem
from regard.scores.modifiers import LogDistance


@dataclass(frozen=True, eq=False, kw_only=True)
class LogDistanceOperands:
    """log_distance_weights, log_distance_rates: float32 (h,) or (1,), LogDistance.weight and LogDistance.rate."""

    log_distance_weights: Tensor | None = None
    log_distance_rates: Tensor | None = None


class LogDistances(KernelModifier[LogDistance]):
    """Weights times ln(1 + rates times distances)."""

    stage = LogDistance
    operands = LogDistanceOperands
    members = (
        Member("const float*", "log_distance_weights", "(heads,), with log_distance_rates, of a logarithmic penalty"),
        Member("const float*", "log_distance_rates", "(heads,)"),
        *members("int64_t", "log_distance_weights_stride log_distance_rates_stride"),
    )
    gradients = (
        Member("float*", "dlog_distance_weights", "(heads,), written"),
        Member("float*", "dlog_distance_rates", "(heads,), written"),
    )
    learned: ClassVar[Mapping[str, str]] = {"weight": "log_distance_weights", "rate": "log_distance_rates"}
    leaves = ("log_distance_weights", "log_distance_rates")

    @classmethod
    def why_not(cls, problem: Problem, stage: LogDistance) -> str | None:
        return why_not_near(problem)

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[LogDistance]) -> dict[str, Any]:
        (stage,) = stages
        numbers = {"log_distance_weights": by_head(stage.weight), "log_distance_rates": by_head(stage.rate)}
        return {**numbers, **place(problem)}

    @classmethod
    def shapes(cls, shape: tuple[int, ...], names: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(cls.leaves, (shape[-3],))
