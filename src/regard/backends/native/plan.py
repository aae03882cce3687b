"""Calls of the native kernels made ready for others of their structure: structs filled but for a few addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from regard.backends.base import Example
from regard.backends.native.args import KernelArgs
from regard.backends.native.ffi import CODES, Arguments, Operand, Struct, failure, parallel
from regard.backends.native.launch import arguments, library, operand
from regard.core.problem import Problem

_KEPT = 1 << 20  # bytes made for a structure (intervals, tile maps) that are worth keeping
Made = Sequence[Tensor | None]


class Kernels(Protocol):
    """What Ready asks a family of kernels."""

    again: ClassVar[str]
    again_backward: ClassVar[str]

    def leaves(self, problem: Problem, args: KernelArgs) -> tuple[Tensor | None, ...]:
        """The tensors besides q, k and v that are read where the caller has them, in the order of the entries."""
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

    def struct(self, problem: Problem, call: Arguments) -> Struct:
        """What the forward reads."""
        ...

    def pulled(self, struct: Struct, dout: Operand, made: Made, dtypes: tuple[int, int]) -> Struct:
        """What the backward reads; made: what it writes; dtypes: those of the cotangent and of q."""
        ...

    def room(self, given: Sequence[Tensor], heads: int, needs: tuple[bool, ...]) -> Made:
        """What the backward writes: gradients of q, k and v, and of the leaf that is learned."""
        ...

    def own(self, made: Made, given: Sequence[Tensor], learned: Tensor | None) -> Made:
        """The same in the dtypes and shapes of what they are gradients of."""
        ...


class Ready:
    """A call whose struct is filled but for the addresses of what changes from call to call."""

    def __init__(self, family: Kernels, args: KernelArgs, example: Example, norm: Tensor | None = None) -> None:
        self.family = family
        read, addresses = family.leaves(example.problem, args), [t.data_ptr() for t in example.leaves]
        held = [None if t is None else t.data_ptr() for t in read]
        self.places = tuple(addresses.index(a) if a in addresses else None for a in held)
        out = example.out
        self.shape, self.dtype = tuple(out.shape), out.dtype
        # the fastest ways that torch has: twice as fast as empty of a torch.Size
        q = example.given[0]
        self.like = q.is_contiguous() and q.shape == out.shape and q.dtype == out.dtype
        call = arguments(args, _lifted(out, args), None, norm)
        # what was made for this structure lives as long; the tensors of one call do not
        theirs = {t.data_ptr() for t in (*example.given, *example.leaves, out, norm) if t is not None}
        call.held = [t for t in call.held if t.data_ptr() not in theirs]
        self.struct = family.struct(example.problem, call)
        self.reference, self.parallel = ctypes.byref(self.struct), parallel()
        self.again = library().again(family.again)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        out = self._room(q)
        self._run(q, k, v, out, 0, leaves)
        return out

    def _room(self, q: Tensor) -> Tensor:
        return torch.empty_like(q) if self.like else torch.empty(*self.shape, dtype=self.dtype)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: int, leaves: Sequence[Tensor]) -> None:
        at = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), norm)
        if code := self.again(self.reference, self.parallel, *at, *self._fresh(leaves)):
            raise failure(code)

    def _fresh(self, leaves: Sequence[Tensor]) -> list[int]:
        """Addresses of the leaves; one of 0 leaves the struct's own."""
        return [0 if n is None else leaves[n].data_ptr() for n in self.places]


class Trained(Ready):
    """A call that will be differentiated, and its backward.

    Sums stay in float32 between the two: `out` is that of the kernel, the caller's is `out` in q's dtype.
    """

    def __init__(self, family: Kernels, args: KernelArgs, example: Example) -> None:
        self.rows = (*args.shape, 2)
        summed = replace(example, out=example.out.float())
        super().__init__(family, args, summed, torch.empty(self.rows))
        learned, addresses = family.learned(example.problem), [t.data_ptr() for t in example.leaves]
        self.learned = None if learned is None else addresses.index(learned.data_ptr())
        self.needs, self.heads = example.needs, args.shape[-2]
        self.headed = example.out.dim() == args.q.dim()
        room = family.room(example.given, self.heads, self.needs)
        made = [None if t is None else _lifted(t, args) for t in room]
        dtypes = CODES[example.out.dtype], CODES[args.q.dtype]
        self.pulled = family.pulled(self.struct, operand(_lifted(example.out, args)), made, dtypes)
        self.reference_backward = ctypes.byref(self.pulled)
        self.again_backward = library().again(family.again_backward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """out, and what the backward reads besides."""
        out, norm = self._room(q), torch.empty(*self.rows, dtype=torch.float32)
        self._run(q, k, v, out, norm.data_ptr(), leaves)
        return out, norm

    def backward(
        self, given: Sequence[Tensor], leaves: Sequence[Tensor], kept: tuple[Tensor, Tensor], g_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of what is given and of the leaves, from the cotangent of out."""
        g_out = self.family.cotangent(g_out if g_out.stride(-1) == 1 else g_out.contiguous())
        made = self.family.room(given, self.heads, self.needs)
        strides = None if g_out.is_contiguous() else ctypes.byref(self._strides(g_out))
        at = [t.data_ptr() for t in (*given, *kept, g_out)] + self._fresh(leaves)
        at += [0 if g is None else g.data_ptr() for g in made]
        if code := self.again_backward(self.reference_backward, self.parallel, *at, strides):
            raise failure(code)
        learned = None if self.learned is None else leaves[self.learned]
        found = self.family.own(made, given, learned)
        rest = [found[3] if n == self.learned else None for n in range(len(leaves))]
        return tuple(g if need else None for g, need in zip((*found[:3], *rest), self.needs, strict=True))

    def _strides(self, g_out: Tensor) -> Operand:
        return operand(g_out if self.headed else g_out.unsqueeze(-3))


def repeats(family: Kernels, args: KernelArgs, example: Example) -> bool:
    """Whether all that changes from call to call is where the caller's tensors lie, and the kernels find gradients."""
    if family.copied(example.problem):
        return False
    read = [t.data_ptr() for t in family.leaves(example.problem, args) if t is not None]
    addresses = [t.data_ptr() for t in example.leaves]
    mine = (args.q, args.k, args.v)
    for t, own in zip(mine, example.given, strict=True):
        # converted, or read several times: then gradients are sums
        if t.data_ptr() != own.data_ptr() or (any(example.needs) and t.numel() != own.numel()):
            return False
    # one tensor in two roles: the next call may have two
    if any(a not in read for a in addresses[example.spent :]) or len(set(addresses)) < len(addresses):
        return False
    learned = family.learned(example.problem)
    for t, need in zip(example.leaves, example.needs[3:], strict=True):
        if need and t.data_ptr() in read and (learned is None or t.data_ptr() != learned.data_ptr()):
            return False
    empty = 0 in (*args.shape, *args.k.shape[-2:], args.v.shape[-1])
    return not empty and sum(t.nbytes for t in _made(args, addresses)) <= _KEPT


def _made(args: KernelArgs, addresses: list[int]) -> list[Tensor]:
    """What was made for a structure, and belongs to no caller."""
    told = args.tensors()
    return [t for name, t in told.items() if name not in ("q", "k", "v") and t.data_ptr() not in addresses]


def _lifted(t: Tensor, args: KernelArgs) -> Tensor:
    """With the axes of the kernels' operands: a head axis, where the caller has none."""
    return t if t.dim() == args.q.dim() else t.unsqueeze(-3)
