"""Int8Rows: keys or values rounded to 8 bits, as a tensor that is widened only where that is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.core.deferred import DeferredRows, wrapper
from regard.core.dtypes import FLOATING, widen
from regard.core.paged import Paged, share_pages

STEPS = 127  # of a row's scale, from 0 to its largest number


class Int8Rows(DeferredRows):
    """Keys (or values), a tensor (*batch, heads, n, d) of the numbers `numbers * scales`.

    numbers  int8 (*batch, heads, n, d), from -127 to 127
    scales   float32 (*batch, heads, n, 1): one for each row

    `dtype` is what the tensor has for its readers. regard.attention computes with the products themselves, in float32
    or wider, and on some ways reads the int8 numbers where they lie: `explain` says whether a call does. An operation
    of torch gets the products rounded to `dtype`, and to(torch.float32) the products in float32.

    >>> x = Int8Rows(*rounded(torch.tensor([[1.0, -0.5, 0.004], [0.0, 0.0, 0.0]])), torch.float32)
    >>> x.numbers.tolist(), [round(row[0] * 127, 4) for row in x.scales.tolist()]
    ([[127, -64, 1], [0, 0, 0]], [1.0, 0.0])
    """

    numbers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls: type[Int8Rows], numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Int8Rows:
        made = wrapper(cls, numbers.shape, dtype=dtype, device=numbers.device)
        made.numbers, made.scales, made._written = numbers, scales, None
        return made

    @property
    def in_pages(self) -> bool:
        return isinstance(self.numbers, Paged)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        both = self.numbers, self.scales
        return tuple(part for t in both for part in (t.parts if isinstance(t, DeferredRows) else (t,)))

    def widened(self, dtype: torch.dtype) -> Tensor:
        """`products` of the numbers and scales."""
        return products(self.numbers, self.scales, dtype)

    def lifted(self, batch: tuple[int, ...], headed: bool) -> Int8Rows:
        """The same rows with these batch axes, and with an axis of one head where there is none."""
        if self.shape[:-3] == batch and headed:
            return self
        return Int8Rows(_lifted(self.numbers, batch, headed), _lifted(self.scales, batch, headed), self.dtype)

    def sliced(self, rows: slice) -> Tensor:
        """Some of the rows, where they lie; written out if they lie in pages."""
        if self.in_pages:
            return self[..., rows, :]
        return Int8Rows(self.numbers[..., rows, :], self.scales[..., rows, :], self.dtype)

    def lies_like(self, other: Any) -> bool:
        """Whether `other` is rows of int8 too, and all numbers and scales lie in tensors, or in pages of one table."""
        if type(other) is not Int8Rows:
            return False
        rest = other.numbers, self.scales, other.scales
        if type(self.numbers) is Paged:
            return all(share_pages(self.numbers, t) for t in rest)
        return not any(isinstance(t, DeferredRows) for t in (self.numbers, *rest))

    def _write_out(self) -> Tensor:
        return self.widened(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is torch.ops.aten._to_copy.default and dtype in FLOATING and type(args[0]) is Int8Rows:
            return func(args[0].widened(dtype), **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Int8Rows({tuple(self.shape)}, {self.dtype})"


def products(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """numbers * scales in float32 or float64; in a narrower dtype the products of float32, rounded."""
    wide = torch.promote_types(dtype, torch.float32)
    return (numbers.to(wide) * scales.to(wide)).to(dtype)


def rounded(x: Tensor, name: str = "x") -> tuple[Tensor, Tensor]:
    """Rows (..., n, d) as int8 and a scale each, float32 (..., n, 1): max|x| / 127, in float32.

    A row of zeros has the scale 0, and a row that holds NaN or infinity the scale NaN: all its numbers are then NaN.
    x differs from numbers * scales by at most half a scale, and the rounding of x / scale. A row's result depends on no
    other row.
    Raises TypeError for a dtype that is not floating.
    """
    if x.dtype not in FLOATING:
        raise TypeError(
            f"{name} has dtype {x.dtype}; rows are rounded to int8 from float16, bfloat16, float32 or float64: convert "
            "with .to(torch.float32)."
        )
    wide = widen(x)
    if not x.shape[-1]:
        return wide.to(torch.int8), wide.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
    scales = (wide.abs().amax(-1, keepdim=True) / STEPS).to(torch.float32)
    finite = scales < torch.inf  # NaN is not
    steps = torch.where(finite & (scales > 0), wide / scales, 0.0)
    return steps.round().clamp(-STEPS, STEPS).to(torch.int8), torch.where(finite, scales, torch.nan)


def _lifted(t: Tensor, batch: tuple[int, ...], headed: bool) -> Tensor:
    if isinstance(t, Paged):
        return t if t.shape[:-3] == batch else t.shared_by(*batch)
    t = t if headed else t.unsqueeze(-3)
    return t.expand(*batch, *t.shape[-3:])
