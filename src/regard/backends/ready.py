"""Calls of the native kernels made ready for others of their structure: structs filled but for a few addresses."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from regard.backends.library import CODES, Arguments, Operand, no_memory, parallel
from regard.backends.lowering import Lowered
from regard.backends.operation import arguments, library, operand
from regard.backends.training import Gradients

_LEAVES = ("allowed", "bias", "slopes", "sink")
_KEPT = 1 << 20  # bytes made for a structure (intervals, tile maps) that are worth keeping


class Ready:
    """A call whose struct is filled but for the addresses of what changes from call to call.

    `leaves`: tensors of the score and the mask, which the kernels read where they lie.
    """

    def __init__(self, lowered: Lowered, given: tuple[Tensor, ...], out: Tensor, leaves: tuple[Tensor, ...]) -> None:
        told, addresses = lowered.tensors(), [t.data_ptr() for t in leaves]
        # what was made for this structure lives as long; the tensors of one call do not
        self.kept = _made(told, addresses)
        self.shape, self.dtype = tuple(out.shape), out.dtype
        # the fastest ways that torch has: twice as fast as empty of a torch.Size
        self.like = given[0].is_contiguous() and given[0].shape == out.shape and given[0].dtype == out.dtype
        self.call = self._filled(lowered, out)
        self.reference = ctypes.byref(self.call)
        kernels = library()
        self.again, self.again_backward, self.parallel = kernels.again, kernels.again_backward, parallel()
        held = [told[name].data_ptr() if name in told else None for name in _LEAVES]
        self.places = tuple(addresses.index(a) if a in addresses else None for a in held)

    def _filled(self, lowered: Lowered, out: Tensor) -> Arguments:
        return arguments(lowered, _lifted(out, lowered), None, None)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, leaves: list[Tensor]) -> Tensor:
        out = self._room(q)
        self._run(q, k, v, out, 0, leaves)
        return out

    def _room(self, q: Tensor) -> Tensor:
        return torch.empty_like(q) if self.like else torch.empty(*self.shape, dtype=self.dtype)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: int, leaves: list[Tensor]) -> None:
        at = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), norm)
        if self.again(self.reference, self.parallel, *at, *self._fresh(leaves)):
            raise no_memory()

    def _fresh(self, leaves: list[Tensor]) -> tuple[int, ...]:
        """Addresses of the leaves; one of 0 leaves the struct's own."""
        return tuple([0 if n is None else leaves[n].data_ptr() for n in self.places]) if leaves else (0, 0, 0, 0)


class Trained(Ready):
    """A call that will be differentiated, and its backward: gradients of those of q, k and v that `needs` names.

    Sums stay in float32 between the two: `out` is that of the kernel, the caller's is `out` in q's dtype.
    """

    def __init__(
        self,
        lowered: Lowered,
        given: tuple[Tensor, ...],
        out: Tensor,
        leaves: tuple[Tensor, ...],
        needs: tuple[bool, ...],
    ) -> None:
        super().__init__(lowered, given, out.float(), leaves)
        self.needs = needs
        like = Gradients(self.call, dout=operand(_lifted(out, lowered)), dout_dtype=CODES[out.dtype])
        like.gradient_dtype = CODES[lowered.q.dtype]
        for name, t, need in zip(("dq", "dk", "dv"), given, needs, strict=True):
            if need:
                setattr(like, name, operand(_lifted(torch.empty_like(t), lowered)))
        self.like_backward, self.backward_reference = like, ctypes.byref(like)
        self.headed = lowered.q.dim() == given[0].dim()

    def _filled(self, lowered: Lowered, out: Tensor) -> Arguments:
        self.rows = (*lowered.shape, 2)
        return arguments(lowered, _lifted(out, lowered), None, torch.empty(self.rows))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        """out, and what the backward reads besides."""
        out, norm = self._room(q), torch.empty(*self.rows, dtype=torch.float32)
        self._run(q, k, v, out, norm.data_ptr(), leaves)
        return out, norm

    def backward(
        self, given: tuple[Tensor, ...], leaves: list[Tensor], kept: tuple[Tensor, Tensor], g_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of q, k and v, from the cotangent of out."""
        found = [torch.empty_like(t) if need else None for t, need in zip(given, self.needs, strict=True)]
        g_out = g_out if g_out.stride(-1) == 1 else g_out.contiguous()
        addresses = (t.data_ptr() for t in (*given, *kept, g_out))
        places = [0 if g is None else g.data_ptr() for g in found]
        strides = None if g_out.is_contiguous() else ctypes.byref(self._strided(g_out))
        at = (*addresses, *self._fresh(leaves), *places)
        if self.again_backward(self.backward_reference, self.parallel, *at, strides):
            raise no_memory()
        return tuple(found)

    def _strided(self, g_out: Tensor) -> Operand:
        return operand(g_out if self.headed else g_out.unsqueeze(-3))


def ready(lowered: Lowered, given: tuple[Tensor, ...], leaves: tuple[Tensor, ...], out: Tensor) -> Ready | None:
    """The call made ready for others of its structure; None where the kernels read what depends on content.

    given: the caller's q, k, v, which must be what the kernels read; leaves: every other tensor of the call; out: like
    what the caller gets.
    """
    return Ready(lowered, given, out, leaves) if _repeats(lowered, given, leaves) else None


def trained(
    lowered: Lowered, given: tuple[Tensor, ...], leaves: tuple[Tensor, ...], out: Tensor, needs: tuple[bool, ...]
) -> Trained | None:
    """The same for calls that will be differentiated. None too where one of q, k, v is read several times."""
    read = (lowered.q, lowered.k, lowered.v)
    if any(t.numel() != mine.numel() for t, mine in zip(read, given, strict=True)):
        return None
    return Trained(lowered, given, out, leaves, needs) if _repeats(lowered, given, leaves) else None


def _repeats(lowered: Lowered, given: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> bool:
    told = lowered.tensors()
    read = {told[name].data_ptr() for name in _LEAVES if name in told}
    addresses = [t.data_ptr() for t in leaves]
    if [told[name].data_ptr() for name in ("q", "k", "v")] != [t.data_ptr() for t in given]:
        return False
    # one tensor in two roles: the next call may have two
    if any(a not in read for a in addresses) or len(set(addresses)) < len(addresses):
        return False
    empty = 0 in (*lowered.shape, lowered.k.shape[-2], lowered.v.shape[-1])
    return not empty and sum(t.nbytes for t in _made(told, addresses)) <= _KEPT


def _made(told: dict[str, Tensor], addresses: list[int]) -> list[Tensor]:
    """What was made for a structure, and belongs to no caller."""
    return [t for name, t in told.items() if name not in ("q", "k", "v") and t.data_ptr() not in addresses]


def _lifted(t: Tensor, lowered: Lowered) -> Tensor:
    """With the axes of the kernels' operands: a head axis, where the caller has none."""
    return t if t.dim() == lowered.q.dim() else t.unsqueeze(-3)
