"""Operands and numbers of a call of the kernels, besides q, k, v and its results: how each is declared, once.

From a declaration follow the members of the C struct, the check of shapes, the schema of the operator in graphs, what a
plan sets at each call, what the backward reads again, and whether sequences of any lengths can share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.c_structs import AXES, Member
from regard.core.region import Frame
from regard.masks.algebra import Mask

_POINTERS = {torch.float32: "float*", torch.int32: "int32_t*", torch.int64: "int64_t*"}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call, from which the shapes of its operands follow; block: queries and keys of the kernels'."""

    batch: tuple[int, ...]
    heads: int
    key_heads: int
    nq: int
    nk: int
    block: tuple[int, int]


@dataclass(frozen=True)
class Axis:
    """An axis of an operand.

    size     its size in a call; None: the operand's own
    shared   whether the size may be 1 instead: then one number serves all
    """

    name: str
    size: Callable[[Sizes], int | None]
    shared: bool = True


BATCH = Axis("batch", lambda s: None)  # stands for all batch axes
HEAD = Axis("head", lambda s: s.heads)
EACH_KEY_HEAD = Axis("key head", lambda s: s.key_heads, shared=False)
QUERY, KEY = Axis("query", lambda s: s.nq), Axis("key", lambda s: s.nk)
EACH_QUERY, EACH_KEY = Axis("query", lambda s: s.nq, shared=False), Axis("key", lambda s: s.nk, shared=False)
BLOCK_OF_QUERIES = Axis("block of queries", lambda s: -(-s.nq // s.block[0]))
BLOCK_OF_KEYS = Axis("block of keys", lambda s: -(-s.nk // s.block[1]))
ONE = Axis("1", lambda s: 1)
ANY = Axis("...", lambda s: None, shared=False)
INSTRUCTION_WORDS = 6  # numbers of an instruction of a program: native/steps/program.h
INSTRUCTION = Axis("instruction", lambda s: None, shared=False)
WORD = Axis("number", lambda s: INSTRUCTION_WORDS, shared=False)


@dataclass(frozen=True)
class Count:
    """A member that holds how many numbers of a kind an operand has."""

    member: str
    of: Callable[[Tensor], int]


@dataclass(frozen=True)
class HeldMask:
    """A mask that the kernels read as one of its tensors, alone or joined to others by &.

    kind       its class; a subclass may mean something else
    tensor     that tensor in a frame, broadcastable to (*batch, heads, nq, nk)
    described  what `explain` says that the mask is
    """

    kind: type[Mask]
    tensor: Callable[[Any, Frame], Tensor]
    described: str


@dataclass(frozen=True)
class KernelOperand:
    """A tensor that the kernels read, on the CPU.

    dtype         None: one of several, which its regard_tensor says
    axes          in order; an axis of sequences or heads along which all numbers are alike may have size 1. (ANY,): the
                  kernels check which elements they read
    strided       whether it may lie in any way, as a regard_tensor; else it has no gaps, and a member is its address
    leaf          whether the kernels may read it where the caller has it
    of_lengths    whether it belongs to one number of queries and keys: a plan that keeps it serves no other
    of_positions  whether it is made from the numbers in positions: no plan that keeps it serves calls that are given
                  them
    ragged        whether a call on sequences of any lengths can have it: they share it, or find their part by their
                  queries, or are `parted`
    placed        whether the kernels compare it with positions: a call with it has those of queries and keys too
    mask          the mask that it holds; None: it is none, or several masks together
    rule          the field of IntervalRule that it holds
    divided       whether a call on ragged sequences has its numbers, one for each sequence
    learned       the field of its score's stage of which it is the value, if it has a gradient: `d` and its name; of a
                  program "tensors", of which it is computed
    summary       the member for what the kernels find of it once per call, for each block of queries or tile of keys
    """

    name: str
    dtype: torch.dtype | None
    axes: tuple[Axis, ...]
    about: str
    strided: bool = False
    leaf: bool = False
    of_lengths: bool = False
    of_positions: bool = False
    ragged: bool = False
    placed: bool = False
    mask: HeldMask | None = None
    rule: str = ""
    divided: bool = False
    learned: str = ""
    count: Count | None = None
    summary: str = ""

    @property
    def members(self) -> tuple[Member, ...]:
        """Of the struct of a call: the operand, and what is said besides."""
        kind = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        shape = f"{kind} ({', '.join(axis.name for axis in self.axes)}): {self.about}".lstrip()
        found = [Member("regard_tensor", self.name, shape)] if self.strided else self._pointer(shape)
        if self.count is not None:
            found.append(Member("int64_t", self.count.member))
        if self.summary:
            found.append(Member("regard_tensor", self.summary, f"a summary of {self.name}, which the kernels make"))
        return tuple(found)

    def _pointer(self, about: str) -> list[Member]:
        assert self.dtype is not None
        found = [Member(f"const {_POINTERS[self.dtype]}", self.name, about)]
        if HEAD in self.axes:
            found.append(Member("int64_t", f"{self.name}_stride", "from head to head; 0 where they share it"))
        if BATCH in self.axes:
            found.append(Member("int64_t", f"{self.name}_batch", count=AXES))
        return found

    @property
    def parted(self) -> bool:
        """Whether its axis of sequences leads each sequence of a ragged call to its part; with keys, pages may do."""
        return self.ragged and self.strided and self.axes[0] in (BATCH, ANY) and EACH_KEY_HEAD not in self.axes

    @property
    def gradients(self) -> tuple[Member, ...]:
        """Of the struct of a backward call."""
        if not self.learned:
            return ()
        if self.strided:
            return (Member("regard_tensor", f"d{self.name}", "added to, float; double where it sums queries or keys"),)
        return (Member("float*", f"d{self.name}", "for each head, written"),)

    @property
    def given(self) -> str:
        """In C, whether a call has it."""
        return f"c->{self.name}.data" if self.strided else f"c->{self.name}"

    def wrong_shape(self, shape: tuple[int, ...], sizes: Sizes) -> tuple[int, ...] | None:
        """The shape that was expected, where the operand's is not that of a call with these sizes; else None."""
        if self.axes == (ANY,):
            return None
        axes = self.axes[1:] if self.axes[0] is BATCH else self.axes
        own = shape[len(shape) - len(axes) :]
        expected = [axis.size(sizes) for axis in axes]
        filled = tuple(a if b is None else b for a, b in zip(own, expected, strict=False))
        batch = sizes.batch if self.axes[0] is BATCH else ()
        lead = shape[: len(shape) - len(axes)]
        fits = len(axes) <= len(shape) <= len(batch) + len(axes)
        fits = fits and all(a in (1, b) for a, b in zip(lead[::-1], batch[::-1], strict=False))
        for axis, a, b in zip(axes, own, expected, strict=False):
            fits = fits and (b is None or a == b or (axis.shared and a == 1))
        return None if fits else (*batch, *filled)


@dataclass(frozen=True)
class KernelNumber:
    """A number that the kernels read. type: as C writes it; in_graphs: as the schema of an operator does.

    as_it_is: whether the member of its name holds it, and nothing else has to be said.
    """

    name: str
    type: str
    in_graphs: str
    default: Any
    about: str
    as_it_is: bool = True

    @property
    def members(self) -> tuple[Member, ...]:
        return (Member(self.type, self.name, self.about),)


def members_of(declared: Iterable[KernelOperand | KernelNumber]) -> tuple[Member, ...]:
    """The members of all, one behind another."""
    return tuple(member for one in declared for member in one.members)


def full(t: Tensor) -> Tensor:
    """With an axis of heads at least."""
    return t.reshape((1,) * (3 - t.dim()) + tuple(t.shape)) if t.dim() < 3 else t
