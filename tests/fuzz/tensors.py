"""Random numbers in random memory: values of every size, tensors of every stride."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Source:
    """What a seed gives: choices by `choice`, numbers by `normal`."""

    choice: random.Random
    numbers: torch.Generator

    @staticmethod
    def of(seed: int) -> Source:
        return Source(random.Random(seed), torch.Generator().manual_seed(seed))

    def maybe(self, p: float) -> bool:
        return self.choice.random() < p

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.numbers, dtype=torch.float64, device="cpu")

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.numbers, device="cpu")

    def values(self, shape: tuple[int, ...]) -> Tensor:
        """Mostly normal numbers; sometimes zeros, whole numbers, large ones, or ones that share an offset."""
        x = self.normal(*shape)
        kind = self.choice.choices(range(7), (65, 10, 4, 4, 6, 6, 5))[0]
        if kind == 1:
            return x * self.choice.choice((0.01, 0.1, 3, 10))
        if kind == 2:
            return torch.zeros_like(x)
        if kind == 3:
            return x.round()
        if kind == 4:  # rows of different sizes
            return x * self.normal(*shape[:-1], 1).exp()
        if kind == 5:
            return x + self.choice.choice((-1, 1)) * self.choice.choice((10, 100))
        if kind == 6:
            return x * self.choice.choice((100, 1e4))
        return x

    def laid_out(self, x: Tensor, *, expand: bool = True, contiguous: int = 50) -> Tensor:
        """The same numbers in a memory of random strides; what lies between them is NaN.

        contiguous: how often it has no gaps, in 100 calls or so.
        """
        kind = self.choice.choices(range(6), (contiguous, 12, 12, 10, 8, 8 if expand else 0))[0]
        if kind == 1 and x.dim() > 1:  # the last two axes swapped
            return x.mT.contiguous().mT
        if kind == 2 and x.dim() > 2:  # (batch, n, heads, d) as (batch, heads, n, d)
            return x.transpose(-3, -2).contiguous().transpose(-3, -2)
        if kind == 3:  # gaps behind each row, and before the first
            wide = _nothing(*x.shape[:-1], x.shape[-1] + 5, like=x)
            wide[..., 3 : 3 + x.shape[-1]] = x
            return wide[..., 3 : 3 + x.shape[-1]]
        if kind == 4:  # gaps between the numbers of an axis
            axis = self.choice.randrange(x.dim())
            wide = _nothing(*(2 * n if a == axis else n for a, n in enumerate(x.shape)), like=x)
            index = tuple(slice(1, None, 2) if a == axis else slice(None) for a in range(x.dim()))
            wide[index] = x
            return wide[index]
        if kind == 5 and x.numel():  # one memory for all along an axis
            axis = self.choice.randrange(x.dim())
            return x.narrow(axis, 0, 1).clone().expand(x.shape)
        return x.contiguous()


def _nothing(*shape: int, like: Tensor) -> Tensor:
    """NaN, True, or a number far from every index."""
    fill = math.nan if like.dtype.is_floating_point else (like.dtype == torch.bool or -(1 << 30))
    return torch.full(shape, fill, dtype=like.dtype)


@dataclass(frozen=True, eq=False)
class Size:
    """The size of a call, and its positions. unplaced: there are none, and nq differs from nk."""

    batch: tuple[int, ...]
    heads: int
    key_heads: int
    nq: int
    nk: int
    headed: bool
    dtype: torch.dtype
    positions: tuple[Tensor, Tensor] | None
    placed: str
    unplaced: bool

    def broadcast(self, s: Source) -> tuple[int, ...]:
        """A shape that broadcasts to the caller's (*batch, heads, nq, nk)."""
        full = (*self.batch, *((self.heads,) if self.headed else ()), self.nq, self.nk)
        shape = tuple(1 if s.maybe(0.3) else n for n in full)
        return shape[s.choice.randrange(len(shape)) if s.maybe(0.5) else 0 :]

    def per_head(self, s: Source) -> tuple[int, ...]:
        """The shape of a number, or of a number for each head."""
        return s.choice.choice(((), (self.heads,), (self.heads,), (1,)))

    def parameter(self, s: Source, x: Tensor) -> Tensor:
        """A tensor of a score, in the call's dtype or a wider one."""
        dtype = s.choice.choice((self.dtype, self.dtype, torch.float32, torch.float64))
        x = x.to(dtype)
        return s.laid_out(x) if x.dim() and x.numel() else x
