"""Distributions of numbers on which float32 products of bfloat16 parts could be worse than those of float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Tensors = tuple[Tensor, Tensor, Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def integers(low: int, high: int, n: int, d: int) -> Tensor:
    return torch.randint(low, high, (2, n, d)).float()


def decades(*shape: int) -> Tensor:
    """Sizes spread evenly over eight decades, both signs."""
    return torch.randn(shape).sign() * 10 ** (8 * torch.rand(shape) - 6)


def cancelling(*shape: int) -> Tensor:
    """Neighbouring features that differ by the last bits alone, with opposite signs."""
    x = torch.randn(shape)
    x[..., 1::2] = -x[..., ::2] * (1 + 1e-6 * torch.randn_like(x[..., ::2]))
    return x


# q, k and v of float32 calls, for the sizes nq, nk, d.
DISTRIBUTIONS: dict[str, Callable[[int, int, int], Tensors]] = {
    "normal": lambda nq, nk, d: (normal(2, nq, d), normal(2, nk, d), normal(2, nk, d)),
    "keys offset by 1e4": lambda nq, nk, d: (normal(2, nq, d), normal(2, nk, d) + 1e4, normal(2, nk, d)),
    "values offset by 1e4": lambda nq, nk, d: (normal(2, nq, d), normal(2, nk, d), normal(2, nk, d) + 1e4),
    "scores of 1e4": lambda nq, nk, d: (normal(2, nq, d) * 30, normal(2, nk, d) * 30, normal(2, nk, d)),
    "cancelling sums": lambda nq, nk, d: (normal(2, nq, d).abs(), cancelling(2, nk, d), cancelling(2, nk, d)),
    "log-normal with signs": lambda nq, nk, d: (
        normal(2, nq, d).exp() * normal(2, nq, d).sign(),
        normal(2, nk, d).exp() * normal(2, nk, d).sign(),
        normal(2, nk, d).exp() * normal(2, nk, d).sign(),
    ),
    "eight decades": lambda nq, nk, d: (normal(2, nq, d) / 10, decades(2, nk, d), decades(2, nk, d)),
    "tiny": lambda nq, nk, d: (normal(2, nq, d) * 1e15, normal(2, nk, d) * 1e-15, normal(2, nk, d) * 1e-20),
    "small integers": lambda nq, nk, d: (integers(-3, 4, nq, d), integers(-3, 4, nk, d), integers(-3, 4, nk, d)),
    "ones and zeros": lambda nq, nk, d: (integers(0, 2, nq, d), integers(0, 2, nk, d), integers(0, 2, nk, d)),
}
