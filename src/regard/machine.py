"""What this processor can do at most: its name, its multiply-add peak and its memory bandwidth, as measured."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from regard.backends.library import chosen, load

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
    isa = chosen()
    if isa is None:
        raise ValueError(
            "the native kernels were not built: no C++ compiler was found when regard was installed. Install one "
            "(g++ or clang) and regard again."
        )
    run = load(isa).handle.regard_peak
    run.restype, run.argtypes = ctypes.c_double, (ctypes.c_int64,)
    with ThreadPoolExecutor(threads) as pool:  # ctypes lets go of Python's lock

        def once() -> float:
            return sum(pool.map(run, [_STEPS] * threads))

        return max(_rate(once) for _ in range(_TRIES))


def bandwidth(threads: int) -> float:
    """Bytes a second that a sum over memory reads, on so many threads."""
    buffer, before = torch.ones(_BUFFER // 8, dtype=torch.int64), torch.get_num_threads()

    def once() -> float:
        return float(int(buffer.sum()) * 8)

    try:
        torch.set_num_threads(threads)
        return max(_rate(once) for _ in range(_TRIES))
    finally:
        torch.set_num_threads(before)


def _rate(once: Callable[[], float]) -> float:
    start = time.perf_counter()
    done = once()
    return done / (time.perf_counter() - start)
