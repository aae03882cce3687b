"""Plans of calls that will be differentiated: their forward, and their backward from what it kept."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.backends.base import Example, ForwardResult, PlanInputs
from regard.backends.native.abi import LEAVES, BackwardPlanArguments, GradientArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.bind import bind
from regard.backends.native.c_structs import Struct
from regard.backends.native.call_template import members_of_entry
from regard.backends.native.direct import direct
from regard.backends.native.families import Gradients, KernelFamily
from regard.backends.native.ffi import failure, library
from regard.backends.native.launch import call_of, natural_row_stats, run_backward
from regard.backends.native.per_call import PerCall
from regard.backends.native.plan import ForwardPlan
from regard.core.state import RowStats


@dataclass(frozen=True)
class PlannedGradients:
    """Which gradients the calls of a plan have.

    needs    whether q, k, v and each of the leaves has one
    learned  which of the leaves is learned; None: none is
    order    which of the kernel's results is the gradient of q, of k, of v and of each of the leaves
    """

    needs: tuple[bool, ...]
    learned: int | None
    order: tuple[int | None, ...]

    @staticmethod
    def of(needs: tuple[bool, ...], learned: int | None) -> PlannedGradients:
        results = (0, 1, 2, *(3 if n == learned else None for n in range(len(needs) - 3)))
        return PlannedGradients(
            needs, learned, tuple(n if need else None for n, need in zip(results, needs, strict=True))
        )


class TrainingPlan(ForwardPlan):
    """Calls of one structure that will be differentiated, and their backward.

    Sums stay in float32 between the two: `out` is that of the kernel, the caller's is `out` in q's dtype.

    gradients           which there are
    backward_template   the struct of a backward, without what differs from call to call
    backward_constants  what native/python/ fills in such a struct from; None: Python makes the backward
    """

    def __init__(self, family: KernelFamily, args: KernelArgs, example: Example, per_call: PerCall) -> None:
        super().__init__(family, args, example, per_call, training=True)
        learned, addresses = family.learned(example.problem), [t.data_ptr() for t in example.leaves]
        which = None if learned is None else addresses.index(learned.data_ptr())
        self.gradients = PlannedGradients.of(example.needs, which)
        self.backward_template = family.backward_struct(self.template.struct)
        alone = type(self.backward_template) is GradientArguments and which is None
        served = alone and len(self.template.leaves) <= LEAVES
        self.backward_constants = self._backward_constants() if served else None

    def _backward_constants(self) -> BackwardPlanArguments:
        """What differentiate() of native/python/ fills in a backward's struct from."""
        return BackwardPlanArguments(
            gradients=ctypes.addressof(self.backward_template),
            axes=self.axes.operand,
            needs=(ctypes.c_int32 * 3)(*self.gradients.needs[:3]),
            **members_of_entry(library().entry(type(self.backward_template))),
            **self.template.leaf_members(),
        )

    def backward_of_saved(
        self, kernel: Any, saved: tuple[Tensor, ...], cotangent: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        """See base.TrainingPlan."""
        if self.backward_constants is None:
            return None
        found = direct().differentiate(ctypes.addressof(self.backward_constants), kernel[0], saved, cotangent)
        if isinstance(found, int):
            raise failure(found)
        return None if found is None else (*found, *(None,) * (len(self.gradients.needs) - 3))

    def run_for_backward(self, call: PlanInputs) -> ForwardResult | None:
        """The call, made: its out and row statistics, and its struct with what that leads to."""
        row_stats = self._empty_row_stats(call)
        made = self._run_kernel(call, row_stats)
        if made is None:
            return None
        out, struct, _ = made
        return ForwardResult(out, (row_stats,), (bytes(struct), *struct.held))

    def run_with_stats(self, call: PlanInputs) -> tuple[Tensor, RowStats] | None:
        """out and the natural statistics of its rows, both without a head axis where the caller has none."""
        forward = self.run_for_backward(call)
        if forward is None:
            return None
        (row_stats,) = forward.saved
        return forward.out, natural_row_stats(row_stats if self.axes.headed else row_stats.squeeze(-3))

    def backward(
        self, forward: ForwardResult, given: Sequence[Tensor], leaves: Sequence[Tensor], g_out: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        """See base.TrainingPlan."""
        gradients, family, axes = self.gradients, self.family, self.axes.operand
        made = family.empty_gradients(given, self.axes.heads, gradients.needs)
        struct = self._struct_of_forward(forward, given, leaves)
        named = dict(zip(family.gradients, made, strict=True))
        run_backward(family.backward_struct, struct, {"dout": self._cotangent(g_out), **named}, axes)
        return self._in_order(made, given, leaves)

    def _in_order(
        self, made: Gradients, given: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """The kernel's results, as gradients of q, k, v and each of the leaves."""
        learned = self.gradients.learned
        found = self.family.own(made, given, None if learned is None else leaves[learned])
        return tuple([None if n is None else found[n] for n in self.gradients.order])

    def _empty_row_stats(self, call: PlanInputs) -> Tensor:
        shape = (*self.axes.batch, self.axes.heads, call.nq, 2)
        return torch.empty(shape, dtype=torch.float32, device="cpu")

    def _struct_of_forward(self, forward: ForwardResult, given: Sequence[Tensor], leaves: Sequence[Tensor]) -> Struct:
        """What the forward of a call read, and what it wrote."""
        struct = type(self.template.struct).from_buffer_copy(forward.kernel[0])
        q, k, v = given
        (row_stats,) = forward.saved
        named = {"q": q, "k": k, "v": v, "out": forward.out, "row_stats": row_stats}
        bind(call_of(struct), named, self.axes.operand)
        self.template.set_leaves(struct, leaves)
        return struct

    def _cotangent(self, g_out: Tensor) -> Tensor:
        """That of out, as the backward reads it."""
        return self.family.cotangent(g_out if g_out.stride(-1) == 1 else g_out.contiguous()).resolve_neg()
