"""Nested queries over the keys of a batch, run as one list of sequences where the native kernels can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import regard.core.tracing as tracing
import regard.runtime.plan_cache as plan_cache
from regard.backends.base import Backend
from regard.backends.native.backend import Native
from regard.backends.native.ffi import chosen
from regard.backends.native.ragged import RaggedPlan
from regard.core.deferred import DeferredRows
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged
from regard.runtime.binding import BoundCall
from regard.runtime.dispatch import Explanation, choose
from regard.runtime.outline import Leaves, Open, outline, plain
from regard.scores.algebra import Score
from regard.sequences.ragged_call import PlainCall, RaggedCall


def attend(call: RaggedCall, score: Score, sink: Any, backend: Backend | None) -> Tensor | None:
    """out (1, heads, total, dv) of all sequences; None where they do not run as one list."""
    if _watched(call, score, sink):
        return None
    key = _structure(call, score, sink, backend)
    known = None if key is None else plan_cache.ragged_plan(key)
    if known is None:
        known = _plan(call, score, sink, backend)
        if isinstance(known, str):
            return None
        if key is not None:
            plan_cache.keep(key, known)
    return known.run(call)


def explain(call: RaggedCall, score: Score, sink: Any, backend: Backend | None) -> Explanation | str:
    """How the sequences would run as one list, and a plain call like it; or why they would not, as a clause."""
    if _watched(call, score, sink):
        return "a gradient, a graph or a mode asks for more than the output"
    plan = _plan(call, score, sink, backend)
    if isinstance(plan, str):
        return plan
    if plan.placed and not call.consecutive():
        return "the positions of its queries or keys do not count up by one"
    longest = _bound(call.shown(), score, sink).explain(backend)
    return replace(longest, facts=(*longest.facts, ("nested", call.note())))


def _bound(call: PlainCall, score: Score, sink: Any) -> BoundCall:
    q, k, v, mask, positions = call
    return BoundCall(q, k, v, score, mask, positions, sink, None)


def _plan(call: RaggedCall, score: Score, sink: Any, backend: Backend | None) -> RaggedPlan | str:
    """The plan, or why there is none, as a clause."""
    problem = _bound(call.example(), score, sink).problem
    taken = choose(problem, backend, lse=False)
    if not isinstance(taken, Native):
        return f"{taken!r} has no call on sequences of unequal lengths"
    return "there is no key" if 0 in problem.frame.shape else taken.ragged_plan(problem, call)


def _watched(call: RaggedCall, score: Score, sink: Any) -> bool:
    """Whether a compiler, a transform, a mode or autograd needs more of the call than its output."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return True
    if any(guard() for guard in tracing.GUARDS) or not all(map(plain, (call.queries, *_parts(call.k, call.v)))):
        return True
    tensors = call.queries, call.k, call.v, *score.tensors(), *((sink,) if isinstance(sink, Tensor) else ())
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _parts(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold keys and values outside of pages; k and v themselves where they are not kept alike."""
    if isinstance(k, DeferredRows) and isinstance(v, DeferredRows) and k.lies_like(v):
        return () if k.in_pages else (*k.parts, *v.parts)
    return k, v


def _structure(call: RaggedCall, score: Score, sink: Any, backend: Backend | None) -> Any:
    """What calls of one plan have in common; None where tensors in the score, or the sink, would be part of it."""
    if call.padded is not None or isinstance(sink, Tensor) or score.tensors():
        return None
    try:
        described = outline(score, Leaves()), outline(sink, Leaves())
    except Open:
        return None
    q, k, v = call.queries, call.k, call.v
    numbers = k.numbers if isinstance(k, Int8Rows) else k
    kept = type(k), type(v), numbers.page_size if isinstance(numbers, Paged) else None
    lying = (q.shape[1], q.shape[3], k.shape[1], k.shape[3], v.shape[1], v.shape[3], q.dtype, k.dtype, v.dtype, kept)
    of_mask = call.rule.before, call.rule.after, tuple(call.rule.by_sequence()), call.positions is None
    return described, backend, *of_mask, *lying, torch.get_num_threads(), chosen()
