"""The modifiers that the native kernels have, and a score's stages after its similarity as their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from regard.backends.native.modifiers.base import KernelModifier
from regard.backends.native.modifiers.biases import Biases
from regard.backends.native.modifiers.clamp import Clamps
from regard.backends.native.modifiers.log_distance import LogDistances
from regard.backends.native.modifiers.offsets import RelativeOffsets
from regard.backends.native.modifiers.power_distance import PowerDistances
from regard.backends.native.modifiers.program import Programs, why_not_program_gradients
from regard.backends.native.modifiers.slopes import Slopes
from regard.backends.native.modifiers.soft_cap import SoftCaps
from regard.backends.native.modifiers.temperature import Temperatures
from regard.call.problem import Problem
from regard.scores.algebra import Modifier

# To add a modifier: its file in this folder, and its name here.
STEPS: tuple[type[KernelModifier[Any]], ...] = (
    SoftCaps,
    Temperatures,
    Clamps,
    Slopes,
    LogDistances,
    PowerDistances,
    RelativeOffsets,
    Biases,
)
MODIFIERS: tuple[type[KernelModifier[Any]], ...] = (*STEPS, Programs)

BY_STAGE: dict[type, type[KernelModifier[Any]]] = {modifier.stage: modifier for modifier in STEPS}
CHECKS = {own.name: one.check for one in MODIFIERS for own in one.operands}  # by operand
BY_LEARNED = {own.name: modifier for modifier in MODIFIERS for own in modifier.operands if own.learned}  # by operand


def programmed(problem: Problem) -> bool:
    """Whether the modifiers of a score reach the kernels as a program: one of them is not regard's own."""
    return any(has_no_step(stage) for stage in problem.score.parts[1:])


def has_no_step(stage: object) -> TypeGuard[Modifier]:
    """Whether a stage of a score is a modifier that a person wrote."""
    return isinstance(stage, Modifier) and type(stage) not in BY_STAGE


def _served(problem: Problem) -> list[tuple[type[KernelModifier[Any]], list[Any]]]:
    """The modifiers that serve a score's stages after its similarity, each with those that it serves."""
    stages = list(problem.score.parts[1:])
    if not stages:
        return []
    if programmed(problem):
        return [(Programs, stages)]
    own: dict[type[KernelModifier[Any]], list[Any]] = {}
    for stage in stages:
        own.setdefault(BY_STAGE[type(stage)], []).append(stage)
    return [(modifier, own[modifier]) for modifier in STEPS if modifier in own]


def why_not_modifiers(problem: Problem) -> str | None:
    """Why the kernels do not have the steps of a score after its similarity, as a clause; None if they have."""
    for modifier, own in _served(problem):
        for stage in own:
            why = modifier.why_not(problem, stage)
            if why is not None:
                return why
        if len(own) > 1 and not modifier.repeats:
            return f"it takes one {modifier.stage.__name__}"
    return None


def measures_positions(problem: Problem) -> bool:
    """Whether a modifier of a score needs positions that lie near each other: see distance.near."""
    return any(modifier.measures_positions(stage) for modifier, own in _served(problem) for stage in own)


def why_not_learned(problem: Problem, needs: Sequence[bool]) -> str | None:
    """Which number of a score has a gradient that the kernels do not find, as a clause; None if there is none."""
    if programmed(problem):
        return why_not_program_gradients(problem, any(needs[:2]), needs_of_modifiers(problem, needs))
    wanted = iter(needs[3:])
    for stage in problem.score.parts:
        asked = [next(wanted) for _ in stage.tensors()]
        modifier = BY_STAGE.get(type(stage))
        why = None if modifier is None else modifier.why_not_learned(asked)
        if why is not None:
            return why
    return None


def needs_of_modifiers(problem: Problem, needs: Sequence[bool]) -> Sequence[bool]:
    """Those of `needs`, of problem.tensors(), that are about the tensors of the score's modifiers."""
    first, *rest = (len(stage.tensors()) for stage in problem.score.parts)
    return needs[3 + first : 3 + first + sum(rest)]


def lower_modifiers(problem: Problem) -> dict[str, Any]:
    """The operands and numbers of the steps after the similarity, by name."""
    operands: dict[str, Any] = {}
    for modifier, own in _served(problem):
        operands |= modifier.lower(problem, own)
    return operands
