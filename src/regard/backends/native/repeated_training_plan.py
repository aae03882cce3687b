"""Plans of calls that will be differentiated, and whose modifiers' operands are computed at each call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from regard.backends.base import Example, ForwardResult, PlanInputs
from regard.backends.native.args import KernelArgs
from regard.backends.native.bind import bind
from regard.backends.native.families import KernelFamily
from regard.backends.native.ffi import library
from regard.backends.native.launch import clear, set_operands
from regard.backends.native.lowered_anew import LoweredAnew
from regard.backends.native.modifiers.base import RepeatedModifiers
from regard.backends.native.training_plan import TrainingPlan


class RepeatedTrainingPlan(TrainingPlan):
    """Calls of one structure with modifiers of one's own, or with a table of relative biases.

    The backward computes the operands of the modifiers again, of a program with the derivatives by the modifiers'
    tensors. What the forward's program read may be as large as the weights, and is not kept.

    modifiers  what computes the operands
    wanted     whether each of their tensors has a gradient
    """

    def __init__(
        self, family: KernelFamily, args: KernelArgs, example: Example, anew: LoweredAnew, modifiers: RepeatedModifiers
    ) -> None:
        super().__init__(family, args, example, anew)
        self.modifiers = modifiers
        self.wanted = [example.needs[3 + n] for n in modifiers.tensors]
        self.backward_constants = None

    def run_for_backward(self, call: PlanInputs) -> ForwardResult | None:
        """The call, made: its out and row statistics, its struct with what that leads to, and its frame."""
        row_stats = self._empty_row_stats(call)
        made = self._made(call, row_stats)
        if made is None:
            return None
        out, struct, held = made
        return ForwardResult(out, (row_stats,), (bytes(struct), self.frame(call), *held))

    def backward(
        self, forward: ForwardResult, given: Sequence[Tensor], leaves: Sequence[Tensor], g_out: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        """See base.TrainingPlan."""
        again, mask = self.modifiers.gradients(forward.kernel[1], leaves, self.wanted), self.anew.mask
        if again is None or (mask is not None and not mask.leaves_room(again.operands)):
            return None
        made = self.family.empty_gradients(given, self.axes.heads, self.gradients.needs)
        call = self._struct_of_forward(forward, given, leaves)
        for name in self.modifiers.names:
            clear(call, name)
        set_operands(call, again.operands)
        struct = self.family.backward_struct(call)
        named = dict(zip(self.family.gradients, made, strict=True))
        bind(struct, {"dout": self._cotangent(g_out), **named}, self.axes.operand)
        by_operand = again.empty()
        bind(struct, {f"d{name}": g for name, g in by_operand.items()})
        library().run(struct)
        results = list(self._in_order(made, given, leaves))
        found = iter(again.of_tensors(by_operand))
        for n, wanted in zip(self.modifiers.tensors, self.wanted, strict=True):
            if wanted:
                results[3 + n] = next(found).to(leaves[n].dtype)
        return tuple(results)
