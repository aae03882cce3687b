"""The fields of scores: tensors, and numbers that may be learned, one for all heads or one a head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from regard.core.arrays import plain_tensor
from regard.core.region import Frame
from regard.core.wrong_calls import kind_of


def parameter(x: Any, name: str) -> Tensor:
    """A tensor field of a score: floating point, or TypeError."""
    t = plain_tensor(x, name)
    if not t.dtype.is_floating_point:
        raise TypeError(f"{name} has dtype {t.dtype}; expected floating point.")
    return t


def parameters(tensors: Any, name: str) -> tuple[Tensor, ...]:
    """Tensors that a score holds in a tuple: floating point, or TypeError. An array alone would be read row by row."""
    if hasattr(tensors, "dtype") or not isinstance(tensors, Iterable):
        raise TypeError(f"{name} is {kind_of(tensors)}; expected a tuple: write (w,) for one tensor w.")
    return tuple([parameter(t, name) for t in cast("Iterable[Any]", tensors)])


def number(x: Any, name: str) -> float | Tensor:
    """A scalar field of a score: a number, or a tensor () or (heads,), which may be learned."""
    if isinstance(x, (str, bool)):
        raise TypeError(f"{name} is {kind_of(x)}; expected a number, or a tensor of one number a head.")
    return float(x) if isinstance(x, (int, float)) else parameter(x, name)


def by_head(x: float | Tensor, s: Tensor) -> float | Tensor:
    """A scalar field, shaped and typed to multiply s (*batch, h, n, d)."""
    if not isinstance(x, Tensor):
        return x
    return (x[..., None, None] if x.dim() else x).to(s.dtype)


def shape_error_by_head(x: float | Tensor, name: str, heads: int) -> str | None:
    """Why a scalar field does not fit that many heads, as a sentence."""
    if not isinstance(x, Tensor) or tuple(x.shape) in ((), (1,), (heads,)):
        return None
    return f"{name} has shape {tuple(x.shape)}; expected () or one number a head, ({heads},)."


def drawn(frame: Frame, *shape: int) -> Tensor:
    """Normal float64 numbers, for examples."""
    return torch.randn(shape, dtype=torch.float64, device=frame.device)
