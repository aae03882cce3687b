"""Masks that are written out or computed pair by pair: Dense and Where."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import ClassVar

import torch
from torch import Tensor

from regard.core.arrays import plain_tensor
from regard.core.region import Frame, Region, Tiling
from regard.core.shapes import broadcasts, listed
from regard.core.tracing import data_unavailable
from regard.core.wrong_calls import answers_wrong_calls, check_parameters, kind_of
from regard.masks.algebra import Mask, cover_of
from regard.masks.picture import Extent
from regard.masks.ways import way_to_mask


@answers_wrong_calls(
    {
        **dict.fromkeys(("mask", "attn_mask"), "write Dense(mask) for booleans, True = may attend"),
        "key_padding_mask": "write Dense(~key_padding_mask[:, None, None, :]): there True = padding, here True = "
        "may attend",
        "attention_mask": "write Dense(attention_mask.bool()[:, None, None, :]) where 1 = may attend",
    },
    "allowed holds booleans, True = may attend, and broadcasts to (*batch, heads, nq, nk).",
)
@dataclass(frozen=True)
class Dense(Mask):
    """A boolean tensor, True = may attend, broadcastable to the call's (*batch, heads, nq, nk).

    It uses the caller's memory; nothing larger is made. The native kernels skip keys that it hides from all of 64
    neighbouring queries, at the ends of a tile and in whole tiles: a band costs little more than its pairs. Two axes
    are always (nq, nk); a padding mask (batch, nk) is Dense(mask[:, None, None, :]). Where batch == nq two axes could
    be either, and a UserWarning says so, once.
    regard.masks.convert reads masks in which True means *masked*. Raises TypeError for numbers, ShapeError if it does
    not broadcast.

    >>> Dense(torch.tensor([[True, False], [True, True]])).draw(2)
    ■·
    ■■
    """

    positional: ClassVar[bool] = False
    allowed: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.allowed, FunctionType):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError("Dense.allowed is a function; write Where(fn).")
        allowed = plain_tensor(self.allowed, "Dense.allowed")
        if allowed.dtype != torch.bool:
            if allowed.dtype.is_floating_point:
                way = (
                    "a float mask added to the scores is score=... >> Bias(mask); 0 and 1 become a mask by mask.bool()"
                )
            else:
                way = "write mask.bool() if 1 means may attend, mask == 0 if 1 means masked"
            raise TypeError(f"Dense.allowed has dtype {allowed.dtype}; expected torch.bool, True = may attend: {way}.")
        object.__setattr__(self, "allowed", allowed)

    def visible(self, at: Region) -> Tensor:
        return at.pairs(self.allowed)

    def cover(self, at: Tiling) -> Tensor:
        least, largest = at.pairs(self.allowed)
        return cover_of(none=~largest, all_=least)

    def shape_error(self, frame: Frame) -> str | None:
        shape, full = tuple(self.allowed.shape), frame.shape if frame.headed else (*frame.batch, frame.nq, frame.nk)
        count = math.prod(frame.batch)
        one, each = ("[None, None]", "[:, None, None, :]") if frame.headed else ("[None]", "[:, None, :]")
        lengths = (
            f"a padding mask (batch, nk) is Dense(mask{each}), or Lengths(keys=mask.sum(-1)) if it pads at the end"
        )
        if not broadcasts(shape, full):
            return (
                f"Dense.allowed has shape {listed(shape)}; expected one that broadcasts to {listed(full)}; {lengths}."
            )
        if len(shape) == 2 and count == frame.nq == shape[0] > 1 and not data_unavailable(self.allowed):
            # no number in it and no stacklevel: so Python's filters show it once a process
            warnings.warn(
                "A Dense mask of two axes is read as (nq, nk). This call has as many sequences as queries, so a padding"
                " mask (batch, nk) would fit too. Say which it is, and this warning goes: (nq, nk) is "
                f"Dense(mask{one}); {lengths}.",
                stacklevel=1,
            )
        return None

    def batch(self) -> tuple[int, ...]:
        return tuple(self.allowed.shape[:-3])

    def extent(self) -> Extent:
        heads, nq, nk = (None if size == 1 else size for size in (1, 1, 1, *self.allowed.shape)[-3:])
        return Extent(heads, nq, nk)

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        shape = frame.shape if frame.headed else (*frame.batch, frame.nq, frame.nk)
        allowed = torch.rand(shape, device=frame.device, dtype=torch.float32) < 0.6
        allowed[..., 1:2, :] = False
        return cls(allowed), cls(torch.rand(1, frame.nk, device=frame.device, dtype=torch.float32) < 0.6)


@answers_wrong_calls({"mask_mod": "write Where(mask_mod)", "block_mask": "write Where(block_mask.mask_mod)"})
@dataclass(frozen=True)
class Where(Mask):
    """A mask computed by fn(b, h, i, j) -> boolean, the form of FlexAttention's mask_mod.

    b and h are the flat batch index and the head index, i and j the absolute positions of query and key: integer
    tensors that broadcast against each other. fn must work elementwise, by tensor operations, and may index other
    tensors.

    >>> Where(lambda b, h, i, j: (i - j).abs() <= 1).draw(3)
    ■■·
    ■■■
    ·■■
    """

    indexed: ClassVar[bool] = False

    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            way = way_to_mask(self.fn) or "expected a function of b, h, i and j, as in Where(lambda b, h, i, j: i >= j)"
            raise TypeError(f"Where.fn is {kind_of(self.fn)}; {way}.")

    def visible(self, at: Region) -> Tensor:
        try:
            seen = self.fn(at.b, at.h, at.i, at.j)
        except TypeError:
            names = ("b", "h", "i", "j")  # batch, head, position of the query, position of the key
            check_parameters(self.fn, "Where.fn", names, "Where(lambda b, h, i, j: i >= j)")
            raise
        except RuntimeError as error:
            if "Boolean value of Tensor" not in str(error):
                raise
            raise TypeError(
                "Where.fn asks whether a tensor of many pairs is true; write &, | and ~ for and, or and not, and "
                "torch.where for if."
            ) from error
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:  # pyright: ignore[reportUnnecessaryIsInstance]
            what = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Where.fn returned {what}; expected a boolean tensor, True = may attend.")
        return seen

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        return (cls(lambda b, h, i, j: (i * 3 + j * 5 + h + b) % 7 < 4),)
