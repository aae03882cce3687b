"""Calls of a structure seen before, the same shapes, strides, dtypes, score and mask: they skip all but the kernel.

Structure is what a call is like before anyone looks at a number in its tensors. Kept are calls that a backend can
repeat from it alone (see Backend.ready and Backend.trained): no transforms, no positions, no dropout, no gradients but
those of q, k and v, and of what an additive score learns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.backends.base import Example, Ready, Trained
from regard.core.tracing import functorch, watched
from regard.core.value import Value, names
from regard.masks.algebra import Mask
from regard.runtime.autograd import differentiable_backward
from regard.runtime.binding import Call
from regard.runtime.dispatch import choose
from regard.scores.algebra import Score, Similarity

_MOST = 256  # structures kept
_kept: dict[Any, _Known | None] = {}
_UNSEEN: Any = object()


def attend(q: Any, k: Any, v: Any, score: Score, mask: Mask, sink: Any) -> Tensor | None:
    """The output of a call whose structure is kept, or can be; None where each such call has to be posed."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor or _transformed():
        return None
    if not (_plain(q) and _plain(k) and _plain(v)):
        return None
    leaves: list[Tensor] = []
    try:
        outline = _outline(score, leaves), _outline(mask, leaves), _outline(sink, leaves)
    except _Open:
        return None
    tensors = (q, k, v, *leaves)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    key = (
        *outline,
        tuple([t.requires_grad for t in tensors]) if recorded else None,
        *(q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype),
        torch.get_num_threads(),
        os.environ.get("REGARD_ISA"),
    )
    known = _kept.get(key, _UNSEEN)
    if known is _UNSEEN:
        known = _prepare(Call(q, k, v, score, mask, None, sink, None), tensors, recorded)
        if len(_kept) >= _MOST:
            _kept.clear()
        _kept[key] = known
    if known is None:
        return None
    origin = None
    if known.strides is not None:
        origin = (q.detach(), k.detach()) if recorded else None
        q, k = cast(Similarity, score.stages[0]).prepare(_lift(q), _lift(k))
        if (q.stride(), k.stride()) != known.strides:
            return None
    if not recorded:
        return cast(Ready, known.run)(q, k, v, leaves)
    return cast(Tensor, _Repeated.apply(known.run, (origin, score, mask, sink), q, k, v, *leaves))


@dataclass(frozen=True, eq=False)
class _Known:
    """A structure that is kept. strides: of q and k as the similarity prepares them, or None where it does not."""

    run: Ready | Trained
    strides: tuple[tuple[int, ...], tuple[int, ...]] | None


def _lift(t: Tensor) -> Tensor:
    return t if t.dim() > 3 else t.unsqueeze(-3)


def _prepare(call: Call, tensors: tuple[Tensor, ...], recorded: bool) -> _Known | None:
    problem, (q, k, v, *leaves) = call.problem, tensors
    frame, similarity = problem.frame, problem.similarity
    prepares = type(similarity).prepare is not Similarity.prepare
    if prepares and any(_lift(t).shape[:-3] != frame.batch for t in (q, k)):
        return None
    q, k = (problem.q, problem.k) if prepares else (q, k)
    with torch.no_grad():
        backend = choose(problem, None, lse=False)
        out = problem.v.new_empty((*frame.batch, frame.heads, frame.nq, problem.dv))
        needs = tuple(recorded and t.requires_grad for t in (q, k, v, *leaves))
        spent = len(similarity.tensors()) if prepares else 0
        example = Example(problem, (q, k, v), tuple(leaves), spent, needs, call.layout.restore(out, 2))
        run = backend.trained(example) if recorded else backend.ready(example)
    return None if run is None else _Known(run, (q.stride(), k.stride()) if prepares else None)


# q and k from before the similarity prepared them, or None; score, mask and sink
_Asked = tuple[tuple[Tensor, Tensor] | None, Score, Mask, Any]


class _Repeated(torch.autograd.Function):
    """A call of a structure that is kept, with gradients."""

    @staticmethod
    def forward(ctx: Any, run: Trained, asked: _Asked, *tensors: Tensor) -> Tensor:
        q, k, v, *leaves = tensors
        out, kept = run.forward(q, k, v, leaves)
        ctx.run, ctx.asked = run, asked
        # the leaves too: autograd then notices when one is changed in place before backward
        ctx.save_for_backward(*tensors, out, kept)
        ctx.strides = [t.stride() for t in (*tensors, out, kept)]
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # hooks on what is saved may have moved it
        q, k, v, *leaves, out, kept = map(_laid, ctx.saved_tensors, ctx.strides)
        # create_graph: the gradient itself will be differentiated; and who watches sees no kernel
        if torch.is_grad_enabled() or watched():
            with torch.enable_grad():
                found = _differentiable(ctx.asked, (q, k, v), ctx.needs_input_grad[2:], g_out)
        else:
            found = ctx.run.backward((q, k, v), leaves, (out, kept), g_out)
        return (None, None, *found)


def _laid(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    if t.stride() == strides:
        return t
    once = t[tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)]  # of what was expanded
    return torch.empty_strided(once.shape, strides, dtype=t.dtype).copy_(once).expand(t.shape)


def _differentiable(
    asked: _Asked, given: tuple[Tensor, ...], needs: tuple[bool, ...], g_out: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients by operations that can be differentiated again."""
    (origin, score, mask, sink), (q, k, v) = asked, given
    call = Call(*(origin or (q, k)), v, score, mask, None, sink, None)
    problem = call.problem if origin is None else replace(call.problem, q=q, k=k)
    frame = problem.frame
    g_out = g_out.to(problem.accumulate).reshape(*frame.batch, frame.heads, frame.nq, problem.dv)
    with call.precision():
        every = (*needs, *(False for _ in problem.tensors()[len(needs) :]))
        backend = choose(problem, None, lse=False)
        found = differentiable_backward(backend, problem, (g_out, None), every)
    shaped = (None if g is None else g.reshape(t.shape) for g, t in zip(found, given, strict=False))
    return (*shaped, *found[3 : len(needs)])


def _transformed() -> bool:
    """Whether someone between the caller and torch watches or changes what happens: a compiler, a mode, a transform."""
    return (
        torch.compiler.is_compiling()
        or functorch()
        or watched()
        or _function_modes() > 0
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or torch.is_autocast_enabled("cpu")
    )


_function_modes = torch._C._len_torch_function_stack  # pyright: ignore[reportPrivateUsage]


def _plain(t: Tensor) -> bool:
    return t.is_cpu and t.layout is torch.strided and not t.is_neg()


class _Open(Exception):
    """The value holds something whose meaning may change while it looks the same: a function, a foreign class."""


def _outline(item: Any, leaves: list[Tensor]) -> Any:
    """What stays of a value when its tensors are reduced to dtype, shape and strides; they go to `leaves`."""
    kind = type(item)
    parts = _parts.get(kind)
    if parts is not None:
        return (kind, *[_outline(getattr(item, name), leaves) for name in parts]) if parts else kind
    if kind in (int, float, bool, type(None)):
        return item
    if kind is tuple:
        return tuple([_outline(part, leaves) for part in item])
    if isinstance(item, Tensor) and _plain(item):
        leaves.append(item)
        return item.dtype, item.shape, item.stride()
    if isinstance(item, Value) and kind.__module__.startswith("regard."):
        _parts[kind] = names(kind)
        return _outline(item, leaves)
    raise _Open


_parts: dict[type, tuple[str, ...]] = {}  # of regard's own classes
