"""Modifiers that a person wrote, as a program that the kernels interpret: native/steps/program.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.backends.native.c_structs import Member, members
from regard.backends.native.modifiers.base import KernelModifier
from regard.backends.native.programs.code import NotLowered
from regard.backends.native.programs.lower import Program, lower
from regard.backends.native.programs.operations import OPERATIONS, PROGRAM_OPERANDS, SLOTS
from regard.backends.native.programs.structure import graph_of
from regard.backends.native.programs.trace import NotTraced, Values
from regard.core.problem import Problem
from regard.core.tracing import data_unavailable, watched
from regard.scores.additive import Additive
from regard.scores.algebra import Modifier

__all__ = ["OPERATIONS", "PROGRAM_OPERANDS", "SLOTS", "ProgramOperands", "Programs"]

_NAMES = tuple(f"program_{n}" for n in range(PROGRAM_OPERANDS))


@dataclass(frozen=True, eq=False, kw_only=True)
class ProgramOperands:
    """program_code: int32 (n, 6), instructions. program_0, ...: what it loads, (*batch, h, nq, nk), and tables (n,)."""

    program_code: Tensor | None = None
    program_0: Tensor | None = None
    program_1: Tensor | None = None
    program_2: Tensor | None = None
    program_3: Tensor | None = None
    program_4: Tensor | None = None
    program_5: Tensor | None = None
    program_6: Tensor | None = None
    program_7: Tensor | None = None


class Programs(KernelModifier[Modifier]):
    """All modifiers of a score, where one of them is not regard's own: a program takes the place of all steps."""

    stage = Modifier
    operands = ProgramOperands
    members = (
        Member("const int32_t*", "program_code", "(program_count, 6): a program that modifies scores, or null"),
        Member("int64_t", "program_count"),
        *members("regard_tensor", " ".join(_NAMES), "(batch, head, row, key), or tables, that it reads"),
    )
    counts: ClassVar[Mapping[str, str]] = {"program_code": "program_count"}
    of_lengths = of_positions = frozenset({"program_code", *_NAMES})

    @classmethod
    def why_not(cls, problem: Problem, stage: Modifier) -> str | None:
        """Of all modifiers at once; stage: one that is not regard's own."""
        if isinstance(problem.similarity, Additive):
            return f"after additive scores it has no step {stage!r}"
        if data_unavailable(*problem.tensors()) or watched():
            return (
                f"it has no step {stage!r}, which it could run on its first numbers only, and a graph records the call"
            )
        if 0 in problem.frame.shape:
            return None
        found = _program(problem)
        return f"it has no step {stage!r}: {found}" if isinstance(found, str) else None

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

    @classmethod
    def shapes(cls, shape: tuple[int, ...], names: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {}


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
