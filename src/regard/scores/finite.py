"""Numbers that stay finite: rows, casts and sums of scores whose infinities would hide keys or spoil gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.core.tracing import data_unavailable, finite


def by_row(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """fn(x), where each row of the answer comes from that row of x alone; a row that is not finite passes no gradient.

    0 · NaN is NaN: the zero gradient of a padded token would leak, multiplied by what stands there.
    """
    if finite(x):
        return fn(x)
    fine = x.isfinite().all(-1, keepdim=True)
    return torch.where(fine, fn(x.masked_fill(~fine, 0)), fn(x.detach()).detach())


def finite_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype, whose largest number stands for what is finite and larger."""
    y = x.to(dtype)
    holds = not x.is_floating_point() or torch.finfo(x.dtype).max <= torch.finfo(dtype).max
    return y if holds else _saturated(y, x)


def plus(s: Tensor, x: Tensor) -> Tensor:
    """The sum of two scores, finite where both are: two biases of finfo.min hide no key, as -inf would."""
    return _saturated(s + x, s, x)


def _saturated(y: Tensor, *terms: Tensor) -> Tensor:
    """y, with the largest number of its dtype where it is infinite although the terms that it is made of are not."""
    if finite(y):
        return y
    lost, limit = y.detach().isinf(), torch.finfo(y.dtype).max
    for t in terms:
        lost = lost & t.detach().isfinite()
    if not data_unavailable(y) and not bool(lost.any()):
        return y
    zero = sum((t - t.detach()).to(y.dtype) for t in terms)  # through which gradients pass
    return torch.where(lost, y.detach().clamp(-limit, limit) + zero, y)
