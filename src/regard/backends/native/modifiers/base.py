"""What Python describes of a modifier that the native kernels have: one class a modifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from regard.backends.native.operands import HEAD, KernelNumber, KernelOperand, Sizes
from regard.call.problem import Problem
from regard.core.arrays import of_numbers
from regard.core.region import Frame
from regard.scores.algebra import Score

S = TypeVar("S", bound=Score)


class KernelModifier(ABC, Generic[S]):
    """One modifier: how a score's stage becomes operands, and how gradients of operands become the stage's."""

    stage: ClassVar[type[Any]]
    """What is lowered to it: by type, not isinstance, since a subclass may mean something else."""
    step: ClassVar[str]
    """Its struct in C++: a member of the list `Modifiers`, which header.py writes."""
    last_step: ClassVar[str] = ""
    """Its struct in C++ for a stage that comes after those of all other modifiers, if it may."""
    header: ClassVar[str]
    """The file in native/steps/ that has these structs."""
    operands: ClassVar[tuple[KernelOperand, ...]] = ()
    """The tensors that the kernels read; those that are learned in the order of the stage's tensors."""
    numbers: ClassVar[tuple[KernelNumber, ...]] = ()
    repeats: ClassVar[bool] = False
    """Whether a score may have several such stages."""

    @classmethod
    def learned(cls) -> dict[str, str]:
        """The operand that has the gradient of a field of the stage, by field."""
        return {operand.learned: operand.name for operand in cls.operands if operand.learned}

    @classmethod
    def why_not(cls, problem: Problem, stage: S) -> str | None:
        """Why the kernels cannot compute one stage of a score, as a clause; None if they can."""
        return None

    @classmethod
    def measures_positions(cls, stage: S) -> bool:
        """Whether the kernels compute distances between positions for a stage: as 32-bit numbers."""
        return False

    @classmethod
    def why_not_learned(cls, asked: Sequence[bool]) -> str | None:
        """Why the kernels cannot find the gradients of the stage's tensors that are asked for; None if they can."""
        return None

    @classmethod
    @abstractmethod
    def lower(cls, problem: Problem, stages: Sequence[S]) -> dict[str, Any]:
        """The operands and numbers of a problem's stages of this type, one or more, by name."""

    @classmethod
    def check(cls, operands: Mapping[str, Tensor], sizes: Sizes) -> None:
        """Raises ValueError where a call's operands, each of its own shape, do not fit each other."""

    @classmethod
    def empty_gradient(cls, name: str, operand: Tensor, heads: int) -> Tensor:
        """Zeros that take the gradient of an operand, for all heads: one number a head."""
        return torch.zeros(heads, dtype=torch.float32, device="cpu")

    @classmethod
    def stage_gradient(cls, problem: Problem, t: Tensor, g: Tensor) -> Tensor:
        """The gradient of a stage's tensor t from that of its operand."""
        return g


class RepeatedModifiers(ABC):
    """The operands of a score's modifiers, computed from tensors anew for each call of a structure.

    names    of the operands that a call may have
    tensors  which of the leaves of a call belong to the modifiers
    lasts    whether there are other calls that it serves
    """

    names: tuple[str, ...]
    tensors: range
    lasts: bool

    @abstractmethod
    def operands(self, frame: Frame, leaves: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """The operands of a call; None where the call must run without a plan."""

    @abstractmethod
    def gradients(self, frame: Frame, leaves: Sequence[Tensor], wanted: Sequence[bool]) -> RepeatedGradients | None:
        """What finds the gradients of the tensors that are wanted, in a call whose operands were found; None as above.

        wanted: for each of `tensors`.
        """


class RepeatedGradients(ABC):
    """The gradients of those of the modifiers' tensors that are wanted, in one call.

    operands  what the kernels read to find them
    """

    operands: dict[str, Tensor]

    @abstractmethod
    def empty(self) -> dict[str, Tensor]:
        """What the kernels write or add to: the gradients of operands, by their names."""

    @abstractmethod
    def of_tensors(self, found: Mapping[str, Tensor]) -> list[Tensor]:
        """The gradients of the tensors that are wanted, from those of the operands."""


def of_operand(g: Tensor, operand: Tensor) -> Tensor:
    """The gradient (h, ...) for each head of an operand (h, ...) or (1, ...): summed where heads share it."""
    return total(g.movedim(0, -1))[None] if operand.shape[0] == 1 else g


def number_by_head(name: str, about: str, learned: str = "") -> KernelOperand:
    """An operand (h,) or (1,); without a gradient, the kernels read a copy of it."""
    return KernelOperand(name, torch.float32, (HEAD,), about, leaf=bool(learned), ragged=True, learned=learned)


def by_head(x: float | Tensor) -> Tensor:
    """A number for each head, float32 (h,), or (1,) where they share it."""
    return of_numbers(x, torch.float32).float().reshape(-1).contiguous()


def total(t: Tensor) -> Tensor:
    """The sum over the last axis, by steps that do not depend on the number of threads."""
    while t.shape[-1] > 1:
        t = torch.nn.functional.pad(t, (0, -t.shape[-1] % 256)).unflatten(-1, (-1, 256)).sum(-1)
    return t.sum(-1)
