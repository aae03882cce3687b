"""Dtypes: those that a call may have, and the wider one in which its sums are kept."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)
# torch.amp.is_autocast_available says so, which torch.compile before 2.11 does not trace.
_WITHOUT_AUTOCAST = frozenset({"meta", "vulkan", "lazy", "fpga", "ve", "hip", "mkldnn", "opengl", "opencl", "ideep"})


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: float32 for float16, bfloat16 and float32; float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """x in its accumulation dtype."""
    return x.to(accumulator(x.dtype))


def autocast(device: str) -> bool:
    """Whether autocast is on for a device, if that has one."""
    return device not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(device)


def exact(device: str) -> AbstractContextManager[Any]:
    """Where autocast is off: sums are kept in the dtype that they are given."""
    return torch.autocast(device, enabled=False) if autocast(device) else nullcontext()
