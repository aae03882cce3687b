"""Plans: the struct of a call, kept for other calls of its structure and filled with what changes from call to call.

What changes: where the caller's tensors lie, how many queries and keys there are, their strides, positions, the seed of
dropout, the intervals of a mask whose tensors decide them (Lengths, Documents), a mask that is a function or is written
out from its tensors, what a program reads that modifiers of one's own became, and a table of relative biases.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from itertools import chain
from struct import Struct as Packer
from typing import Any

from torch import Tensor

from regard.backends.base import Example, PlanInputs
from regard.backends.native.abi import AXES, CODES, LEAVES, CallArguments, PlanArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.bind import bind
from regard.backends.native.c_structs import Struct
from regard.backends.native.call_operands import INTERVAL_NAMES, OF_LENGTHS
from regard.backends.native.call_template import CallTemplate, members_of_entry
from regard.backends.native.direct import direct
from regard.backends.native.families import NAME_AT, KernelFamily
from regard.backends.native.ffi import failure, parallel
from regard.backends.native.held_masks import beside_held
from regard.backends.native.launch import (
    THREAD_WORK,
    VISIBLE,
    arguments,
    call_of,
    clear,
    empty_row_stats,
    set_operands,
    set_visible,
)
from regard.backends.native.lower_intervals import lower_intervals, lower_rule
from regard.backends.native.modifiers.distance import near, position_operands
from regard.backends.native.per_call import PerCall, RuleBounds
from regard.backends.native.repeated_mask import RepeatedMask
from regard.core.deferred import DeferredRows
from regard.core.positions import Span, counted, resolve_positions
from regard.core.region import Frame
from regard.scores.algebra import Score

_BAD_INTERVAL = CODES["REGARD_BAD_INTERVAL"]  # the numbers of a mask are wrong: the call without a plan says so
_SEED = Packer("=Q")


@dataclass(frozen=True)
class CallAxes:
    """The axes that the calls of a plan share.

    headed   whether the caller's tensors have an axis of heads
    operand  how many axes q, k, v and out have, heads included
    """

    batch: tuple[int, ...]
    heads: int
    headed: bool
    operand: int

    def with_heads(self, t: Tensor) -> Tensor:
        """With the axes of the kernels' operands."""
        return t if t.dim() == self.operand else t.unsqueeze(-3)

    def frame(self, call: PlanInputs) -> Frame:
        at = resolve_positions(call.positions, call.nq, call.nk, self.batch, None, call.q.device)
        return Frame(self.batch, self.heads, call.nq, call.nk, at, self.headed)


class ForwardPlan:
    """Calls of one structure, forward.

    family      their kernels
    training    whether they will be differentiated
    axes        of their tensors
    per_call    what is lowered for each call
    template    the struct of a call
    of_pairs    operands whose strides each call has its own of, and which of its leaves each is
    constants   what native/python/ fills in a struct from
    of_lengths  whether the plan serves one number of queries and of keys only
    remembered  whether attend() of native/python/ may find it: only what C++ knows changes
    positions   the last span that was read as tensors, and these as operands
    framed      the last frame, and the numbers that it follows from: all layers of a model have the same at each step
    """

    def __init__(
        self, family: KernelFamily, args: KernelArgs, example: Example, per_call: PerCall, training: bool = False
    ) -> None:
        problem, out = example.problem, example.out
        self.family, self.training = family, training
        self.axes = CallAxes(problem.frame.batch, problem.frame.heads, problem.frame.headed, args.q.dim())
        self.per_call = per_call
        results = {"out": self.axes.with_heads(out.float() if training else out)}
        if training:
            results["row_stats"] = empty_row_stats(args)
        struct = family.struct(problem, arguments(args, **results))
        computed = args.operands.keys() & per_call.names()
        for name in computed:
            clear(struct, name)
        # what was made for this structure lives as long as the plan; the tensors of one call do not
        given = chain(*(t.parts if isinstance(t, DeferredRows) else (t,) for t in example.given))
        of_call = (*given, *example.leaves, *results.values(), *(args.operands[name] for name in computed))
        addresses = {t.data_ptr() for t in of_call}
        held = tuple([t for t in struct.held if t.data_ptr() not in addresses])
        # positions in tensors, and lengths that do not lie as the kernels read them, are lowered call by call
        by_tensors = per_call.rule and example.positions is not None and example.positions.span is None
        found = VISIBLE if per_call.intervals_from_tensors or per_call.mask is not None or by_tensors else slice(0, 0)
        offsets = [at for at in per_call.leaves if not found.start <= at < found.stop]
        self.template = CallTemplate.of(struct, held, offsets, example.leaves)
        self.of_pairs = tuple([(NAME_AT[at], n) for at, n in self.template.leaves if n in example.of_pairs])
        # a table of intervals has a row for each query: the caller's, whose number may not change, or one made for them
        start = (
            None
            if per_call.rule or per_call.intervals_from_tensors or "start" in computed
            else args.operands.get("start")
        )
        of_caller = start is not None and start.data_ptr() in {t.data_ptr() for t in example.leaves}
        rebound = {name for name, _ in self.of_pairs}
        of_lengths = OF_LENGTHS & (args.operands.keys() - computed - rebound)
        self.of_lengths = (start is not None and not of_caller) or bool(of_lengths)
        queries = problem.frame.nq if of_caller else 0
        self.constants = self._constants(example, family.pair_work(problem, args), queries, training)
        self.positions: tuple[Any, dict[str, Tensor]] = None, {}
        self.framed: tuple[Any, Frame] = None, example.problem.frame
        made = per_call.modifiers is not None or per_call.mask is not None
        changing = per_call.intervals_from_tensors or per_call.needs_positions or made or self.of_lengths
        whole = type(struct) is CallArguments  # native/python/ knows no other
        self.remembered = (
            whole and not changing and len(self.template.leaves) <= LEAVES and not args.number("threshold")
        )

    def _constants(self, example: Example, pair_work: int, queries: int, training: bool) -> PlanArguments:
        """What bind() fills in a call's struct from."""
        problem, (*lead, _, dv) = example.problem, example.out.shape
        bounds = self.per_call.rule or RuleBounds(0, 0, False)
        return PlanArguments(
            call=ctypes.addressof(self.template.struct),
            axes=self.axes.operand,
            lead=(ctypes.c_int64 * (AXES + 1))(*lead),
            leads=len(lead),
            dv=dv,
            pair_work=pair_work,
            thread_work=THREAD_WORK,
            before=bounds.before,
            after=bounds.after,
            bounded=bounds.positional,
            positional=problem.mask.compares_positions() or problem.score.compares_positions(),
            float_out=training,
            queries=queries,
            **members_of_entry(self.template.entry),
            **self.template.leaf_members(),
        )

    def run(self, call: PlanInputs) -> Tensor | None:
        """out; None where the call must run without a plan, which says what is wrong, or looks at the mask anew."""
        made = self._run_kernel(call, None)
        return None if made is None else made[0]

    def remember(self, call: PlanInputs, score: Score, sink: Tensor | float | None, outlines: tuple[Any, ...]) -> None:
        """Lets attend() of native/python/ find this plan for calls like this one, if only what it knows changes."""
        if self.remembered and (call.positions is None or call.positions.span is not None):
            given = call.q, call.k, call.v, score, call.mask, call.positions, sink
            direct().remember(ctypes.addressof(self.constants), self, outlines, *given)

    def _run_kernel(
        self, call: PlanInputs, row_stats: Tensor | None
    ) -> tuple[Tensor, Struct, tuple[Tensor, ...]] | None:
        """Runs the kernel: out, the struct of the call, which holds what it leads to besides the call's own tensors.

        Third what it holds without the operands of modifiers that were made for this call.
        """
        q, k, v, leaves, nq, nk, _, positions, seed = call
        per_call, template = self.per_call, self.template
        span = None if positions is None else positions.span or ()
        if span and span.by_sequence():
            span = ()  # shifts are a tensor here, which the call holds
        struct = template.copy()
        address = ctypes.addressof(struct)
        out = direct().bind(ctypes.addressof(self.constants), address, q, k, v, span)
        if out is None:
            return None
        if row_stats is not None:
            bind(call_of(struct), {"row_stats": row_stats})
        if template.leaves:
            template.set_leaves(struct, leaves)
        if self.of_pairs:
            bind(call_of(struct), {name: leaves[n] for name, n in self.of_pairs})
        if per_call.similarity is not None and not per_call.similarity.fill(struct, leaves):
            return None
        if per_call.needs_positions and span != ():
            self._set_positions(struct, span or Span((0, nq), (0, nk), None))
        if (per_call.intervals_from_tensors or span == ()) and not self._fill_intervals_and_positions(struct, call):
            return None
        if per_call.mask is not None and not self._set_mask(struct, call, per_call.mask):
            return None
        held = struct.held
        if per_call.modifiers is not None:
            operands = per_call.modifiers.operands(self.frame(call), leaves)
            if operands is None:
                return None
            set_operands(struct, operands)
        if seed is not None:
            # a call that is refused, or runs without a plan, draws no seed
            if per_call.checks_mask_shape and call.mask.shape_error(self.axes.frame(call)) is not None:
                return None
            _SEED.pack_into(struct, CallArguments.seed.offset, seed())
        code = template.entry(address, parallel())
        if code == _BAD_INTERVAL:
            return None
        if code:
            raise failure(code)
        return out, struct, held

    def frame(self, call: PlanInputs) -> Frame:
        """The index space of a call."""
        span = None if call.positions is None else call.positions.span
        if call.positions is not None and span is None:
            return self.axes.frame(call)
        numbers = call.nq, call.nk, None if span is None else span[:2]
        known, last = self.framed
        if known != numbers:
            last = self.axes.frame(call)
            self.framed = numbers, last
        return last

    def _fill_intervals_and_positions(self, struct: Struct, call: PlanInputs) -> bool:
        """Fills in what depends on the numbers in positions and in the mask; whether they are right."""
        nq, nk, rest = call.nq, call.nk, beside_held(call.mask)
        rule = rest.rule()
        span = Span((0, nq), (0, nk), None) if call.positions is None else call.positions.span
        if rule is not None and span is not None and not span.by_sequence() and call.seed is None:
            # the kernel finds out whether the numbers are right
            for ids, n in ((rule.q_ids, nq), (rule.k_ids, nk)):
                if ids is not None and ids.shape[-1] != n:
                    return False
            set_visible(struct, lower_rule(rule, span.offset()))
            return True
        frame = self.axes.frame(call)
        if call.mask.shape_error(frame) is not None:
            return False
        if self.per_call.intervals_from_tensors or self.per_call.rule:
            intervals = lower_intervals(rest, frame)
            if intervals is None:
                return False
            set_visible(struct, intervals)
        if self.per_call.needs_positions:
            if self.per_call.positions_must_be_near and not near(frame.positions):
                return False
            set_operands(struct, position_operands(frame.positions))
        return True

    def _set_mask(self, struct: Struct, call: PlanInputs, mask: RepeatedMask) -> bool:
        """Fills in what the kernels read of a mask that each call lowers; whether there is such a thing."""
        # kept until the backward; where that is large, a call without a plan lowers the mask again instead
        most = call.q.nbytes + call.k.nbytes if self.training else math.inf
        found = mask.operands(self.frame(call), call.mask, most)
        if found is None:
            return False
        operands = {name: t for name, t in found.items() if name not in INTERVAL_NAMES}
        set_visible(struct, {name: x for name, x in found.items() if name in INTERVAL_NAMES})
        set_operands(struct, operands)
        return True

    def _set_positions(self, struct: Struct, span: Span) -> None:
        """Tells the struct the positions of a span as tensors, which the next call may need again."""
        known, operands = self.positions  # once: another thread may replace it
        if known != span[:2]:
            operands = position_operands(counted(*span[:2]))
            self.positions = span[:2], operands
        set_operands(struct, operands)
