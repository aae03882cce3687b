"""Calls of a structure seen before, the same shapes, strides, dtypes, score and mask: they skip all but the kernel.

Structure is what a call is like before anyone looks at a number in its tensors. Kept are calls that a backend can
repeat from it alone (see Backend.ready): no gradients, no transforms, no positions, no dropout.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.backends.base import Ready
from regard.call import Call
from regard.dispatch import choose
from regard.masks.algebra import Mask
from regard.scores.algebra import Score
from regard.shapes import functorch
from regard.value import Value

_MOST = 256  # structures kept
_kept: dict[Any, Ready | None] = {}


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
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _learn(leaves)):
        return None
    key = (
        *outline,
        *(q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype),
        torch.get_num_threads(),
        os.environ.get("REGARD_ISA"),
    )
    ready = _kept.get(key, _unseen)
    if ready is _unseen:
        ready = _prepare(Call(q, k, v, score, mask, None, sink, None), (q, k, v), tuple(leaves))
        if len(_kept) >= _MOST:
            _kept.clear()
        _kept[key] = ready
    return None if ready is None else ready(q, k, v, leaves)


def _unseen(*_: Any) -> Tensor:
    raise AssertionError("stands for a structure that is not kept")


def _prepare(call: Call, given: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> Ready | None:
    with torch.no_grad():
        ready = choose(call.problem, None, lse=False).ready(call.problem, given, leaves)
    if ready is None or call.layout.headed:
        return ready
    return lambda q, k, v, leaves: call.layout.restore(ready(q, k, v, leaves), 2)


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
    names = _names.get(kind)
    if names is not None:
        return (kind, *[_outline(getattr(item, name), leaves) for name in names]) if names else kind
    if kind in (int, float, bool, type(None)):
        return item
    if kind is tuple:
        return tuple([_outline(part, leaves) for part in item])
    if isinstance(item, Tensor) and _plain(item):
        leaves.append(item)
        return item.dtype, item.shape, item.stride()
    if isinstance(item, Value) and kind.__module__.startswith("regard."):
        _names[kind] = tuple(f.name for f in fields(item))  # type: ignore[arg-type]
        return _outline(item, leaves)
    raise _Open


_names: dict[type, tuple[str, ...]] = {}
