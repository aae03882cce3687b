"""What this processor can do at most: its name, its multiply-add peak and its memory bandwidth, as measured."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from regard.backends.native.ffi import chosen, load, why_not_built

_TRIES = 10  # the best of these counts: whatever else runs only slows
_STEPS = 4_000_000  # of the peak's loop, about 10 ms
_BUFFER = 512 << 20  # bytes, far more than the caches hold


def processor() -> str:
    """Its name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def peak(threads: int) -> float:
    """Floating-point operations a second of float32 multiply-adds in registers, on so many threads at once.

    In the chosen instruction set. Raises ValueError where the kernels were not built.
    """
    run = _kernel("regard_peak", ctypes.c_double, ctypes.c_int64)
    with ThreadPoolExecutor(threads) as pool:  # ctypes lets go of Python's lock

        def once() -> float:
            return sum(pool.map(run, [_STEPS] * threads))

        return max(_rate(once) for _ in range(_TRIES))


def bandwidth(threads: int) -> float:
    """Bytes a second at which so many threads read memory, a share of a buffer each.

    Raises ValueError where the kernels were not built.
    """
    run = _kernel("regard_bandwidth", ctypes.c_float, ctypes.c_void_p, ctypes.c_int64)
    parts = torch.ones(_BUFFER // 4, dtype=torch.float32, device="cpu").chunk(threads)
    with ThreadPoolExecutor(threads) as pool:

        def once() -> float:
            found = pool.map(lambda part: run(part.data_ptr(), part.numel()), parts)
            assert all(found)
            return float(_BUFFER)

        return max(_rate(once) for _ in range(_TRIES))


def _kernel(name: str, answer: Any, *given: Any) -> Callable[..., float]:
    isa = chosen()
    if isa is None:
        raise ValueError(
            f"the native kernels were not built: {why_not_built()}. Install regard again with a C++ compiler that "
            "works (g++ or clang)."
        )
    run = getattr(load(isa).handle, name)
    run.restype, run.argtypes = answer, given
    return run


def _rate(once: Callable[[], float]) -> float:
    start = time.perf_counter()
    done = once()
    return done / (time.perf_counter() - start)
