"""Modifiers that a person wrote, as a program that the kernels interpret: native/steps/program.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from regard.backends.native.modifiers.base import KernelModifier, RepeatedGradients, RepeatedModifiers
from regard.backends.native.operands import ANY, INSTRUCTION, INSTRUCTION_WORDS, WORD, Count, KernelOperand
from regard.backends.native.programs.code import NotLowered
from regard.backends.native.programs.lower import Program, lower
from regard.backends.native.programs.of_problem import ProgramsOfProblems, described
from regard.backends.native.programs.operations import PROGRAM_OPERANDS
from regard.backends.native.programs.record import record_modifiers
from regard.backends.native.programs.structure import graph_of
from regard.backends.native.programs.text import RecordedModifier
from regard.call.problem import Problem
from regard.core.region import Frame
from regard.core.tracing import data_unavailable, functorch, graphed, scripted, symbolic, watched
from regard.scores.algebra import Modifier

OPERAND_NAMES = tuple(f"program_{n}" for n in range(PROGRAM_OPERANDS))


class Programs(KernelModifier[Modifier]):
    """All modifiers of a score, where one of them is not regard's own: a program takes the place of all steps."""

    stage = Modifier
    step, header = "Program", "program.h"
    repeats = True
    operands = (
        KernelOperand(
            *("program_code", torch.int32, (INSTRUCTION, WORD), "a program that modifies scores"),
            ragged=True,
            count=Count("program_count", len),
        ),
        *(
            KernelOperand(
                *(name, None, (ANY,), "what programs read: (batch, head, query, key), or a table"),
                strided=True,
                ragged=True,
                learned="tensors",
            )
            for name in OPERAND_NAMES
        ),
    )

    @classmethod
    def why_not(cls, problem: Problem, stage: Modifier) -> str | None:
        """Of all modifiers at once."""
        if in_graph(problem):
            recorded = recorded_modifiers(problem)
            return None if isinstance(recorded, RecordedModifier) else f"it records no modifiers in a graph: {recorded}"
        if data_unavailable(*problem.tensors()) or watched():
            return "a transform or a mode sees the call, whose modifiers it would run on these numbers alone"
        if 0 in problem.frame.shape:
            return None
        found = _program(problem)
        shown = " >> ".join(map(repr, problem.score.parts[1:]))
        return f"it has no step for {shown}: {found}" if isinstance(found, str) else None

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[Modifier]) -> dict[str, Any]:
        """In a graph the tensors of the modifiers, and a text of which the operator makes the program when it runs."""
        if in_graph(problem):
            recorded = recorded_modifiers(problem)
            assert isinstance(recorded, RecordedModifier), recorded
            return {"score_text": recorded.text, **dict(zip(OPERAND_NAMES, recorded.held, strict=False))}
        if 0 in problem.frame.shape:
            return {}
        program = _program(problem)
        assert isinstance(program, Program), program
        return _operands(program)

    @classmethod
    def empty_gradient(cls, name: str, operand: Tensor, heads: int) -> Tensor:
        """In float64 where an element may be the sum of many terms: of a table, or shared by queries or keys."""
        pairs = operand.dim() > 1 and 1 not in operand.shape[-2:]
        return torch.zeros(operand.shape, dtype=torch.float32 if pairs else torch.float64, device="cpu")


def in_graph(problem: Problem) -> bool:
    """Whether a call becomes a node of a graph, whose modifiers run when the graph does."""
    tensors = problem.tensors()
    return graphed(*tensors) and not (scripted() or functorch() or any(t.is_meta for t in tensors))


def recorded_modifiers(problem: Problem) -> RecordedModifier | str:
    """The modifiers of a call in a graph, or why they cannot be recorded, as a clause."""
    if any(not symbolic(n) and n == 0 for n in problem.frame.shape):
        return "there are no pairs"
    return record_modifiers(cast("tuple[Modifier, ...]", problem.score.parts[1:]), problem.frame)


def why_no_program_of_scores(problem: Problem) -> str | None:
    """Why the modifiers of a score, all together, are no program, as a clause; None where they are."""
    found = _program(problem)
    return found if isinstance(found, str) else None


def why_not_program_gradients(problem: Problem, of_scores: bool, wanted: Sequence[bool]) -> str | None:
    """Why the kernels cannot find gradients of scores, or of modifiers' tensors that are wanted, as a clause; None if
    they can.
    """
    if in_graph(problem) or not (of_scores or any(wanted)) or 0 in problem.frame.shape:
        return None
    found = _program(problem, tuple(wanted) if any(wanted) else ())
    return found if isinstance(found, str) else found.own_derivative


class ProgramGradients(RepeatedGradients):
    """The gradients of those of the modifiers' tensors that are wanted, and what the kernels read to find them."""

    def __init__(self, program: Program) -> None:
        self.program, self.operands = program, _operands(program)
        self.names = {OPERAND_NAMES[n]: n for n in program.learned}  # of operands that have gradients

    @staticmethod
    def of(problem: Problem, wanted: Sequence[bool]) -> ProgramGradients:
        program = _program(problem, tuple(wanted)) if 0 not in problem.frame.shape else _without_pairs(problem, wanted)
        assert isinstance(program, Program), program
        return ProgramGradients(program)

    def empty(self) -> dict[str, Tensor]:
        return {name: Programs.empty_gradient(name, self.operands[name], 0) for name in self.names}

    def of_tensors(self, found: Mapping[str, Tensor]) -> list[Tensor]:
        return self.program.gradients({n: found[name] for name, n in self.names.items()})


class RepeatedProgram(RepeatedModifiers):
    """The program of a problem's modifiers for other calls of its structure: with their tensors, lengths, positions."""

    def __init__(self, problem: Problem) -> None:
        first, *rest = (len(stage.tensors()) for stage in problem.score.parts)
        program = _program(problem)
        assert isinstance(program, Program), program
        self.names, self.tensors = tuple(_operands(program)), range(first, first + sum(rest))
        self._graph = graph_of(cast("tuple[Modifier, ...]", problem.score.parts[1:]), problem.frame)
        self.lasts, self._axes = self._graph.fixed, _axes(problem.frame)

    def operands(self, frame: Frame, leaves: Sequence[Tensor]) -> dict[str, Tensor] | None:
        program = self._program(frame, leaves, (False,) * len(self.tensors))
        found = None if program is None else _operands(program)
        return found if found is None or len(found) <= len(self.names) else None

    def gradients(self, frame: Frame, leaves: Sequence[Tensor], wanted: Sequence[bool]) -> ProgramGradients | None:
        program = self._program(frame, leaves, wanted)
        return None if program is None else ProgramGradients(program)

    def _program(self, frame: Frame, leaves: Sequence[Tensor], wanted: Sequence[bool]) -> Program | None:
        if _axes(frame) != self._axes:
            return None
        try:
            return lower(self._graph, frame, [leaves[n] for n in self.tensors], wanted)
        except (NotLowered, RuntimeError, IndexError):
            return None


def _axes(frame: Frame) -> tuple[int, int]:
    return frame.positions.q.dim(), frame.positions.k.dim()


def _without_pairs(problem: Problem, wanted: Sequence[bool]) -> Program:
    """In the place of a program, for a call without pairs: it reads nothing."""
    tensors = [t for stage in problem.score.parts[1:] for t in stage.tensors()]
    return Program(
        torch.empty(0, INSTRUCTION_WORDS, dtype=torch.int32, device="cpu"),
        [],
        {},
        [t for t, want in zip(tensors, wanted, strict=True) if want],
    )


def _operands(program: Program) -> dict[str, Tensor]:
    if not len(program.rows):
        return {}
    return {"program_code": program.rows, **dict(zip(OPERAND_NAMES, program.operands, strict=False))}


def described_modifiers(problem: Problem) -> str:
    """The program of a call that has one, for `explain`."""
    found = _program(problem)
    assert isinstance(found, Program), found
    return described(found.rows, found.operands)


def operands_of_modifiers(problem: Problem) -> int:
    """How many operands the program of a problem's modifiers reads at most, whichever gradients are wanted."""
    tensors = [t for stage in problem.score.parts[1:] for t in stage.tensors()]
    learned = tuple(t.is_floating_point() for t in tensors)
    found = [_program(problem), *([_program(problem, learned)] if any(learned) else [])]
    return max(PROGRAM_OPERANDS if isinstance(x, str) else len(x.operands) for x in found)


def _lowered(problem: Problem, wanted: tuple[bool, ...]) -> Program:
    stages = cast("tuple[Modifier, ...]", problem.score.parts[1:])
    tensors = [t for stage in stages for t in stage.tensors()]
    return lower(graph_of(stages, problem.frame), problem.frame, tensors, wanted or (False,) * len(tensors))


_program = ProgramsOfProblems(_lowered)
