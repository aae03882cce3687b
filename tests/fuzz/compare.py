"""How far a result may be from the exact one, and whether it is farther. Imports nothing of regard.

A result may have twice the root mean square error of a plain evaluation of the same formula in the same dtype. Where
the plain one is near the exact one by chance, or the formula magnifies every rounding, it is evaluated in float64 with
random roundings after each step: the allowed error is then six times the largest that these make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# score, shift, exponential, weight, product: each rounds
FLOOR = {torch.float64: 1e-14, torch.float32: 4 * 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Error:
    """Root mean square and largest difference of two results."""

    mean: float
    most: float

    @staticmethod
    def of(got: Tensor, exact: Tensor) -> Error:
        off = (got.double() - exact).abs().masked_fill(_same(got, exact), 0).nan_to_num(math.inf, math.inf)
        return Error(float(off.square().mean().sqrt()), float(off.max())) if off.numel() else Error(0, 0)

    def within(self, other: Error) -> bool:
        return self.mean <= other.mean and self.most <= other.most

    def times(self, factor: float) -> Error:
        return Error(factor * self.mean, factor * self.most)

    def joined(self, other: Error) -> Error:
        return Error(max(self.mean, other.mean), max(self.most, other.most))


def _same(got: Tensor, exact: Tensor) -> Tensor:
    """Where both are the same infinity, or the dtype ends before the exact number.

    Scores of float32 beyond ln 2 of its largest number may stand for that number: the kernels count in base 2.
    """
    same = got.double() == exact
    if got.dtype == torch.float32:
        same = same | ((exact.abs() > 2.35e38) & (got.abs() > 2.35e38) & (got.sign() == exact.sign()))
    if got.dtype in (torch.float16, torch.bfloat16):
        same = same | (exact.abs() > 0.98 * torch.finfo(got.dtype).max)
    return same


@dataclass(frozen=True, eq=False)
class Expected:
    """What a result should be, and how far it may be from that.

    exact, plain: in float64, and as a plain evaluation has it, in the dtype of the result. perturbed: with roundings.
    free: where it may hold anything. parts: how many results of its dtype were added to make it. scale: how large what
    cancelled in it may have been. terms: how many pairs of a query and a key each number of it is a sum over, where the
    plain evaluation, which adds in another order, says nothing about the roundings of that.
    """

    exact: Tensor
    plain: Tensor
    perturbed: Callable[[], Iterable[Tensor]]
    free: Tensor | None = None
    parts: int = 1
    scale: float = 0.0
    terms: int = 1

    def complaint(self, name: str, got: Tensor) -> str | None:
        """What is wrong with a result, as a sentence; None if nothing is."""
        exact, dtype = self.exact, self.plain.dtype
        if got.shape != exact.shape:
            return f"{name} has shape {tuple(got.shape)}; expected {tuple(exact.shape)}"
        if got.dtype != dtype:
            return f"{name} has dtype {got.dtype}; expected {dtype}"
        if self.scale > 0.98 * torch.finfo(dtype).max:
            return None  # what was added may have been infinite
        off, size = self._error(got), Error.of(exact.masked_fill(~exact.isfinite(), 0), torch.zeros(()))
        # of a float64 tensor too: the sums of a call in another dtype are float32
        tiny = torch.finfo(torch.float32).smallest_normal * 100
        if dtype == torch.float16:
            tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        least = FLOOR[dtype] * self.scale * self.parts + 2 * tiny
        allowed = self._error(self.plain).times(2).joined(size.times(self._floor)).times(self.parts)
        allowed = allowed.joined(Error(least, least))
        others = iter(self.perturbed())
        while not off.within(allowed):
            other = next(others, None)
            if other is None:
                told = f"off by {off.mean:.2e} (most {off.most:.2e}); allowed {allowed.mean:.2e} ({allowed.most:.2e})"
                return f"{name} is {told}; its size is {size.mean:.2e}"
            allowed = allowed.joined(self._error(other.to(dtype)).times(6 * self.parts))
        return None

    @property
    def _floor(self) -> float:
        """The error that is always allowed, relative to the result.

        The error of a sum grows as the square root of the additions (Higham, Accuracy and Stability, 4.2).
        """
        dtype = self.plain.dtype
        return FLOOR[dtype] + (torch.finfo(dtype).eps * math.sqrt(self.terms) if self.terms > 1 else 0.0)

    def _error(self, got: Tensor) -> Error:
        return Error.of(got if self.free is None else torch.where(self.free, self.exact.to(got.dtype), got), self.exact)
