"""Families of native kernels: what all that begin with one kind of similarity can be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard.backends.base import Result
from regard.backends.library import Arguments
from regard.backends.lowering import Lowered, lower_dots
from regard.backends.operation import Kept, dots
from regard.backends.training import backward, why_not_backward
from regard.problem import Problem


@dataclass(frozen=True)
class Family:
    """The kernels of dot products, and the base of others.

    whole: whether Lowered says all of a call, so that it can be a node of a graph, or be made ready for the next.
    """

    whole: ClassVar[bool] = True

    def why_not_invariant(self) -> str | None:
        """Why a row's bits depend on other rows, as a clause; None if they need not."""
        return None

    def why_streamed(self, problem: Problem, needs: tuple[bool, ...]) -> str | None:
        """Why the kernels do not have the backward of a call that they can run, as a clause; None if they do."""
        return why_not_backward(problem, needs)

    def lower(self, problem: Problem, mask: dict[str, Tensor]) -> Lowered:
        """The call as the kernels read it; mask: what lower_mask says of its mask."""
        return lower_dots(problem, mask)

    def run(self, problem: Problem, call: Arguments) -> None:
        """The forward, from a struct that is filled."""
        dots(call)

    def backward(
        self, problem: Problem, lowered: Lowered, kept: Kept, cotangents: Result, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of problem.tensors() for which `needs` is true, where why_streamed has nothing to say."""
        return backward(problem, lowered, kept, cotangents, needs)
