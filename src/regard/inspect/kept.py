"""Memory for answers, which live longer than the tensors that are allocated around them."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

LEAST = 1 << 17  # bytes: below, what rounding to pages wastes counts


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without values, for an answer that outlives what is computed around it.

    A large one is mapped by itself and given back to the system when it is freed: in malloc's heap, answers would lie
    between temporaries of a model, and keep it from shrinking when those are freed.

    >>> empty((2, 3)).shape
    torch.Size([2, 3])
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, size, access=mmap.ACCESS_COPY), dtype=dtype).view(shape)
