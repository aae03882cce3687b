"""Dtypes: those that a call may have, and the wider one in which its sums are kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: float32 for float16, bfloat16 and float32; float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """x in its accumulation dtype."""
    return x.to(accumulator(x.dtype))


def exact(device: str) -> AbstractContextManager[Any]:
    """Where autocast, if that device has one, is off: sums are kept in the dtype that they are given."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
