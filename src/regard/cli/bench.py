"""regard bench: regard against torch on this machine, in under a minute, results checked first."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.api import attention
from regard.backends.native.ffi import chosen
from regard.backends.reference import Reference
from regard.cli.machine import bandwidth, peak, processor
from regard.core.positions import Positions
from regard.core.shapes import count_of
from regard.masks.algebra import Everything, Mask
from regard.masks.positional import Causal
from regard.testing import error, tolerance

ROWS = 32  # queries whose results are checked
LEAST_TURNS = 3  # of each call, however short the time
BUSY = 0.25  # the spread from which a time says little
LATE = 1.0  # seconds over the time that are worth a word
HEAD = ("call", "q", "regard", "torch", "ahead", "share")


@dataclass(frozen=True)
class TimedCall:
    """q (1, heads, n, d) against keys (1, key heads, nk, d)."""

    name: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32
    mask: Mask = Everything()
    key_heads: int | None = None
    nk: int | None = None

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        b, h, n, d = self.shape
        random, keys = torch.Generator().manual_seed(0), (b, self.key_heads or h, self.nk or n, d)
        q, k, v = (
            torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").to(self.dtype)
            for shape in (self.shape, keys, keys)
        )
        return q, k, v

    def share(self, seconds: float, flops: float, read: float) -> str:
        """Of the float32 multiply-add peak, for float32 alone; where there is one query, of the bandwidth."""
        (b, h, n, d), nk = self.shape, self.nk or self.shape[2]
        if n == 1:
            size = 2 * b * (self.key_heads or h) * nk * d * self.dtype.itemsize
            return f"{size / seconds / read:.0%} read"
        if self.dtype != torch.float32:
            return "-"  # other dtypes have other peaks
        pairs = n * (n + 1) // 2 if isinstance(self.mask, Causal) else n * nk
        return f"{4 * b * h * pairs * d / seconds / flops:.0%} peak"


CALLS = (
    TimedCall("small", (1, 4, 16, 32)),
    TimedCall("float32", (1, 12, 512, 64)),
    TimedCall("float32", (1, 12, 2048, 64)),
    TimedCall("float32 causal", (1, 12, 2048, 64), mask=Causal()),
    TimedCall("bfloat16", (1, 12, 2048, 64), torch.bfloat16),
    TimedCall("bfloat16 causal", (1, 12, 2048, 64), torch.bfloat16, Causal()),
    TimedCall("decode float32", (1, 32, 1, 128), key_heads=8, nk=8192),
    TimedCall("decode bfloat16", (1, 32, 1, 128), torch.bfloat16, key_heads=8, nk=8192),
)


@dataclass(frozen=True)
class Bench:
    """What the machine is, a row of text for each call as it is measured, and what is to be known of the times.

    deadline  when the time is over, as perf_counter counts
    spreads   of each measured time, filled in as the rows are asked for
    """

    machine: str
    rows: Iterator[tuple[str, ...]]
    deadline: float
    spreads: list[float]

    def notes(self) -> tuple[str, ...]:
        """After the rows: that the machine was busy, and that the time did not suffice."""
        found: list[str] = []
        widest, load, cores = max(self.spreads, default=0.0), _load(), os.cpu_count() or 1
        if widest > BUSY or load > cores + torch.get_num_threads() * 0.5:
            found.append(
                f"this machine seems busy: times vary by up to ±{widest:.0%}, and {load:.1f} threads ran on its "
                f"{cores} cores in the last minute. Close other programs and measure again."
            )
        late = time.perf_counter() - self.deadline
        if late > LATE:
            found.append(f"each call has to run {LEAST_TURNS} times: that took {late:.0f} s more than --seconds.")
        return tuple(found)


def bench(seconds: float, calls: tuple[TimedCall, ...] | None = None) -> Bench:
    """Measures the machine at once and the calls as the rows are asked for, within so many seconds.

    The time counts from here: what the machine's own limits and the checks of the results take is part of it. Raises
    ValueError where there are no kernels, for a negative time, or where a result is wrong: nothing is timed then.
    """
    if not 0 <= seconds < math.inf:
        raise ValueError(f"--seconds is {seconds:g}; expected a number of seconds, 0 or more.")
    calls, threads, deadline = CALLS if calls is None else calls, torch.get_num_threads(), time.perf_counter() + seconds
    flops, read = peak(threads), bandwidth(threads)
    machine = (
        f"{processor()}, {count_of(threads, 'thread')}, kernels {chosen()}, torch {torch.__version__}\n"
        f"measured: multiply-add peak {flops / 1e9:.0f} Gflop/s in float32, memory read {read / 1e9:.0f} GB/s"
    )
    spreads: list[float] = []

    def rows() -> Iterator[tuple[str, ...]]:
        for number, call in enumerate(calls):
            left = max(deadline - time.perf_counter(), 0.0)
            row, spread = _row(call, left / (len(calls) - number), flops, read)
            spreads.append(spread)
            yield row

    return Bench(machine, rows(), deadline, spreads)


def _load() -> float:
    """How many threads ran or wanted to, on average in the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


@torch.no_grad()
def _row(call: TimedCall, seconds: float, flops: float, read: float) -> tuple[tuple[str, ...], float]:
    """The texts of a row, and the larger spread of its two times."""
    end = time.perf_counter() + seconds
    q, k, v = call.inputs()
    causal, grouped = isinstance(call.mask, Causal), k.shape[1] != q.shape[1]

    def ours() -> Tensor:
        return attention(q, k, v, mask=call.mask)

    def theirs() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    _check(call, q, k, v, ours())
    first, second = _turns((ours, theirs), end)
    ahead = f"{second.median / first.median:.2f}x"
    share = call.share(first.median, flops, read)
    row = call.name, "×".join(map(str, call.shape)), str(first), str(second), ahead, share
    return row, max(first.spread, second.spread)


def _check(call: TimedCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Some rows of the result against Reference in float64."""
    rows = torch.linspace(0, q.shape[-2] - 1, min(ROWS, q.shape[-2]), dtype=torch.float32, device="cpu").long()
    positions = Positions(rows, torch.arange(k.shape[-2], dtype=torch.int64, device="cpu"))
    exact, plain = (
        attention(
            q[..., rows, :].to(dtype),
            k.to(dtype),
            v.to(dtype),
            mask=call.mask,
            positions=positions,
            backend=Reference(),
        )
        for dtype in (torch.float64, call.dtype)
    )
    off, allowed = error(out[..., rows, :], exact), tolerance(exact, plain)
    if not off <= allowed:
        raise ValueError(
            f"{call.name} {call.shape}: regard is off by {off:.1e} from float64, {allowed:.1e} is allowed; "
            "nothing is timed. Please report this with the output of the command."
        )


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: the median, and half the distance of the quartiles as a share of it.

    >>> str(Timing.of([0.0009, 0.001, 0.0011]))
    '1 ms ±10%'
    """

    median: float
    spread: float

    @staticmethod
    def of(times: list[float]) -> Timing:
        low, median, high = statistics.quantiles(times, n=4)
        return Timing(median, (high - low) / 2 / median)

    def __str__(self) -> str:
        return f"{_length(self.median)} ±{self.spread:.0%}"


def _turns(runs: tuple[Callable[[], object], ...], end: float) -> list[Timing]:
    """The times of a call of each, which take turns until the time is over, but LEAST_TURNS times at least."""
    times: list[list[float]] = [[] for _ in runs]
    while len(times[0]) < LEAST_TURNS or time.perf_counter() < end:
        for run, found in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return [Timing.of(found) for found in times]


def _length(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
