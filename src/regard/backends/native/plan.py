"""Plans: the struct of a call, kept for other calls of its structure and filled with what changes from call to call.

What changes: where the caller's tensors lie, how many queries and keys there are, their strides, positions, the seed of
dropout, and the intervals of a mask whose tensors decide them (Lengths, Documents).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from struct import Struct as Packer
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.backends.base import Done, Example, Inputs
from regard.backends.native.abi import CODES, CallArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.c_structs import Struct
from regard.backends.native.ffi import DTYPE_CODES, failure, parallel
from regard.backends.native.kernels import Gradients, Kernels
from regard.backends.native.launch import (
    VISIBLE,
    arguments,
    gapless,
    library,
    operand,
    set_pages,
    set_places,
    set_strides,
    set_visible,
    threads,
)
from regard.backends.native.lower_mask import distances, lower_intervals, lower_rule
from regard.backends.native.modifiers.distance import MOST
from regard.backends.native.plan_limits import decided_by_tensors
from regard.core.paged import Paged
from regard.core.positions import Span, resolve_positions
from regard.core.region import Frame

# Operands that belong to certain numbers of queries and keys.
_OF_LENGTHS = {"allowed", "bias", "tiles", "bits", "offsets", "points_of_q", "points_of_k", "q_cell", "k_cell"}
_BAD_INTERVAL = CODES["REGARD_BAD_INTERVAL"]  # the numbers of a mask are wrong: the general way says so
_ADDRESS, _SEED, _THREADS, _TWO = Packer("=q"), Packer("=Q"), Packer("=i"), Packer("=2q")
_Q, _K, _V, _OUT, _ROW_STATS, _BLOCK_TABLE = (
    getattr(CallArguments, name).offset for name in ("q", "k", "v", "out", "row_stats", "block_table")
)


class _Bound(NamedTuple):
    """A plan's struct for certain lengths, strides and positions, without addresses.

    like_q: whether out lies as q does. held: what the struct leads to.
    """

    lengths: tuple[Any, ...]
    strides: tuple[Any, ...]
    struct: Struct
    shape: tuple[int, ...]
    like_q: bool
    held: tuple[Tensor, ...]


class ForwardPlan:
    """Calls of one structure, forward. of_lengths: it serves one number of queries and of keys only."""

    def __init__(self, family: Kernels, args: KernelArgs, example: Example, training: bool = False) -> None:
        problem, out = example.problem, example.out
        self.family, self.training = family, training
        self.batch, self.heads, self.headed = problem.frame.batch, problem.frame.heads, problem.frame.headed
        self.axes, self.lead, self.dv = args.q.dim(), tuple(out.shape[:-2]), out.shape[-1]
        self.dtype = torch.float32 if training else out.dtype
        self.rule = problem.mask.rule()
        # intervals that have no rule follow from the numbers in positions, where there are any
        placed = args.start is not None and example.positions is not None and problem.mask.compares_positions()
        self.by_content = decided_by_tensors(problem.mask, args) or (placed and self.rule is None)
        self.bounds = distances(self.rule) if self.rule is not None and self.rule.compares_positions else None
        tabled = args.start is not None and self.rule is None and not self.by_content
        self.of_lengths = tabled or bool(_OF_LENGTHS & args.tensors().keys())
        self.positional = problem.mask.compares_positions() or problem.score.compares_positions()
        self.placed, self.masked = args.q_at is not None, bool(problem.mask.tensors())
        self.pair_work = family.pair_work(problem, args)
        row_stats = torch.empty(*args.shape, 2) if training else None
        struct = family.struct(problem, arguments(args, self._lifted(out.to(self.dtype)), None, row_stats))
        self.struct = type(struct).from_buffer_copy(struct)
        # what was made for this structure lives as long as the plan; the tensors of one call do not
        pages = [(t.pages, t.block_table) if isinstance(t, Paged) else (t,) for t in example.given]
        theirs = {t.data_ptr() for t in (*chain(*pages), *example.leaves, out, row_stats) if t is not None}
        self.held = tuple(t for t in struct.held if t.data_ptr() not in theirs)
        addresses = [t.data_ptr() for t in example.leaves]
        read = {at: t.data_ptr() for at, t in family.leaves(problem, args).items() if t is not None}
        # positions in tensors decide what is seen call by call: lengths in the mask are then lowered with them
        looks = example.positions is not None and example.positions.span is None
        self.leaves = [
            (at, addresses.index(address))
            for at, address in read.items()
            if address in addresses and not (looks and VISIBLE.start <= at < VISIBLE.stop)
        ]
        self.entry, self.parallel = library().entry(family.forward_entry), parallel()
        self.bound: _Bound | None = None

    def run(self, call: Inputs) -> Tensor | None:
        """out; None where the call must go the general way, which says what is wrong, or looks at the mask anew."""
        made = self._made(call, None)
        return None if made is None else made[0]

    def _made(self, call: Inputs, row_stats: Tensor | None) -> tuple[Tensor, Struct, tuple[Tensor, ...], _Bound] | None:
        """out, the struct of the call, what that leads to besides the call's own tensors, and what it was made from."""
        q, k, v, leaves, nq, nk, _, positions, seed = call
        span = None if positions is None else positions.span
        table = None
        if type(k) is Paged and type(v) is Paged:  # no subclass has a plan
            table, k, v = k.block_table, k.pages, v.pages
        # an axis of size 1 has no stride, whatever torch says
        lengths = nq, nk, span
        pool = None if table is None else (k.shape[0], table.stride())
        strides = nq, nk == 1, q.stride(), k.stride(), v.stride(), pool
        bound = self.bound
        if bound is None or bound.lengths != lengths or bound.strides != strides:
            bound = self._bind(call, lengths, strides)
            if bound is None:
                return None
            self.bound = bound
        # empty_like is the fastest way that torch has
        out = torch.empty_like(q) if bound.like_q else torch.empty(*bound.shape, dtype=self.dtype)
        struct, held = type(bound.struct).from_buffer_copy(bound.struct), bound.held
        self._set_addresses(struct, (q, k, v), out, row_stats, leaves)
        if table is not None:
            _ADDRESS.pack_into(struct, _BLOCK_TABLE, table.data_ptr())
        if self.by_content or (span is None and positions is not None):
            looked = self._look(struct, call)
            if looked is None:
                return None
            held = (*held, *looked)
        if seed is not None:
            # a call that is refused, or goes the general way, draws no seed
            if self.masked and call.mask.shape_error(self._frame(call)) is not None:
                return None
            _SEED.pack_into(struct, CallArguments.seed.offset, seed())
        code = self.entry(ctypes.byref(struct), self.parallel)
        if code == _BAD_INTERVAL:
            return None
        if code:
            raise failure(code)
        return out, struct, held, bound

    def _set_addresses(
        self, struct: Struct, given: Sequence[Tensor], out: Tensor, row_stats: Tensor | None, leaves: Sequence[Tensor]
    ) -> None:
        put, (q, k, v) = _ADDRESS.pack_into, given
        put(struct, _Q, q.data_ptr())
        put(struct, _K, k.data_ptr())
        put(struct, _V, v.data_ptr())
        put(struct, _OUT, out.data_ptr())
        if row_stats is not None:
            put(struct, _ROW_STATS, row_stats.data_ptr())
        for at, n in self.leaves:
            put(struct, at, leaves[n].data_ptr())

    def _bind(self, call: Inputs, lengths: tuple[Any, ...], strides: tuple[Any, ...]) -> _Bound | None:
        """The struct for the lengths, strides and positions of a call; None where these do not fit each other."""
        nq, nk, span = lengths
        if not 0 < nq < MOST or not 0 < nk < MOST:
            return None
        if call.positions is None:
            if nq != nk and self.positional:
                return None
            span = Span((0, nq), (0, nk), None, private=True)
        last, shape = self.bound, (*self.lead, nq, self.dv)
        if last is not None and last.strides == strides:
            struct = type(last.struct).from_buffer_copy(last.struct)
        else:
            struct = type(self.struct).from_buffer_copy(self.struct)
            given = (call.q, *(t.pages if isinstance(t, Paged) else t for t in call[1:3]))
            for at, t in zip((_Q, _K, _V), given, strict=True):
                set_strides(struct, at, t.shape, t.stride(), self.axes)
            if isinstance(call.k, Paged):
                set_pages(CallArguments.from_buffer(struct), call.k)
            set_strides(struct, _OUT, shape, gapless(shape), self.axes)
            if self.training:
                row_stats = (*self.batch, self.heads, nq, 2)
                set_strides(struct, _ROW_STATS, row_stats, gapless(row_stats), self.axes)
        _TWO.pack_into(struct, CallArguments.nq.offset, nq, nk)
        _THREADS.pack_into(struct, CallArguments.threads.offset, threads(self.pair_work * nq * nk))
        held = list[Tensor]()
        if span is not None:
            (first, queries), (origin, keys) = span.q, span.k
            if (queries, keys) != (nq, nk) or abs(first - origin) + nq + nk >= MOST:
                return None
            if self.bounds is not None:
                before, after = self.bounds
                _TWO.pack_into(struct, CallArguments.first.offset, first - origin - before, first - origin + after + 1)
            if self.placed:
                at = [torch.arange(first, first + n) for first, n in (span.q, span.k)]
                held += set_places(struct, *at)
        like_q = call.q.dtype == self.dtype and call.q.shape == shape and call.q.is_contiguous()
        return _Bound(lengths, strides, struct, shape, like_q, (*self.held, *held))

    def _look(self, struct: Struct, call: Inputs) -> list[Tensor] | None:
        """Fills in what depends on the numbers in positions and in the mask: what the struct then leads to."""
        nq, nk, positions = call.nq, call.nk, call.positions
        rule = call.mask.rule()
        if rule is not None and (positions is None or positions.span is not None) and call.seed is None:
            # the kernel finds out whether the numbers are right
            for ids, n in ((rule.q_ids, nq), (rule.k_ids, nk)):
                if ids is not None and ids.shape[-1] != n:
                    return None
            offset = 0 if positions is None or positions.span is None else positions.span.q[0] - positions.span.k[0]
            return set_visible(struct, lower_rule(rule, offset))
        frame = self._frame(call)
        if call.mask.shape_error(frame) is not None:
            return None
        held = list[Tensor]()
        if self.by_content or self.rule is not None:
            intervals = lower_intervals(call.mask, frame)
            if intervals is None:
                return None
            held += set_visible(struct, intervals)
        if self.placed:
            held += set_places(struct, frame.positions.q, frame.positions.k)
        return held

    def _frame(self, call: Inputs) -> Frame:
        at = resolve_positions(call.positions, call.nq, call.nk, self.batch, None, call.q.device)
        return Frame(self.batch, self.heads, call.nq, call.nk, at, self.headed)

    def _lifted(self, t: Tensor) -> Tensor:
        """With the axes of the kernels' operands: a head axis, where the caller has none."""
        return t if t.dim() == self.axes else t.unsqueeze(-3)


class TrainingPlan(ForwardPlan):
    """Calls of one structure that will be differentiated, and their backward.

    Sums stay in float32 between the two: `out` is that of the kernel, the caller's is `out` in q's dtype.
    """

    def __init__(self, family: Kernels, args: KernelArgs, example: Example) -> None:
        super().__init__(family, args, example, training=True)
        learned, addresses = family.learned(example.problem), [t.data_ptr() for t in example.leaves]
        self.learned = None if learned is None else addresses.index(learned.data_ptr())
        # which of the kernel's results is the gradient of each tensor: q, k, v, and what is learned of the leaves
        of = (0, 1, 2, *(3 if n == self.learned else None for n in range(len(addresses))))
        self.order = tuple(n if need else None for n, need in zip(of, example.needs, strict=True))
        self.needs, self.gradient_dtype = example.needs, DTYPE_CODES[args.q.dtype]
        self.backward_entry = library().entry(family.backward_entry)
        # how the forward's tensors and the cotangent lay, and the struct then
        self.gradients: tuple[_Bound | None, Any, Struct] = None, None, self.struct
        self.forward_size = ctypes.sizeof(self.struct)

    def run_for_backward(self, call: Inputs) -> Done | None:
        """The call, made: its out and row statistics, and its struct with what that leads to."""
        row_stats = torch.empty(*self.batch, self.heads, call.nq, 2)
        made = self._made(call, row_stats)
        return None if made is None else Done(made[0], row_stats, made[1:])

    def backward(
        self, done: Done, given: Sequence[Tensor], leaves: Sequence[Tensor], g_out: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of what is given and of the leaves, from the cotangent of out."""
        g_out = self.family.cotangent(g_out if g_out.stride(-1) == 1 else g_out.contiguous())
        made = self.family.empty_gradients(given, self.heads, self.needs)
        forward, _, bound = done.kernel
        layout = g_out.dtype, g_out.shape, g_out.stride()  # gradients lie like what they are gradients of
        last_bound, last_layout, template = self.gradients
        if bound is not last_bound or layout != last_layout:
            template = self._gradient_struct(g_out, made)
            self.gradients = bound, layout, template
        struct = type(template).from_buffer_copy(template)
        ctypes.memmove(ctypes.byref(struct), ctypes.byref(forward), self.forward_size)
        self._set_addresses(struct, given, done.out, done.row_stats, leaves)
        for at, t in zip(self.family.gradient_offsets, (g_out, *made), strict=True):
            if t is not None:
                _ADDRESS.pack_into(struct, at, t.data_ptr())
        if code := self.backward_entry(ctypes.byref(struct), self.parallel):
            raise failure(code)
        found = self.family.own(made, given, None if self.learned is None else leaves[self.learned])
        return tuple([None if n is None else found[n] for n in self.order])

    def _gradient_struct(self, g_out: Tensor, made: Gradients) -> Struct:
        """What the backward reads, for cotangents and gradients that lie like these, but for addresses."""
        operands = [None if t is None else operand(self._lifted(t)) for t in made[:3]]
        dtypes = DTYPE_CODES[g_out.dtype], self.gradient_dtype
        return self.family.backward_struct(self.struct, operand(self._lifted(g_out)), operands, dtypes)
