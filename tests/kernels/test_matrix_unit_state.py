"""A matrix unit's registers belong to a thread: other threads and processes, signals and forks change no bit.

On every processor; what is tested is the best instruction set that it has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels

pytestmark = needs_kernels

# Computes, forks, computes again in both processes, and prints what each found.
CHILD = """
import os, torch, regard as rg
torch.set_num_threads(1)
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 300, 64).bfloat16() for _ in range(3))
first = rg.attention(q, k, v)
pid = os.fork()
again = all(torch.equal(rg.attention(q, k, v), first) for _ in range(20))
if pid == 0:
    os._exit(0 if again else 1)
_, status = os.waitpid(pid, 0)
print(again, status, first.float().sum().item())
"""


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 4, 300, 64).bfloat16().requires_grad_() for _ in range(3))
    return q, k, v


def both_ways(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    out = rg.attention(*tensors)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_threads_that_never_computed_before() -> None:
    tensors = drawn()
    expected = both_ways(tensors)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: both_ways(tensors), range(32)))
    assert all(same(result, expected) for result in results)


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_signals_in_the_middle() -> None:
    """The system interrupts a kernel; the handler, in Python, runs after it and computes attention itself."""
    tensors = drawn()
    plain = tuple(t.detach() for t in tensors)
    expected, seen, running = both_ways(tensors), list[Tensor](), list[bool]()

    def handler(*_: object) -> None:
        if running or len(seen) == 20:  # it may take longer than it is until the next signal
            return
        running.append(True)
        seen.append(rg.attention(*plain))
        running.clear()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        results = [both_ways(tensors) for _ in range(60)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    assert all(same(result, expected) for result in results)
    assert all(torch.equal(out, expected[0]) for out in seen)


@pytest.mark.skipif(os.name != "posix", reason="forks")
def test_two_processes_at_once_and_a_fork_after_use() -> None:
    command = [sys.executable, "-c", CHILD]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [child.communicate()[0].split() for child in children]
    assert said[0] == said[1]
    assert said[0][:2] == ["True", "0"]
