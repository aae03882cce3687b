"""Modifiers that a person wrote, as a program that the kernels interpret: native/steps/program.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from regard.backends.native.modifiers.base import KernelModifier
from regard.backends.native.operands import ANY, Axis, Count, KernelOperand
from regard.backends.native.programs.code import NotLowered
from regard.backends.native.programs.lower import Program, lower
from regard.backends.native.programs.operations import OPERATIONS, PROGRAM_OPERANDS, SLOTS
from regard.backends.native.programs.structure import graph_of
from regard.backends.native.programs.trace import NotTraced, Values
from regard.core.problem import Problem
from regard.core.shapes import count_of
from regard.core.tracing import data_unavailable, watched
from regard.scores.additive import Additive
from regard.scores.algebra import Modifier

__all__ = ["OPERATIONS", "PROGRAM_OPERANDS", "SLOTS", "Programs"]

_INSTRUCTION = Axis("instruction", lambda s: None, shared=False)
_NUMBER = Axis("number", lambda s: 6, shared=False)
_NAMES = tuple(f"program_{n}" for n in range(PROGRAM_OPERANDS))


class Programs(KernelModifier[Modifier]):
    """All modifiers of a score, where one of them is not regard's own: a program takes the place of all steps."""

    stage = Modifier
    repeats = True
    operands = (
        KernelOperand(
            *("program_code", torch.int32, (_INSTRUCTION, _NUMBER), "a program that modifies scores"),
            of_lengths=True,
            of_positions=True,
            count=Count("program_count", len),
        ),
        *(
            KernelOperand(
                *(name, None, (ANY,), "what a program reads: (batch, head, query, key), or a table"),
                strided=True,
                of_lengths=True,
                of_positions=True,
            )
            for name in _NAMES
        ),
    )

    @classmethod
    def why_not(cls, problem: Problem, stage: Modifier) -> str | None:
        """Of all modifiers at once."""
        if isinstance(problem.similarity, Additive):
            return "it has no programs after additive scores"
        if data_unavailable(*problem.tensors()) or watched():
            return "a graph records the call, whose modifiers it would run on these numbers alone"
        if 0 in problem.frame.shape:
            return None
        found = _program(problem)
        shown = " >> ".join(map(repr, problem.score.parts[1:]))
        return f"it has no step for {shown}: {found}" if isinstance(found, str) else None

    @classmethod
    def why_not_learned(cls, asked: Sequence[bool]) -> str | None:
        return "a tensor of a modifier that is not regard's own asks for its gradient" if any(asked) else None

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[Modifier]) -> dict[str, Any]:
        if 0 in problem.frame.shape:
            return {}
        program = _program(problem)
        assert isinstance(program, Program), program
        code = torch.tensor(program.rows, dtype=torch.int32, device="cpu")
        return {"program_code": code, **dict(zip(_NAMES, program.operands, strict=False))}


def described(problem: Problem) -> str:
    """The program of a call that has one, for `explain`."""
    found = _program(problem)
    assert isinstance(found, Program), found
    read = f", which reads {count_of(len(found.operands), 'tensor')}" if found.operands else ""
    return f"a program of {count_of(len(found.rows), 'instruction')}{read}"


_found: WeakKeyDictionary[Problem, Program | str] = WeakKeyDictionary()  # of each problem, or why there is none


def _program(problem: Problem) -> Program | str:
    found = _found.get(problem)
    if found is None:
        found = _found[problem] = _lowered(problem)
    return found


def _lowered(problem: Problem) -> Program | str:
    stages = cast("tuple[Modifier, ...]", problem.score.parts[1:])
    tensors = [t for stage in stages for t in stage.tensors()]
    try:
        with torch.no_grad():
            return lower(graph_of(stages, problem.frame), Values(problem.frame, tensors))
    except (NotTraced, NotLowered) as why:
        return str(why)
    except Exception as error:  # an operation called in a way that nobody foresaw: PyTorch knows it
        return f"{type(error).__name__} was raised while its program was made ({error})"
