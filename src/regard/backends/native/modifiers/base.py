"""What Python describes of a modifier that the native kernels have: one class a modifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from regard.backends.native.c_structs import Member
from regard.core.arrays import of_numbers
from regard.core.problem import Problem
from regard.scores.algebra import Score

S = TypeVar("S", bound=Score)


class KernelModifier(ABC, Generic[S]):
    """One modifier: how a score's stage becomes operands, and how gradients of operands become the stage's."""

    stage: ClassVar[type[Any]]
    """What is lowered to it: by type, not isinstance, since a subclass may mean something else."""
    operands: ClassVar[type[Any]]
    """A dataclass of its operands (tensors that the kernels read, or None) and numbers: members of the same names of
    abi.CallArguments. args.KernelArgs inherits it."""
    members: ClassVar[tuple[Member, ...]]
    """Of abi.CallArguments."""
    gradients: ClassVar[tuple[Member, ...]] = ()
    """Of abi.GradientArguments: the address of the gradient of `x` is `dx`; a float* is written head by head."""
    learned: ClassVar[Mapping[str, str]] = {}
    """The operand that has the gradient of a field of the stage, by field, in the order of the stage's tensors."""
    leaves: ClassVar[tuple[str, ...]] = ()
    """Operands that the kernels may read where the caller has them."""
    counts: ClassVar[Mapping[str, str]] = {}
    """The member that holds how many numbers an operand has, by operand: see `count`."""
    exact: ClassVar[frozenset[str]] = frozenset()
    """Operands whose last axis is never shared."""
    of_lengths: ClassVar[frozenset[str]] = frozenset()
    """Operands that belong to one number of queries and keys: a plan with them serves no other."""
    of_positions: ClassVar[frozenset[str]] = frozenset()
    """Operands made from the numbers in positions: no plan with them serves calls whose positions are given."""
    repeats: ClassVar[bool] = False
    """Whether a score may have several such stages."""

    @classmethod
    def why_not(cls, problem: Problem, stage: S) -> str | None:
        """Why the kernels cannot compute one stage of a score, as a clause; None if they can."""
        return None

    @classmethod
    def why_not_learned(cls, asked: Sequence[bool]) -> str | None:
        """Why the kernels cannot find the gradients of the stage's tensors that are asked for; None if they can."""
        return None

    @classmethod
    @abstractmethod
    def lower(cls, problem: Problem, stages: Sequence[S]) -> dict[str, Any]:
        """The operands and numbers of a problem's stages of this type, one or more, by name."""

    @classmethod
    def count(cls, t: Tensor) -> int:
        """The value of the member that `counts` names for an operand."""
        return len(t)

    @classmethod
    @abstractmethod
    def shapes(cls, shape: tuple[int, ...], names: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of operands for scores of `shape`, (*batch, h, nq, nk), where a call has those in `names`."""

    checks: ClassVar[tuple[Callable[[Any], None], ...]] = ()
    """Functions that raise ValueError where the operands of a call (args.KernelArgs) do not fit each other."""

    @classmethod
    def empty_gradient(cls, name: str, operand: Tensor, heads: int) -> Tensor:
        """Zeros that take the gradient of an operand, for all heads: one number a head."""
        return torch.zeros(heads, dtype=torch.float32, device="cpu")

    @classmethod
    def stage_gradient(cls, problem: Problem, t: Tensor, g: Tensor) -> Tensor:
        """The gradient of a stage's tensor t from that of its operand."""
        return g


def by_head(x: float | Tensor) -> Tensor:
    """A number for each head, float32 (h,), or (1,) where they share it."""
    return of_numbers(x, torch.float32).float().reshape(-1).contiguous()


def total(t: Tensor) -> Tensor:
    """The sum over the last axis, by steps that do not depend on the number of threads."""
    while t.shape[-1] > 1:
        t = torch.nn.functional.pad(t, (0, -t.shape[-1] % 256)).unflatten(-1, (-1, 256)).sum(-1)
    return t.sum(-1)
