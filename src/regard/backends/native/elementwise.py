"""Elementwise similarities on the native kernels: the kernels of additive scores, with a program over features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regard.backends.base import Result
from regard.backends.native.abi import AdditiveArguments, AdditiveGradientArguments, CallArguments
from regard.backends.native.additive import additive_gradients
from regard.backends.native.args import KernelArgs
from regard.backends.native.backward import backward, learned_by_similarity
from regard.backends.native.bind import bind
from regard.backends.native.c_structs import Struct
from regard.backends.native.families import Gradients, KernelFamily, RepeatedSimilarity, SimilarityGradients
from regard.backends.native.ffi import DTYPE_CODES
from regard.backends.native.launch import KernelResults, threads
from regard.backends.native.modifiers.table import why_not_learned
from regard.backends.native.programs.code import NotLowered
from regard.backends.native.programs.features import FeatureGraph, program_of_features, why_no_program_of_features
from regard.backends.native.programs.lower import Program
from regard.call.problem import Problem
from regard.core.shapes import count_of

_WORK = 4  # what an instruction costs for a query and a key, in operations of a dot product


class FeatureGradients(SimilarityGradients):
    """What a program over features learns, from the gradients of its parameters for all heads and features."""

    def __init__(self, program: Program, heads: int, width: int) -> None:
        self._program = program
        self.written = {"dw": torch.empty(len(program.operands), heads, width, dtype=torch.float32, device="cpu")}

    def of_tensors(self) -> list[Tensor]:
        by_parameter = self.written["dw"]
        return self._program.gradients(
            {n: by_parameter[n][:, None, None, :].sum_to_size(t.shape) for n, t in self._program.learned.items()}
        )


class RepeatedFeatures(RepeatedSimilarity):
    """The program of a similarity for other calls of its structure, which have tensors of their own."""

    def __init__(self, problem: Problem) -> None:
        self._graph = FeatureGraph.of(problem)
        self._heads, self._width = problem.frame.heads, problem.q.shape[-1]
        self.tensors, self.lasts = range(len(problem.similarity.tensors())), self._graph.graph.fixed

    def fill(self, struct: Struct, leaves: Sequence[Tensor]) -> bool:
        return self._set(struct, leaves, (False,) * len(self.tensors)) is not None

    def gradients(self, struct: Struct, leaves: Sequence[Tensor], wanted: Sequence[bool]) -> FeatureGradients | None:
        program = self._set(struct, leaves, wanted)
        return None if program is None else FeatureGradients(program, self._heads, self._width)

    def _set(self, struct: Struct, leaves: Sequence[Tensor], wanted: Sequence[bool]) -> Program | None:
        """The program of a call's tensors, which the struct is told."""
        assert isinstance(struct, AdditiveArguments)
        try:
            program = self._graph.lower([leaves[n] for n in self.tensors], tuple(wanted))
        except (NotLowered, RuntimeError):
            return None
        _set_program(struct, program, self._heads, self._width)
        return program


@dataclass(frozen=True)
class ElementwiseKernels(KernelFamily):
    """The kernels of sums over features."""

    whole = False  # the program is the problem's
    backward_struct = AdditiveGradientArguments
    repeated_part = RepeatedFeatures

    def why_gathers(self, problem: Problem) -> str | None:
        return "the kernels of sums over features read ordinary tensors"

    def why_not_invariant(self, problem: Problem) -> str | None:
        return "the kernels of sums over features have no rows that depend on no other"

    def why_streamed(self, problem: Problem, needs: tuple[bool, ...]) -> str | None:
        of_inputs = needs[3 : 3 + len(problem.similarity.tensors())]
        why = why_no_program_of_features(problem, of_inputs)
        if why is None and any((*needs[:2], *of_inputs)):
            why = program_of_features(problem, of_inputs).own_derivative
        return why or why_not_learned(problem, needs)

    def backward(
        self, problem: Problem, args: KernelArgs, saved: KernelResults, cotangents: Result, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        of_inputs = needs[3 : 3 + len(problem.similarity.tensors())]
        program = program_of_features(problem, of_inputs)
        features = FeatureGradients(program, problem.frame.heads, problem.q.shape[-1])
        struct = partial(_arguments, problem, program)

        def find(args: KernelArgs, saved: KernelResults, cotangents: Result, wanted: set[str]) -> dict[str, Tensor]:
            found = additive_gradients(args, saved, cotangents, wanted, struct, features.written)
            names = [learned_by_similarity(n) for n, need in enumerate(of_inputs) if need]
            return found | dict(zip(names, features.of_tensors(), strict=True))

        return backward(problem, args, saved, cotangents, needs, find)

    def cotangent(self, g_out: Tensor) -> Tensor:
        return g_out.float()

    def pair_work(self, problem: Problem, args: KernelArgs) -> int:
        return _pair_work(problem, program_of_features(problem))

    def empty_gradients(self, given: Sequence[Tensor], heads: int, needs: tuple[bool, ...]) -> Gradients:
        return [torch.empty(t.shape, dtype=torch.float32, device="cpu") for t in given]

    def own(self, made: Gradients, given: Sequence[Tensor], learned: Tensor | None) -> Gradients:
        return [None if g is None else g.to(t.dtype) for g, t in zip(made, given, strict=True)]

    def struct(self, problem: Problem, call: CallArguments) -> Struct:
        return _arguments(problem, program_of_features(problem), call)


def described_features(problem: Problem) -> str:
    """The program of a call, for `explain`."""
    program = program_of_features(problem)
    read = f", which reads {count_of(len(program.operands), 'tensor')}" if program.operands else ""
    return f"the sum over features of a program of {count_of(len(program.rows), 'instruction')}{read}"


def _pair_work(problem: Problem, program: Program) -> int:
    """What a query and a key cost over the batch and all heads, in floating-point operations."""
    width = problem.q.shape[-1] * len(program.rows)
    return _WORK * math.prod(problem.frame.batch) * problem.frame.heads * width


def _arguments(problem: Problem, program: Program, call: CallArguments) -> AdditiveArguments:
    """The call with the program of its features."""
    call.dtype = DTYPE_CODES[problem.v.dtype]
    call.threads = threads(_pair_work(problem, program) * problem.frame.nq * problem.frame.nk)
    x = AdditiveArguments(call)
    _set_program(x, program, problem.frame.heads, problem.q.shape[-1])
    return x


def _set_program(x: AdditiveArguments, program: Program, heads: int, width: int) -> None:
    """The code, and its parameters with a number for each head and feature."""
    parameters = [t.float().expand(heads, 1, 1, width) for t in program.operands]
    x.code_count, x.parameter_count = len(program.rows), len(parameters)
    bind(x, {"code": program.rows, "parameters": torch.stack(parameters) if parameters else None})
