"""Padding tokens as queries: a mask that leaves their rows empty."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.masks.algebra import Mask
from regard.masks.dense import Dense


def real_queries(real: Tensor) -> Dense:
    """The mask in which only real tokens see keys, of booleans (batch, nq), True = real; as Lengths(queries=) has it.

    A model discards its outputs at padding, so the weights of these rows must not count in sums and means over queries.

    >>> import torch
    >>> real_queries(torch.tensor([[True, True, False]])).draw(3)
    ■■■
    ■■■
    ···
    """
    return Dense(real[:, None, :, None])


def of_real_queries(module: Any, mask: Mask, nq: int, nk: int) -> Mask:
    """A mask, only for queries that see themselves where a sequence reads itself: padding does not.

    A decoder that reads an encoder has a mask too, and nothing says which is which: a decoder's own is causal.
    """
    if not isinstance(mask, Dense) or nq != nk:
        return mask
    decoder = getattr(module, "is_decoder", False) or getattr(getattr(module, "config", None), "is_decoder", False)
    pairs = mask.allowed.expand(*mask.allowed.shape[:2], nq, nk)
    if decoder and bool(pairs.triu(1).any()):
        return mask
    real = pairs[:, 0].diagonal(dim1=-2, dim2=-1)
    return mask if bool(real.all()) else mask & real_queries(real)
