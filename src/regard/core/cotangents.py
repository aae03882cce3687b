"""Backwards that read the numbers of their cotangents, where torch transforms these: vmap, batches, forward mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.core.tracing import functorch

Gradients = Callable[[tuple[Tensor, ...]], tuple[Tensor | None, ...]]  # of a call's tensors, from its cotangents


def linear_in(cotangents: tuple[Tensor, ...], gradients: Gradients) -> tuple[Tensor | None, ...]:
    """gradients(cotangents), a linear function that is called with plain tensors alone.

    It is called for each element of a batch of cotangents, one after another (is_grads_batched=True, torch.vmap), and
    for their tangents (forward mode). Where the gradients will be differentiated again (create_graph=True), the
    function is made of torch's operations, which see torch.func transforms and tangents themselves.
    """
    if functorch() or has_tangent(*cotangents):
        return gradients(cotangents) if torch.is_grad_enabled() else _transformed(cotangents, gradients)
    for t in cotangents:
        if _dispatch_keys(t).has(_BATCHED):
            return _one_by_one(cotangents, *_level_and_size(t), gradients)
    return gradients(cotangents)


def has_tangent(*tensors: Tensor) -> bool:
    """Whether forward mode is under way, and one of the tensors carries a tangent."""
    if forward_ad._current_level < 0:  # pyright: ignore[reportPrivateUsage]
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


# is_grads_batched=True and torch.autograd.functional make batches by torch._vmap_internals, which is older than
# torch.func: it has no stack of transforms, no rules for Functions. These are the functions by which it packs batches.
_BATCHED = torch._C._dispatch_key_parse("Batched")  # pyright: ignore
_dispatch_keys = torch._C._dispatch_keys  # pyright: ignore
_add_batch = torch._add_batch_dim  # pyright: ignore
_remove_batch = torch._remove_batch_dim  # pyright: ignore
_LEVELS = range(64, 0, -1)  # at most so many such batches lie in each other


def _level_and_size(t: Tensor) -> tuple[int, int]:
    """The innermost batch of a tensor, which is packed last: its level, and the number of elements."""
    for level in _LEVELS:
        # a tensor that has no batch of this level is expanded to the size given here; no batch is empty
        size = _remove_batch(t, level, 0, 0).shape[0]
        if size:
            return level, size
    raise AssertionError("a batched tensor has a level")


def _one_by_one(
    cotangents: tuple[Tensor, ...], level: int, size: int, gradients: Gradients
) -> tuple[Tensor | None, ...]:
    batches = [_remove_batch(t, level, size, 0) for t in cotangents]
    found = [linear_in(tuple(t[n] for t in batches), gradients) for n in range(size)]
    return tuple(
        None if each[0] is None else _add_batch(torch.stack(each), 0, level) for each in zip(*found, strict=True)
    )


def _transformed(cotangents: tuple[Tensor, ...], gradients: Gradients) -> tuple[Tensor | None, ...]:
    exists: list[bool] = []

    def existing(*plain: Tensor) -> tuple[Tensor, ...]:
        found = linear_in(plain, gradients)
        exists[:] = (g is not None for g in found)
        return tuple(g for g in found if g is not None)

    found = iter(_Linear.apply(existing, *cotangents))
    return tuple(next(found) if there else None for there in exists)


class _Linear(torch.autograd.Function):
    """apply(function, *tensors): the function's results, to vmap and to forward mode. Backward does not differentiate
    it: it runs where gradients are not recorded.
    """

    @staticmethod
    def forward(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.function = inputs[0]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], function: Any, *tensors: Tensor) -> tuple[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        def element(n: int) -> tuple[Tensor, ...]:
            each = zip(tensors, in_dims[1:], strict=True)
            return tuple(t if axis is None else t.select(axis, n) for t, axis in each)

        found = [_Linear.apply(function, *element(n)) for n in range(info.batch_size)]
        stacked = tuple(map(torch.stack, zip(*found, strict=True)))
        return stacked, (0,) * len(stacked)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Linear.apply(ctx.function, *tangents)
