"""How the native kernels behave as guests of the process: interrupts, forks, modes, states."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import regard as rg
from needed import needs_kernels

pytestmark = needs_kernels


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as Python has it; a shell starts what runs in its background without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_answered_and_the_next_call_is_right() -> None:
    x = torch.randn(1, 2, 3000, 16)
    right = rg.attention(x, x, x, backend=rg.Native())
    end = time.monotonic() + 60

    def calls() -> None:
        while time.monotonic() < end:
            rg.attention(x, x, x, backend=rg.Native())

    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        calls()
    timer.join()
    assert torch.equal(rg.attention(x, x, x, backend=rg.Native()), right)


@pytest.mark.parametrize("flush", [True, False])
def test_the_floating_point_mode_of_the_caller_stays(flush: bool) -> None:
    if not torch.set_flush_denormal(flush):
        pytest.skip("this processor cannot flush denormals")
    try:
        x = torch.randn(2, 2, 70, 16)
        rg.attention(x, x, x, backend=rg.Native())
        small = torch.tensor([1e-38]) * torch.tensor([1e-3])
        assert (small.item() == 0) is flush
    finally:
        torch.set_flush_denormal(False)


def test_nothing_global_is_touched() -> None:
    x = torch.randn(2, 2, 70, 16)

    def state() -> tuple[object, ...]:
        return torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), os.environ.get("REGARD_ISA")

    before, random = state(), torch.get_rng_state()
    for given in ({}, {"mask": rg.Causal()}, {"dropout": rg.Dropout(0.5, seed=1)}, {"sink": 0.0}):
        rg.attention(x, x, x, **given, backend=rg.Native())
    assert state() == before and torch.equal(torch.get_rng_state(), random)


def test_denormal_and_huge_numbers() -> None:
    q, k, v = (torch.randn(1, 1, 70, 8) for _ in range(3))
    for size in (1e-40, 1e34, -1e34):
        out, right = (rg.attention(q * size, k, v, backend=each) for each in (rg.Native(), rg.Reference()))
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-6)
    for backend in (rg.Native(), rg.Reference()):  # scores of ±inf, as (inf - inf) in the definition
        assert not rg.attention(q * 1e34, k * 1e34, v, backend=backend).isfinite().any()
