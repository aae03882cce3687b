"""The modifiers that the native kernels have, and a score's stages after its similarity as their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.backends.native.modifiers.base import KernelModifier
from regard.backends.native.modifiers.biases import Biases
from regard.backends.native.modifiers.log_distance import LogDistances
from regard.backends.native.modifiers.offsets import Offsets
from regard.backends.native.modifiers.slopes import Slopes
from regard.backends.native.modifiers.soft_cap import SoftCaps
from regard.backends.native.modifiers.temperature import Temperatures
from regard.core.problem import Problem

# To add a modifier: its file in this folder, and its name here.
MODIFIERS: tuple[type[KernelModifier[Any]], ...] = (SoftCaps, Temperatures, Slopes, LogDistances, Offsets, Biases)

BY_STAGE: dict[type, type[KernelModifier[Any]]] = {modifier.stage: modifier for modifier in MODIFIERS}
BY_LEARNED = {own.name: modifier for modifier in MODIFIERS for own in modifier.operands if own.learned}  # by operand


def why_not_modifiers(problem: Problem) -> str | None:
    """Why the kernels do not have the steps of a score after its similarity, as a clause; None if they have."""
    stages = problem.score.parts[1:]
    for modifier in MODIFIERS:
        own = [stage for stage in stages if type(stage) is modifier.stage]
        for stage in own:
            why = modifier.why_not(problem, stage)
            if why is not None:
                return why
        if len(own) > 1 and not modifier.repeats:
            return f"it takes one {modifier.stage.__name__}"
    unknown = [stage for stage in stages if type(stage) not in BY_STAGE]
    return f"it has no step {unknown[0]!r}" if unknown else None


def why_not_learned(problem: Problem, needs: Sequence[bool]) -> str | None:
    """Which number of a score has a gradient that the kernels do not find, as a clause; None if there is none."""
    wanted = iter(needs[3:])
    for stage in problem.score.parts:
        asked = [next(wanted) for _ in stage.tensors()]
        modifier = BY_STAGE.get(type(stage))
        why = None if modifier is None else modifier.why_not_learned(asked)
        if why is not None:
            return why
    return None


def lower_modifiers(problem: Problem) -> dict[str, Any]:
    """The operands of the steps after the similarity, by their names in KernelArgs."""
    stages = problem.score.parts[1:]
    operands: dict[str, Any] = {}
    for modifier in MODIFIERS:
        own = [stage for stage in stages if type(stage) is modifier.stage]
        if own:
            operands |= modifier.lower(problem, own)
    return operands
