"""Lets MKL choose its vector functions in one thread, before torch calls them from several.

Torch computes exp, log, sin and the like with MKL, each thread a part of the tensor. MKL chooses the code of such a
function at its first call. Where two threads make this first call at once, one of them may run code of half the
digits: float64 cosines were off by 1e-8 in 2 to 10 of 120 fresh processes, and the next call was right. See
github.com/pytorch/pytorch/issues/188792.
"""

from __future__ import annotations

import torch

# Those that torch gives to MKL and that regard calls.
FUNCTIONS = ("cos", "erf", "exp", "expm1", "log", "log10", "log1p", "sin", "sqrt", "tanh")


def choose_functions() -> None:
    """Calls each function with one number, which a single thread does. Some microseconds each."""
    if torch.backends.mkl.is_available():
        for dtype in (torch.float32, torch.float64):
            number = torch.ones(1, dtype=dtype, device="cpu")
            for name in FUNCTIONS:
                getattr(torch, name)(number)
