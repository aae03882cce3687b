"""Sequences with any numbers of queries as one call of the native kernels: native/attention/ragged.h."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from regard.backends.native.abi import AXES, CODES, RaggedArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.bind import bind
from regard.backends.native.call_operands import DIVIDED, RAGGED
from regard.backends.native.ffi import failure, library, parallel
from regard.backends.native.launch import THREAD_WORK, arguments, empty_out, keys_and_values, set_operands
from regard.backends.native.lower_intervals import distances
from regard.backends.native.modifiers.distance import position_operands
from regard.call.problem import Problem
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged
from regard.scores.similarity import Dot, ScaledDot
from regard.sequences.ragged_call import RaggedCall

_REPLACED = frozenset(("start", "stop", "q_at", "k_at"))  # by the rule, and by the positions of all sequences
_OF_INTERVALS = frozenset(("start", "stop"))
_LEFT = CODES["REGARD_BAD_POSITION"], CODES["REGARD_BAD_INTERVAL"]  # runs without a plan, where the error is raised


class RaggedPlan:
    """Calls on ragged sequences that differ from an example by their numbers and by where their tensors lie.

    args    the operands of the call that stands for it: of the longest sequence, or of the padded batch
    placed  whether the kernels compare positions
    """

    def __init__(self, args: KernelArgs, call: RaggedCall) -> None:
        rule = call.rule
        before, after = distances(rule)
        first, last = None if rule.before is None else -before, None if rule.after is None else after + 1
        shared = {name: t for name, t in args.operands.items() if name not in _REPLACED}
        one = replace(args, operands=shared, numbers={**args.numbers, "first": first, "last": last})
        # of q's dtype, which is that of v where v is no int8
        out = torch.empty((), dtype=args.q.dtype, device="cpu").expand(*args.shape, args.v.shape[-1])
        self.struct = RaggedArguments(arguments(one, out=out), thread_work=THREAD_WORK)
        self.struct.call.batch = (ctypes.c_int64 * AXES)(*(1,) * AXES)  # of the sequence that a part belongs to
        self.struct.call.threads = torch.get_num_threads()
        self.placed = rule.compares_positions() or "q_at" in args.operands
        self.entry, self.parallel = library().entry(RaggedArguments), parallel()

    def run(self, call: RaggedCall) -> Tensor | None:
        """out (1, heads, total, dv), in v's dtype; None where positions or lengths are not as one list has them."""
        struct = RaggedArguments.from_buffer_copy(self.struct)
        of_all, rule, at = struct.call, call.rule, call.positions
        out = empty_out(call.queries, (*call.queries.shape[:-1], call.v.shape[-1]), call.v.dtype)
        k, v, scales = _numbers(call.k, call.v)
        if isinstance(k, Paged):
            of_all.pages = len(k.pages)
        bind(of_all, {"q": call.queries, **keys_and_values(k, v), **scales, "out": out}, AXES)
        of_all.nq, of_all.nk = call.queries.shape[-2], call.k.shape[-2]
        sequences = struct.sequences = len(call.offsets) - 1
        numbers = {one.name: getattr(rule, one.rule) for one in DIVIDED}
        each = {name: None if n is None else n.expand(sequences).long().contiguous() for name, n in numbers.items()}
        bind(struct, {"q_offsets": call.offsets.long().contiguous(), **each})
        if self.placed and at is not None:
            set_operands(struct, position_operands(at))
        code = self.entry(ctypes.addressof(struct), self.parallel)
        if code in _LEFT:
            return None
        if code:
            raise failure(code)
        return out


def _numbers(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Keys and values, or their int8 numbers, and the operands that scales are: tensors, or pages of the same table."""
    if not (isinstance(k, Int8Rows) and isinstance(v, Int8Rows)):
        return k, v, {}
    scales = {"k_scales": k.scales, "v_scales": v.scales}
    return k.numbers, v.numbers, {name: t.pages if isinstance(t, Paged) else t for name, t in scales.items()}


def ragged_plan(args: KernelArgs, problem: Problem, call: RaggedCall) -> RaggedPlan | str:
    """The plan for calls like one; or why the kernels do not run them as one list, as a clause.

    problem, args: those of the call that stands for it, see RaggedCall.example.
    """
    similarity = problem.similarity
    if type(similarity) not in (Dot, ScaledDot) or similarity.tensors():  # what others make of q and k, each call makes
        return f"{similarity!r} makes other queries and keys first"
    if call.rule.by_sequence().keys() - {one.rule for one in DIVIDED}:
        return "lengths of its mask are not divided"
    if not problem.q.dtype == call.k.dtype == call.v.dtype:
        return "q, k and v have several dtypes"
    given = args.operands.keys()
    if call.padded is not None and given & _OF_INTERVALS:
        return f"{call.padded.mask!r} gives each query an interval of keys that is no rule of distances and lengths"
    unplaced = call.positions is None and "q_at" in given
    if unplaced or given - RAGGED - _REPLACED:
        one = "q_at" if unplaced else min(given - RAGGED - _REPLACED)
        return f"sequences of unequal lengths have no part of an operand of the kernels, {one}"
    return RaggedPlan(args, call)
