"""Plans of calls that will be differentiated, and of whose score a part is computed at each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from regard.backends.base import Example, ForwardResult, PlanInputs
from regard.backends.native.args import KernelArgs
from regard.backends.native.bind import bind
from regard.backends.native.families import KernelFamily
from regard.backends.native.ffi import library
from regard.backends.native.launch import clear, set_operands
from regard.backends.native.per_call import PerCall
from regard.backends.native.training_plan import TrainingPlan


class RepeatedTrainingPlan(TrainingPlan):
    """Calls of one structure with modifiers of one's own, with a table of relative biases, or with an Elementwise.

    The backward computes again what is made of the tensors of the score: the operands of the modifiers, the program of
    the similarity, with derivatives by those tensors. What the forward's program read may be as large as the weights,
    and is not kept.

    similarity, modifiers  what computes it; None: the first call's serves others
    """

    def __init__(self, family: KernelFamily, args: KernelArgs, example: Example, per_call: PerCall) -> None:
        super().__init__(family, args, example, per_call)
        self.similarity, self.modifiers = per_call.similarity, per_call.modifiers
        self.backward_constants = None

    def run_for_backward(self, call: PlanInputs) -> ForwardResult | None:
        """The call, made: its out and row statistics, its struct with what that leads to, and its frame."""
        row_stats = self._empty_row_stats(call)
        made = self._run_kernel(call, row_stats)
        if made is None:
            return None
        out, struct, held = made
        return ForwardResult(out, (row_stats,), (bytes(struct), self.frame(call), *held))

    def backward(
        self, forward: ForwardResult, given: Sequence[Tensor], leaves: Sequence[Tensor], g_out: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        """See base.TrainingPlan."""
        call = self._struct_of_forward(forward, given, leaves)
        learned: list[tuple[range, Callable[[], list[Tensor]]]] = []  # which of the leaves, and their gradients
        written: dict[str, Tensor] = {}
        if self.similarity is not None:
            tensors = self.similarity.tensors
            features = self.similarity.gradients(call, leaves, self._wanted(tensors))
            if features is None:
                return None
            written |= features.written
            learned.append((tensors, features.of_tensors))
        if self.modifiers is not None:
            tensors, mask = self.modifiers.tensors, self.per_call.mask
            again = self.modifiers.gradients(forward.kernel[1], leaves, self._wanted(tensors))
            if again is None or (mask is not None and not mask.leaves_room(again.operands)):
                return None
            for name in self.modifiers.names:
                clear(call, name)
            set_operands(call, again.operands)
            by_operand = again.empty()
            written |= {f"d{name}": g for name, g in by_operand.items()}
            learned.append((tensors, partial(again.of_tensors, by_operand)))
        made = self.family.empty_gradients(given, self.axes.heads, self.gradients.needs)
        struct = self.family.backward_struct(call)
        named = dict(zip(self.family.gradients, made, strict=True))
        bind(struct, {"dout": self._cotangent(g_out), **named}, self.axes.operand)
        bind(struct, written)
        library().run(struct)
        results = list(self._in_order(made, given, leaves))
        for tensors, gradients in learned:
            wanted = (n for n, want in zip(tensors, self._wanted(tensors), strict=True) if want)
            for n, g in zip(wanted, gradients(), strict=True):
                results[3 + n] = g.reshape(leaves[n].shape).to(leaves[n].dtype)
        return tuple(results)

    def _wanted(self, tensors: range) -> tuple[bool, ...]:
        """Whether each of these leaves has a gradient."""
        return tuple([self.gradients.needs[3 + n] for n in tensors])
