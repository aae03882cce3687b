"""The modifiers that the native kernels have, and a score's stages after its similarity as their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from regard.backends.native.modifiers.base import KernelModifier
from regard.backends.native.modifiers.biases import Biases
from regard.backends.native.modifiers.log_distance import LogDistances
from regard.backends.native.modifiers.offsets import Offsets
from regard.backends.native.modifiers.program import Programs
from regard.backends.native.modifiers.slopes import Slopes
from regard.backends.native.modifiers.soft_cap import SoftCaps
from regard.backends.native.modifiers.temperature import Temperatures
from regard.core.problem import Problem
from regard.scores.algebra import Modifier

# To add a modifier: its file in this folder, and its name here.
MODIFIERS: tuple[type[KernelModifier[Any]], ...] = (
    SoftCaps,
    Temperatures,
    Slopes,
    LogDistances,
    Offsets,
    Biases,
    Programs,
)

BY_STAGE: dict[type, type[KernelModifier[Any]]] = {modifier.stage: modifier for modifier in MODIFIERS}
BY_LEARNED = {own.name: modifier for modifier in MODIFIERS for own in modifier.operands if own.learned}  # by operand


def why_not_modifiers(problem: Problem) -> str | None:
    """Why the kernels do not have the steps of a score after its similarity, as a clause; None if they have."""
    stages = problem.score.parts[1:]
    if (unknown := _unknown(problem)) is not None:
        return Programs.why_not(problem, unknown)
    for modifier in MODIFIERS:
        own = [stage for stage in stages if type(stage) is modifier.stage]
        for stage in own:
            why = modifier.why_not(problem, stage)
            if why is not None:
                return why
        if len(own) > 1 and not modifier.repeats:
            return f"it takes one {modifier.stage.__name__}"
    return None


def _unknown(problem: Problem) -> Modifier | None:
    """The first modifier of a score that the kernels have no step for: then all of them are a program."""
    for stage in problem.score.parts[1:]:
        if type(stage) not in BY_STAGE:
            assert isinstance(stage, Modifier)
            return stage
    return None


def programmed(problem: Problem) -> bool:
    """Whether the modifiers of a score reach the kernels as a program."""
    return _unknown(problem) is not None


def why_not_learned(problem: Problem, needs: Sequence[bool]) -> str | None:
    """Which number of a score has a gradient that the kernels do not find, as a clause; None if there is none."""
    wanted = iter(needs[3:])
    if programmed(problem):
        of_similarity = len(problem.similarity.tensors())
        return Programs.why_not_learned(needs[3 + of_similarity : 3 + len(problem.score.tensors())])
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
    if programmed(problem):
        return Programs.lower(problem, cast("tuple[Modifier, ...]", stages))
    operands: dict[str, Any] = {}
    for modifier in MODIFIERS:
        own = [stage for stage in stages if type(stage) is modifier.stage]
        if own:
            operands |= modifier.lower(problem, own)
    return operands
