"""Calls of a structure seen before, the same shapes, strides, dtypes, score and mask: they skip all but the kernel.

Structure is what a call is like before anyone looks at a number in its tensors. Kept are calls that a backend can
repeat from it alone (see Backend.ready and Backend.trained): no transforms, no positions, no dropout, no gradients but
those of q, k and v.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.backends.base import Ready, Trained
from regard.call import Call
from regard.dispatch import choose
from regard.masks.algebra import Mask
from regard.scores.algebra import Score
from regard.shapes import functorch
from regard.value import Value, names

_MOST = 256  # structures kept
_kept: dict[Any, Ready | Trained | None] = {}


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
    needs = None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _learn(leaves)):
        if _learn(leaves):
            return None
        needs = (q.requires_grad, k.requires_grad, v.requires_grad)
    key = (
        *outline,
        needs,
        *(q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype),
        torch.get_num_threads(),
        os.environ.get("REGARD_ISA"),
    )
    known = _kept.get(key, _unseen)
    if known is _unseen:
        known = _prepare(Call(q, k, v, score, mask, None, sink, None), (q, k, v), tuple(leaves), needs)
        if len(_kept) >= _MOST:
            _kept.clear()
        _kept[key] = known
    if known is None:
        return None
    if needs is None:
        return cast(Ready, known)(q, k, v, leaves)
    return cast(Tensor, _Repeated.apply(known, (score, mask, sink), q, k, v, *leaves))


def _unseen(*_: Any) -> Tensor:
    raise AssertionError("stands for a structure that is not kept")


def _prepare(
    call: Call, given: tuple[Tensor, ...], leaves: tuple[Tensor, ...], needs: tuple[bool, ...] | None
) -> Ready | Trained | None:
    problem = call.problem
    with torch.no_grad():
        backend = choose(problem, None, lse=False)
        out = problem.v.new_empty((*problem.frame.batch, problem.frame.heads, problem.frame.nq, problem.dv))
        out = call.layout.restore(out, 2)
        if needs is None:
            return backend.ready(problem, given, leaves, out)
        return backend.trained(problem, given, leaves, out, needs)


class _Repeated(torch.autograd.Function):
    """A call of a structure that is kept, with gradients of q, k and v."""

    @staticmethod
    def forward(ctx: Any, known: Trained, asked: tuple[Score, Mask, Any], *tensors: Tensor) -> Tensor:
        q, k, v, *leaves = tensors
        out, kept = known.forward(q, k, v, leaves)
        ctx.known, ctx.asked = known, asked
        # the leaves too: autograd then notices when one is changed in place before backward
        ctx.save_for_backward(*tensors, out, kept)
        ctx.strides = [t.stride() for t in (*tensors, out, kept)]
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # hooks on what is saved may have moved it
        q, k, v, *leaves, out, kept = map(_laid, ctx.saved_tensors, ctx.strides)
        if torch.is_grad_enabled():  # create_graph: the gradient itself will be differentiated
            found = _differentiable(ctx.asked, (q, k, v), ctx.needs_input_grad[2:5], g_out)
        else:
            found = ctx.known.backward((q, k, v), leaves, (out, kept), g_out)
        return (None, None, *found, *(None for _ in leaves))


def _laid(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    return t if t.stride() == strides else torch.empty_strided(t.shape, strides, dtype=t.dtype).copy_(t)


def _differentiable(
    asked: tuple[Score, Mask, Any], given: tuple[Tensor, ...], needs: tuple[bool, ...], g_out: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients by operations that can be differentiated again."""
    score, mask, sink = asked
    # views of their own: a gradient is asked for at this call's inputs, not at what they were computed from
    q, k, v = own = tuple(t.view_as(t) for t in given)
    call = Call(q, k, v, score, mask, None, sink, None)
    with call.precision():
        out, _ = choose(call.problem, None, lse=False).differentiable(call.problem)
        out = call.layout.restore(out.to(call.problem.dtype), 2)
    wanted = [t for t, need in zip(own, needs, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, g_out, create_graph=True, allow_unused=True))
    return tuple(next(found) if need else None for need in needs)


def _transformed() -> bool:
    """Whether someone between the caller and torch watches or changes what happens: a compiler, a mode, a transform."""
    return (
        torch.compiler.is_compiling()
        or functorch()
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or torch.is_autocast_enabled("cpu")
    )


_dispatch_modes = torch._C._len_torch_dispatch_stack  # pyright: ignore[reportPrivateUsage]
_function_modes = torch._C._len_torch_function_stack  # pyright: ignore[reportPrivateUsage]


def _plain(t: Tensor) -> bool:
    return t.is_cpu and t.layout is torch.strided and not t.is_neg()


def _learn(leaves: list[Tensor]) -> bool:
    return any(t.requires_grad for t in leaves)


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
