"""Padding tokens as queries: a mask that leaves their rows empty."""

from __future__ import annotations

from torch import Tensor

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
