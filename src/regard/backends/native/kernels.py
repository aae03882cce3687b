"""What a plan asks a family of kernels; KernelFamily and AdditiveKernels answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from regard.backends.native.abi import CallArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.c_structs import Struct
from regard.call.problem import Problem

Gradients = Sequence["Tensor | None"]


class Kernels(Protocol):
    """What a plan asks a family of kernels."""

    forward_entry: ClassVar[str]
    backward_entry: ClassVar[str]
    gradient_offsets: ClassVar[tuple[int, ...]]
    """Where the backward's struct has the cotangent and the gradients of q, k and v (operands)."""
    learned_offset: ClassVar[int | None]
    """Where it has the address of the gradient of what is learned; None if that is always None."""

    def leaves(self, problem: Problem, args: KernelArgs) -> dict[int, Tensor | None]:
        """The tensors besides q, k and v that are read where the caller has them, by the offset of their address.

        Not those of which the kernels read a copy: a plan would set an address that nobody reads, or miss new numbers.
        """
        ...

    def learned(self, problem: Problem) -> Tensor | None:
        """The one of them that may have a gradient."""
        ...

    def copied(self, problem: Problem) -> bool:
        """Whether the struct leads to a copy of what the caller has, which the next call would find old."""
        ...

    def cotangent(self, g_out: Tensor) -> Tensor:
        """In a dtype that the backward reads."""
        ...

    def pair_work(self, problem: Problem, args: KernelArgs) -> int:
        """Floating-point operations that a query and a key cost, over the batch and all heads."""
        ...

    def struct(self, problem: Problem, call: CallArguments) -> Struct:
        """What the forward reads. It begins with the call."""
        ...

    def backward_struct(self, forward: Struct, dtypes: tuple[int, int]) -> Struct:
        """What the backward reads, beginning with what the forward read, without operands of its own; dtypes: of the
        cotangent and of q.
        """
        ...

    def empty_gradients(self, given: Sequence[Tensor], heads: int, needs: tuple[bool, ...]) -> Gradients:
        """What the backward writes: gradients of q, k and v, and of the leaf that is learned."""
        ...

    def own(self, made: Gradients, given: Sequence[Tensor], learned: Tensor | None) -> Gradients:
        """The same in the dtypes and shapes of what they are gradients of."""
        ...
