"""The soft cap: native/steps/softcap.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard.backends.native.modifiers.base import KernelModifier, by_head, number_by_head
from regard.backends.native.operands import KernelNumber
from regard.call.problem import Problem
from regard.scores.modifiers import SoftCap

_LEAST = 2.0**-100


class SoftCaps(KernelModifier[SoftCap]):
    """Soft caps: before all other modifiers, or after them."""

    stage = SoftCap
    step, last_step, header = "SoftCap", "LastSoftCap", "softcap.h"
    operands = (number_by_head("caps", "a cap for each head; then the number `cap` says only that there are some"),)
    numbers = (
        KernelNumber("cap", "float", "float", 0.0, "soft cap, 0 for none"),
        KernelNumber("cap_last", "int32_t", "bool", False, "whether it comes after the other modifiers, not before"),
    )

    @classmethod
    def why_not(cls, problem: Problem, stage: SoftCap) -> str | None:
        if not isinstance(stage.cap, Tensor) and not _LEAST <= stage.cap <= 1 / _LEAST:
            return f"a soft cap of {stage.cap:g}; it has those from {_LEAST:.1g} to {1 / _LEAST:.1g}"
        between = (type(part) for part in problem.score.parts[2:-1])
        return "its soft cap comes first or last" if SoftCap in between else None

    @classmethod
    def why_not_learned(cls, asked: Sequence[bool]) -> str | None:
        return "its soft cap is learned" if any(asked) else None

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[SoftCap]) -> dict[str, Any]:
        (stage,) = stages
        last = problem.score.parts[1] is not stage
        if not isinstance(stage.cap, Tensor):
            return {"cap": float(stage.cap), "cap_last": last}
        return {"cap": 1.0, "cap_last": last, "caps": by_head(stage.cap)}
