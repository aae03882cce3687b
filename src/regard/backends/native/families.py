"""Families of native kernels: what all that begin with one kind of similarity can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.backends.base import Result
from regard.backends.native.abi import CallArguments, GradientArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.backward import backward, why_not_backward
from regard.backends.native.c_structs import Struct
from regard.backends.native.call_operands import LEAVES, OPERANDS
from regard.backends.native.launch import KernelResults, pair_work
from regard.backends.native.modifiers.base import RepeatedModifiers
from regard.backends.native.modifiers.offsets import RepeatedOffsets
from regard.backends.native.modifiers.program import RepeatedProgram
from regard.backends.native.modifiers.table import programmed
from regard.call.problem import Problem
from regard.core.deferred import kept_alike
from regard.core.dtypes import HALF
from regard.scores.additive import Additive
from regard.scores.modifiers import RelativeBias
from regard.scores.similarity import Bilinear, Distance, ScaledDot

Gradients = Sequence["Tensor | None"]
NAME_AT: dict[int, str] = {CallArguments.offsets[name]: name for name in LEAVES}  # of operands that are leaves


class RepeatedSimilarity(ABC):
    """What the kernels read of a similarity, made from its tensors anew for each call of a structure.

    tensors  which of the leaves of a call belong to the similarity
    lasts    whether there are other calls that it serves
    """

    tensors: range
    lasts: bool

    @abstractmethod
    def __init__(self, problem: Problem) -> None: ...

    @abstractmethod
    def fill(self, struct: Struct, leaves: Sequence[Tensor]) -> bool:
        """Tells the struct of a call; whether it can: else the call must run without a plan."""

    @abstractmethod
    def gradients(self, struct: Struct, leaves: Sequence[Tensor], wanted: Sequence[bool]) -> SimilarityGradients | None:
        """Tells the struct of a forward what its backward reads; None as above. wanted: for each of `tensors`."""


class SimilarityGradients(ABC):
    """The gradients of those of a similarity's tensors that are wanted, in one call.

    written  what the kernels write them to, by its names in the struct of the backward
    """

    written: dict[str, Tensor]

    @abstractmethod
    def of_tensors(self) -> list[Tensor]:
        """The gradients of the tensors that are wanted, from `written`."""


@dataclass(frozen=True)
class KernelFamily:
    """The kernels of dot products, and the base of others.

    whole            whether KernelArgs says all of a call, so that it can be a node of a graph
    backward_struct  what the backward reads: it begins with what the forward read
    gradients        its members for the gradients of q, k and v, and of what the similarity learns, if it learns
    repeated_part    what makes the similarity's part of a struct anew for each call, of a problem; None where the first
                     call's serves others
    """

    whole: ClassVar[bool] = True
    backward_struct: ClassVar[type[Struct]] = GradientArguments
    gradients: ClassVar[tuple[str, ...]] = ("dq", "dk", "dv")
    repeated_part: ClassVar[type[RepeatedSimilarity] | None] = None

    def why_not_invariant(self, problem: Problem) -> str | None:
        """Why a row's bits depend on other rows, as a clause; None if they need not."""
        if isinstance(problem.similarity, Bilinear):
            return "the product of q and M is torch's, whose rounding depends on how many queries there are"
        if isinstance(problem.similarity, Distance):
            return "distances are measured from the middle of all keys, hidden ones too"
        return None

    def why_gathers(self, problem: Problem) -> str | None:
        """Why keys and values are gathered from pages before the kernels read them, as a clause; None if they are not.

        The keys must reach the kernels as the caller has them.
        """
        similarity = problem.similarity
        if not kept_alike(problem.k, problem.v):
            return f"{similarity!r} prepares the keys, and the kernel reads keys and values alike"
        if isinstance(similarity, Distance):
            return "distances, as dot products, have keys of their own"
        by_tensor = isinstance(similarity, ScaledDot) and isinstance(similarity.scale, Tensor)
        if problem.q.dtype != problem.k.dtype or (by_tensor and problem.dtype in HALF):
            return f"{similarity!r} widens the keys to float32"
        return None

    def why_streamed(self, problem: Problem, needs: tuple[bool, ...]) -> str | None:
        """Why the kernels do not have the backward of a call that they can run, as a clause; None if they do."""
        return why_not_backward(problem, needs)

    def backward(
        self, problem: Problem, args: KernelArgs, saved: KernelResults, cotangents: Result, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of problem.tensors() for which `needs` is true, where why_streamed has nothing to say."""
        return backward(problem, args, saved, cotangents, needs)

    def leaves(self, problem: Problem, args: KernelArgs) -> dict[int, Tensor | None]:
        """The tensors besides q, k and v that are read where the caller has them, by the offset of their address.

        Not those of which the kernels read a copy: a plan would set an address that nobody reads, or miss new numbers.
        """
        found = {name: args.operands.get(name) for name in LEAVES}
        # where a plain pointer leads, numbers lie without gaps: the kernels read a copy of others
        there = {name: t for name, t in found.items() if OPERANDS[name].strided or t is None or t.is_contiguous()}
        return {CallArguments.offsets[name]: t for name, t in there.items()}

    def learned(self, problem: Problem) -> Tensor | None:
        """The one of them that may have a gradient."""
        return None

    def copied(self, problem: Problem) -> bool:
        """Whether the struct leads to a copy of what the caller has, which the next call would find old."""
        return False

    def repeated(self, problem: Problem) -> RepeatedModifiers | None:
        """What makes the operands of a score's modifiers anew for each call, where they are computed from tensors."""
        if programmed(problem):
            return RepeatedProgram(problem)
        biased = any(isinstance(stage, RelativeBias) for stage in problem.score.parts)
        return RepeatedOffsets(problem) if biased and not isinstance(problem.similarity, Additive) else None

    def cotangent(self, g_out: Tensor) -> Tensor:
        """In a dtype that the backward reads."""
        return g_out

    def pair_work(self, problem: Problem, args: KernelArgs) -> int:
        """Floating-point operations that a query and a key cost, over the batch and all heads."""
        return pair_work(args)

    def struct(self, problem: Problem, call: CallArguments) -> Struct:
        """What the forward reads. It begins with the call."""
        return call

    def empty_gradients(self, given: Sequence[Tensor], heads: int, needs: tuple[bool, ...]) -> Gradients:
        """What the backward writes: those of `gradients`."""
        return [torch.empty_like(t) if need else None for t, need in zip(given, needs, strict=False)]

    def own(self, made: Gradients, given: Sequence[Tensor], learned: Tensor | None) -> Gradients:
        """The same in the dtypes and shapes of what they are gradients of."""
        return made
