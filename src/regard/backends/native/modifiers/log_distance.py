"""Log distances (KERPLE): native/steps/log_distance.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.backends.native.modifiers.base import KernelModifier, by_head, number_by_head
from regard.backends.native.modifiers.distance import place, why_not_near
from regard.call.problem import Problem
from regard.scores.modifiers import LogDistance


class LogDistances(KernelModifier[LogDistance]):
    """Weights times ln(1 + rates times distances)."""

    stage = LogDistance
    step, header = "LogDistance", "log_distance.h"
    operands = (
        number_by_head("log_distance_weights", "of ln(1 + rate · distance), which is subtracted", learned="weight"),
        number_by_head("log_distance_rates", "of the distance", learned="rate"),
    )

    @classmethod
    def why_not(cls, problem: Problem, stage: LogDistance) -> str | None:
        return why_not_near(problem)

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[LogDistance]) -> dict[str, Any]:
        (stage,) = stages
        numbers = {"log_distance_weights": by_head(stage.weight), "log_distance_rates": by_head(stage.rate)}
        return {**numbers, **place(problem)}
