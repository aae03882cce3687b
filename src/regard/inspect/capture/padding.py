"""Padding: its queries ask nothing, where they are known."""

from __future__ import annotations

from torch import Tensor

from regard.masks.dense import Dense


def asked_by(real: Tensor) -> Dense:
    """Only real tokens ask: booleans (batch, nq), True = real. The rows of padding are empty, as in Lengths(queries=).

    What a model computes there is thrown away; in sums over queries, and in means, it would stand beside the rest.

    >>> import torch
    >>> asked_by(torch.tensor([[True, True, False]])).draw(3)
    ■■■
    ■■■
    ···
    """
    return Dense(real[:, None, :, None])
