"""Plans of calls that will be differentiated: their forward, and their backward from what it kept."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from struct import Struct as Packer
from typing import Any

import torch
from torch import Tensor

from regard.backends.base import Example, ForwardResult, PlanInputs
from regard.backends.native.abi import LEAVES, BackwardPlanArguments, GradientArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.bind import bind
from regard.backends.native.c_structs import address_of
from regard.backends.native.families import KernelFamily
from regard.backends.native.ffi import failure
from regard.backends.native.launch import call_of, library, natural_row_stats, run_backward
from regard.backends.native.plan import ForwardPlan
from regard.core.state import RowStats

_ADDRESS = Packer("=q")


class TrainingPlan(ForwardPlan):
    """Calls of one structure that will be differentiated, and their backward.

    Sums stay in float32 between the two: `out` is that of the kernel, the caller's is `out` in q's dtype.
    """

    def __init__(self, family: KernelFamily, args: KernelArgs, example: Example) -> None:
        super().__init__(family, args, example, training=True)
        learned, addresses = family.learned(example.problem), [t.data_ptr() for t in example.leaves]
        self.learned = None if learned is None else addresses.index(learned.data_ptr())
        # which of the kernel's results is the gradient of each tensor: q, k, v, and what is learned of the leaves
        of = (0, 1, 2, *(3 if n == self.learned else None for n in range(len(addresses))))
        self.order = tuple(n if need else None for n, need in zip(of, example.needs, strict=True))
        self.needs = example.needs
        self.others = (None,) * len(addresses)  # gradients of leaves, where none is learned
        self.template = family.backward_struct(self.struct)
        alone = type(self.template) is GradientArguments and self.learned is None and len(self.leaves) <= LEAVES
        self.backward_constants = self._backward_constants() if alone else None
        self.backward_address = None if self.backward_constants is None else ctypes.addressof(self.backward_constants)

    def _backward_constants(self) -> BackwardPlanArguments:
        """What differentiate() of native/python/ fills in a backward's struct from."""
        return BackwardPlanArguments(
            gradients=ctypes.addressof(self.template),
            entry=ctypes.cast(library().entry(type(self.template)), ctypes.c_void_p).value,  # pyright: ignore[reportArgumentType]
            parallel=self.parallel,
            axes=self.axes,
            needs=(ctypes.c_int32 * 3)(*self.needs[:3]),
            **self._leaf_members(),
        )

    def backward_of_saved(
        self, kernel: Any, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        """See base.TrainingPlan."""
        if self.backward_address is None:
            return None
        found = self.direct.differentiate(self.backward_address, kernel[0], saved, cotangent)
        if isinstance(found, int):
            raise failure(found)
        return None if found is None else (*found, *self.others)

    def run_for_backward(self, call: PlanInputs) -> ForwardResult | None:
        """The call, made: its out and row statistics, and its struct with what that leads to."""
        row_stats = torch.empty((*self.batch, self.heads, call.nq, 2), dtype=torch.float32, device="cpu")
        made = self._made(call, row_stats)
        return None if made is None else ForwardResult(made[0], (row_stats,), (bytes(made[1]), *made[1].held))

    def run_with_stats(self, call: PlanInputs) -> tuple[Tensor, RowStats] | None:
        """out and the natural statistics of its rows, both without a head axis where the caller has none."""
        forward = self.run_for_backward(call)
        if forward is None:
            return None
        (row_stats,) = forward.saved
        return forward.out, natural_row_stats(row_stats if self.headed else row_stats.squeeze(-3))

    def backward(
        self, forward: ForwardResult, given: Sequence[Tensor], leaves: Sequence[Tensor], g_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of what is given and of the leaves, from the cotangent of out."""
        g_out = self.family.cotangent(g_out if g_out.stride(-1) == 1 else g_out.contiguous()).resolve_neg()
        made = self.family.empty_gradients(given, self.heads, self.needs)
        struct = type(self.struct).from_buffer_copy(forward.kernel[0])
        q, k, v = given
        (row_stats,) = forward.saved
        bind(call_of(struct), {"q": q, "k": k, "v": v, "out": forward.out, "row_stats": row_stats}, self.axes)
        for at, n in self.leaves:
            _ADDRESS.pack_into(struct, at, address_of(leaves[n]))
        gradients = dict(zip(self.family.gradients, made, strict=True))
        run_backward(self.family.backward_struct, struct, {"dout": g_out, **gradients}, self.axes)
        found = self.family.own(made, given, None if self.learned is None else leaves[self.learned])
        return tuple([None if n is None else found[n] for n in self.order])
