"""The clamp: native/steps/clamp.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.backends.native.modifiers.base import KernelModifier
from regard.backends.native.operands import KernelNumber
from regard.call.problem import Problem
from regard.scores.clamp import Clamp
from regard.scores.modifiers import SoftCap
from regard.scores.temperature import Temperature


class Clamps(KernelModifier[Clamp]):
    """Clamps: before all modifiers that add to the score, after a soft cap or a temperature."""

    stage = Clamp
    step, header = "Clamp", "clamp.h"
    numbers = (
        KernelNumber("clamp_low", "float", "float", 0.0, "natural; no score is below it, if it is below clamp_high"),
        KernelNumber("clamp_high", "float", "float", 0.0, "natural; no score is above it, if it is above clamp_low"),
    )

    @classmethod
    def why_not(cls, problem: Problem, stage: Clamp) -> str | None:
        kinds = [type(part) for part in problem.score.parts[1:]]
        added = any(kind not in (SoftCap, Temperature) for kind in kinds[: kinds.index(Clamp)])
        return "its clamp comes before what is added to the scores" if added else None

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[Clamp]) -> dict[str, Any]:
        (stage,) = stages
        return {"clamp_low": stage.low, "clamp_high": stage.high}
