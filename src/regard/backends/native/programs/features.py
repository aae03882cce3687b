"""Elementwise similarities as programs over features: native/additive/features.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.backends.native.programs.code import Code, Derivative, Instruction, NotLowered
from regard.backends.native.programs.graph import Graph, Node
from regard.backends.native.programs.lower import Program, Rows, lower
from regard.backends.native.programs.lowering import Lowering
from regard.backends.native.programs.of_problem import ProgramsOfProblems
from regard.backends.native.programs.operations import OPERATIONS, PROGRAM_OPERANDS
from regard.backends.native.programs.reads import Read
from regard.backends.native.programs.reverse import derivatives
from regard.backends.native.programs.structure import graph_of_features
from regard.call.problem import Problem
from regard.core.region import Frame
from regard.scores.elementwise import Elementwise

_OF_PAIR = {"query": PROGRAM_OPERANDS, "key": PROGRAM_OPERANDS + 1}  # which operands q and k are, while code is made


@dataclass
class _Features(Lowering):
    """A graph of one feature of a query and a key."""

    def _computed(self, x: Node) -> int:
        if x.op in _OF_PAIR:
            return self.code.add(Instruction("LOAD", (), _OF_PAIR[x.op]))
        return super()._computed(x)

    def becomes_number(self, read: Read, t: Tensor) -> bool:
        """Floats stay operands, as they are where they are learned: a number may become the factor of all terms, which
        rounds otherwise, and a backward computes the scores of its forward again.
        """
        return not t.is_floating_point() and super().becomes_number(read, t)


def why_no_program_of_features(problem: Problem, wanted: tuple[bool, ...] = ()) -> str | None:
    """Why an Elementwise is no program with gradients of the tensors that are wanted, as a clause; None if it is."""
    found = _program(problem, wanted)
    return found if isinstance(found, str) else None


def program_of_features(problem: Problem, wanted: tuple[bool, ...] = ()) -> Program:
    """The program of an Elementwise; its operands are the parameters, each of a shape that broadcasts to (heads, 1, 1,
    d). LOAD and LOAD_GRADIENT of its rows count them from 2 on: 0 is the query, 1 the key.
    """
    found = _program(problem, wanted)
    assert isinstance(found, Program), found
    return found


@dataclass(frozen=True, eq=False)
class FeatureGraph:
    """What an Elementwise computes of a feature, whatever its tensors hold.

    frame  (heads, 1, 1, width): the features of a feature program are what keys are elsewhere
    """

    graph: Graph
    frame: Frame

    @staticmethod
    def of(problem: Problem) -> FeatureGraph:
        """Raises NotTraced."""
        similarity = problem.similarity
        assert isinstance(similarity, Elementwise)
        frame = Frame.of(1, problem.q.shape[-1], batch=(problem.frame.heads,), device="cpu")
        return FeatureGraph(graph_of_features(similarity, frame), frame)

    def lower(self, tensors: Sequence[Tensor], wanted: tuple[bool, ...]) -> Program:
        """The program that reads these tensors of the similarity. Raises NotLowered."""
        floats = [t.float() for t in Elementwise.aligned(tensors)]  # the kernels read floats
        return lower(self.graph, self.frame, floats, wanted, _Features, _rows)


def _program(problem: Problem, wanted: tuple[bool, ...]) -> Program | str:
    similarity = problem.similarity
    assert isinstance(similarity, Elementwise)
    return _programs(problem, wanted or (False,) * len(similarity.inputs))


def _lowered(problem: Problem, wanted: tuple[bool, ...]) -> Program:
    return FeatureGraph.of(problem).lower(problem.similarity.tensors(), wanted)


_programs = ProgramsOfProblems(_lowered)


def _rows(lowering: Lowering, result: int) -> Rows:
    """The code of what a feature adds, with its derivatives by the query, by the key and by learned parameters."""
    if not all(t.is_floating_point() for t in lowering.tensors):
        raise NotLowered("it computes whole numbers or booleans of its tensors")
    code = lowering.code
    pair = {n: x for n, x in enumerate(code.made) if x.op == "LOAD" and x.number in _OF_PAIR.values()}
    reads = {**pair, **lowering.reads}
    found = derivatives(code, result, set(reads))
    by_operand = [Derivative(found[n], read, False) for n, read in reads.items() if n in found]
    term, factor = _without_factor(code, result)
    rows = [_renumbered(row) for row in code.rows(term, None, by_operand, factor)]
    used = {one.read.number for one in by_operand}
    learned = {n: t for n, t in lowering.learned.items() if n in used}
    return torch.tensor(rows, dtype=torch.int32, device="cpu"), learned


def _without_factor(code: Code, result: int) -> tuple[int, float]:
    """A value and a number whose product the result is: the kernels multiply as they add, in one operation."""
    value, factor = result, 1.0
    while (x := code.made[value]).op in ("NEG", "MUL"):
        if x.op == "NEG":
            value, factor = x.args[0], -factor
            continue
        numbers = [a for a in x.args if code.is_float(a)]
        if len(numbers) != 1 or abs(factor) != 1:
            break
        value, factor = x.args[x.args[0] == numbers[0]], factor * code.float_of(numbers[0])
    return value, factor


def _renumbered(row: list[int]) -> list[int]:
    """A row whose operand is 0 for the query, 1 for the key, and from 2 on for parameters."""
    *slots, number = row
    if OPERATIONS[row[0]] not in ("LOAD", "LOAD_GRADIENT"):
        return row
    return [*slots, number - PROGRAM_OPERANDS if number >= PROGRAM_OPERANDS else number + 2]
