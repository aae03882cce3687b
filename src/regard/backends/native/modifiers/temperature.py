"""The temperature: native/steps/temperature.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.backends.native.modifiers.base import KernelModifier, by_head, number_by_head
from regard.call.problem import Problem
from regard.scores.modifiers import SoftCap
from regard.scores.temperature import Temperature


class Temperatures(KernelModifier[Temperature]):
    """Temperatures: before all modifiers that add to the score, after a soft cap at the beginning."""

    stage = Temperature
    step, header = "Temperature", "temperature.h"
    operands = (number_by_head("temperatures", "what scores are divided by", learned="t"),)

    @classmethod
    def why_not(cls, problem: Problem, stage: Temperature) -> str | None:
        first, *rest = problem.score.parts[1:]
        first = rest[0] if type(first) is SoftCap else first
        return None if first is stage else "its temperature comes before what is added to the scores"

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[Temperature]) -> dict[str, Any]:
        (stage,) = stages
        return {"temperatures": by_head(stage.t)}
