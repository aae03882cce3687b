"""Plans: the struct of a call, kept for other calls of its structure and filled with what changes from call to call.

What changes: where the caller's tensors lie, how many queries and keys there are, their strides, positions, the seed of
dropout, the intervals of a mask whose tensors decide them (Lengths, Documents), what a program reads that modifiers of
one's own became, and a table of relative biases.
"""

from __future__ import annotations

import ctypes
from itertools import chain
from struct import Struct as Packer
from typing import Any

from torch import Tensor

from regard.backends.base import Example, PlanInputs
from regard.backends.native.abi import (
    AXES,
    CODES,
    LEAVES,
    CallArguments,
    PlanArguments,
)
from regard.backends.native.args import KernelArgs
from regard.backends.native.bind import bind
from regard.backends.native.c_structs import Struct, address_of
from regard.backends.native.call_operands import OF_LENGTHS
from regard.backends.native.direct import direct
from regard.backends.native.families import KernelFamily
from regard.backends.native.ffi import failure, parallel
from regard.backends.native.launch import (
    THREAD_WORK,
    VISIBLE,
    arguments,
    call_of,
    clear,
    empty_row_stats,
    library,
    set_operands,
    set_places,
    set_visible,
)
from regard.backends.native.lower_mask import distances, lower_intervals, lower_rule
from regard.backends.native.plan_limits import decided_by_tensors
from regard.call.problem import Problem
from regard.core.deferred import DeferredRows
from regard.core.positions import Span, counting, resolve_positions
from regard.core.region import Frame
from regard.masks.intervals import IntervalRule
from regard.scores.algebra import Score

_BAD_INTERVAL = CODES["REGARD_BAD_INTERVAL"]  # the numbers of a mask are wrong: the general way says so
_ADDRESS, _SEED = Packer("=q"), Packer("=Q")


class ForwardPlan:
    """Calls of one structure, forward. of_lengths: it serves one number of queries and of keys only."""

    def __init__(self, family: KernelFamily, args: KernelArgs, example: Example, training: bool = False) -> None:
        problem, out = example.problem, example.out
        self.family, self.training = family, training
        self.batch, self.heads, self.headed = problem.frame.batch, problem.frame.heads, problem.frame.headed
        self.axes = args.q.dim()
        rule = problem.mask.rule()
        self.ruled = rule is not None
        # intervals that have no rule follow from the numbers in positions, where there are any
        start = args.operands.get("start")
        placed = start is not None and example.positions is not None and problem.mask.compares_positions()
        self.by_content = decided_by_tensors(problem.mask, args) or (placed and not self.ruled)
        table = None if self.ruled or self.by_content else start
        given = table is not None and table.data_ptr() in {t.data_ptr() for t in example.leaves}
        self.queries = problem.frame.nq if given else 0  # such a table has a row for each
        tabled = table is not None and not given
        self.of_lengths = tabled or bool(OF_LENGTHS & args.operands.keys())
        self.placed, self.masked = "q_at" in args.operands, bool(problem.mask.tensors())
        results = {"out": self._lifted(out.float() if training else out)}
        if training:
            results["row_stats"] = empty_row_stats(args)
        struct = family.struct(problem, arguments(args, **results))
        self.struct = type(struct).from_buffer_copy(struct)
        self.repeated = family.repeated(problem)
        computed = () if self.repeated is None else self.repeated.names
        for name in computed:
            clear(self.struct, name)
        # what was made for this structure lives as long as the plan; the tensors of one call do not
        given_parts = [t.parts if isinstance(t, DeferredRows) else (t,) for t in example.given]
        of_call = (*example.leaves, *results.values(), *(args.operands[name] for name in computed))
        theirs = {t.data_ptr() for t in (*chain(*given_parts), *of_call)}
        self.held = [t for t in struct.held if t.data_ptr() not in theirs]
        # positions in tensors, and lengths that do not lie as the kernels read them, are lowered call by call
        looks = self.by_content or (self.ruled and example.positions is not None and example.positions.span is None)
        self.leaves = self._leaves(tuple(family.leaves(problem, args)), example, VISIBLE if looks else None)
        self.entry, self.parallel = library().entry(type(self.struct)), parallel()
        self.places: tuple[Any, tuple[Tensor, ...]] = None, ()  # of a span, as tensors
        self.direct, self.constants = direct(), self._constants(problem, rule, family.pair_work(problem, args), out)
        self.address = ctypes.addressof(self.constants)
        changing = self.by_content or self.of_lengths or self.placed or len(self.leaves) > LEAVES
        whole = type(struct) is CallArguments  # native/python/ knows no other
        self.remembered = whole and not (changing or args.number("threshold") or self.repeated)

    def _leaves(self, offsets: tuple[int, ...], example: Example, anew: slice | None) -> list[tuple[int, int]]:
        """Which of the example's leaves the struct leads to itself, not to a copy: (offset of the address, which).

        anew: the bytes of members that are found out call by call.
        """
        addresses = [t.data_ptr() for t in example.leaves]
        found = [(at, _ADDRESS.unpack_from(self.struct, at)[0]) for at in offsets]
        return [
            (at, addresses.index(address))
            for at, address in found
            if address in addresses and (anew is None or not anew.start <= at < anew.stop)
        ]

    def _constants(self, problem: Problem, rule: IntervalRule | None, pair_work: int, out: Tensor) -> PlanArguments:
        """What bind() fills in a call's struct from."""
        bounded = rule is not None and rule.compares_positions()
        before, after = (0, 0) if rule is None else distances(rule)
        lead = out.shape[:-2]
        return PlanArguments(
            call=ctypes.addressof(self.struct),
            entry=ctypes.cast(self.entry, ctypes.c_void_p).value,  # pyright: ignore[reportArgumentType]
            parallel=self.parallel,
            axes=self.axes,
            lead=(ctypes.c_int64 * (AXES + 1))(*lead),
            leads=len(lead),
            dv=out.shape[-1],
            pair_work=pair_work,
            thread_work=THREAD_WORK,
            before=before,
            after=after,
            bounded=bounded,
            positional=problem.mask.compares_positions() or problem.score.compares_positions(),
            float_out=self.training,
            queries=self.queries,
            **self._leaf_members(),
        )

    def _leaf_members(self) -> dict[str, Any]:
        """abi.LEAF_MEMBERS: as many of the leaves as they have room for."""
        read = self.leaves[:LEAVES]
        which, offsets = [n for _, n in read], [at for at, _ in read]
        of = ctypes.c_int64 * LEAVES
        return {"leaves": len(read), "leaf": of(*which), "leaf_at": of(*offsets)}

    def run(self, call: PlanInputs) -> Tensor | None:
        """out; None where the call must go the general way, which says what is wrong, or looks at the mask anew."""
        made = self._made(call, None)
        return None if made is None else made[0]

    def remember(self, call: PlanInputs, score: Score, sink: Tensor | float | None, outlines: tuple[Any, ...]) -> None:
        """Lets attend() of native/python/ find this plan for calls like this one, if only what it knows changes."""
        if self.remembered and (call.positions is None or call.positions.span is not None):
            given = call.q, call.k, call.v, score, call.mask, call.positions, sink
            self.direct.remember(self.address, self, outlines, *given)

    def _made(self, call: PlanInputs, row_stats: Tensor | None) -> tuple[Tensor, Struct] | None:
        """out, and the struct of the call, which holds what it leads to besides the call's own tensors."""
        q, k, v, leaves, nq, nk, _, positions, seed = call
        span = None if positions is None else positions.span or ()
        if span and span.by_sequence():
            span = ()  # shifts are a tensor here, which the call holds
        struct = type(self.struct).from_buffer_copy(self.struct)
        struct.held = self.held
        address = ctypes.addressof(struct)
        out = self.direct.bind(self.address, address, q, k, v, span)
        if out is None:
            return None
        if row_stats is not None:
            bind(call_of(struct), {"row_stats": row_stats})
        for at, n in self.leaves:
            _ADDRESS.pack_into(struct, at, address_of(leaves[n]))
        if self.repeated is not None:
            operands = self.repeated.operands(self._frame(call), leaves)
            if operands is None:
                return None
            set_operands(struct, operands)
        if self.placed and span != ():
            self._set_places(struct, span or Span((0, nq), (0, nk), None))
        if (self.by_content or span == ()) and not self._look(struct, call):
            return None
        if seed is not None:
            # a call that is refused, or goes the general way, draws no seed
            if self.masked and call.mask.shape_error(self._frame(call)) is not None:
                return None
            _SEED.pack_into(struct, CallArguments.seed.offset, seed())
        code = self.entry(address, self.parallel)
        if code == _BAD_INTERVAL:
            return None
        if code:
            raise failure(code)
        return out, struct

    def _set_places(self, struct: Struct, span: Span) -> None:
        """Tells the struct the positions of a span as tensors, which it leads to then."""
        if self.places[0] != span[:2]:
            self.places = span[:2], (counting(*span.q), counting(*span.k))
        set_places(struct, *self.places[1])

    def _look(self, struct: Struct, call: PlanInputs) -> bool:
        """Fills in what depends on the numbers in positions and in the mask; whether they are right."""
        nq, nk, rule = call.nq, call.nk, call.mask.rule()
        span = Span((0, nq), (0, nk), None) if call.positions is None else call.positions.span
        if rule is not None and span is not None and not span.by_sequence() and call.seed is None:
            # the kernel finds out whether the numbers are right
            for ids, n in ((rule.q_ids, nq), (rule.k_ids, nk)):
                if ids is not None and ids.shape[-1] != n:
                    return False
            set_visible(struct, lower_rule(rule, span.offset()))
            return True
        frame = self._frame(call)
        if call.mask.shape_error(frame) is not None:
            return False
        if self.by_content or self.ruled:
            intervals = lower_intervals(call.mask, frame)
            if intervals is None:
                return False
            set_visible(struct, intervals)
        if self.placed:
            set_places(struct, frame.positions.q, frame.positions.k)
        return True

    def _frame(self, call: PlanInputs) -> Frame:
        at = resolve_positions(call.positions, call.nq, call.nk, self.batch, None, call.q.device)
        return Frame(self.batch, self.heads, call.nq, call.nk, at, self.headed)

    def _lifted(self, t: Tensor) -> Tensor:
        """With the axes of the kernels' operands: a head axis, where the caller has none."""
        return t if t.dim() == self.axes else t.unsqueeze(-3)
