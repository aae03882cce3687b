"""The temperature: native/steps/temperature.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from regard.backends.native.c_structs import Member
from regard.backends.native.modifiers.base import KernelModifier, by_head
from regard.core.problem import Problem
from regard.scores.modifiers import SoftCap
from regard.scores.temperature import Temperature


@dataclass(frozen=True, eq=False, kw_only=True)
class TemperatureOperands:
    """temperatures: float32 (h,) or (1,), what scores are divided by."""

    temperatures: Tensor | None = None


class Temperatures(KernelModifier[Temperature]):
    """Temperatures: before all modifiers that add to the score, after a soft cap at the beginning."""

    stage = Temperature
    operands = TemperatureOperands
    members = (
        Member("const float*", "temperatures", "(heads,), what scores are divided by"),
        Member("int64_t", "temperatures_stride"),
    )
    gradients = (Member("float*", "dtemperatures", "(heads,), written"),)
    learned: ClassVar[Mapping[str, str]] = {"t": "temperatures"}
    leaves = ("temperatures",)

    @classmethod
    def why_not(cls, problem: Problem, stage: Temperature) -> str | None:
        first, *rest = problem.score.parts[1:]
        first = rest[0] if type(first) is SoftCap else first
        return None if first is stage else "its temperature comes before what is added to the scores"

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[Temperature]) -> dict[str, Any]:
        (stage,) = stages
        return {"temperatures": by_head(stage.t)}

    @classmethod
    def shapes(cls, shape: tuple[int, ...], names: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"temperatures": (shape[-3],)}
