"""Memory grows with the sequence, not with its square: peaks of forward and backward, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from regard.backends.library import runnable

MEASURE = """
import json, resource, sys
import torch, regard as rg

n, backend = int(sys.argv[1]), {"Tiled": rg.Tiled(), "Native": rg.Native(), "Reference": rg.Reference()}[sys.argv[2]]

def run(n):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 64, requires_grad=True) for _ in range(3))
    w_q, w_k, w = (torch.randn(*size).mul(0.1).requires_grad_() for size in ((64, 32), (64, 32), (32,)))
    score = rg.Additive(w_q, w_k, w)
    rg.attention(q[None], k[None], v[None], score=score, backend=backend).square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v, w_q, w_k, w))

def peak():
    try:  # of this program alone: ru_maxrss begins at what the process that started it held
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

run(64)  # what loads once is no growth
before = peak()
run(n)
print(json.dumps(peak() - before))
"""

# as many numbers of 4 bytes as a dense evaluation would hold once: heads × n² × hidden
DENSE = {n: 2 * n * n * 32 * 4 for n in (1024, 4096, 16384)}
LIMIT = 1_000_000_000  # at n = 16,384, where a dense evaluation takes 68 GB


def growth(n: int, backend: str = "Tiled") -> int:
    # one thread holds what several hold; several that wait for a busy core take many times as long
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(n), backend],
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout))


def test_an_additive_score_in_linear_memory() -> None:
    """A quarter of the sequence, a quarter of the limit; dense it would be 4.3 GB."""
    assert growth(4096) < LIMIT // 4 < DENSE[4096] // 16


@pytest.mark.skipif(not runnable(), reason="needs the native kernels: no C++ compiler was found")
def test_an_additive_score_natively() -> None:
    """Two heads of 64 of n = 16,384 in half of the limit; a part of that here."""
    assert growth(4096, "Native") < LIMIT // 8


def test_the_measure_sees_a_dense_evaluation() -> None:
    assert growth(1024, "Reference") > DENSE[1024]


@pytest.mark.slow
def test_an_additive_score_of_16384_keys() -> None:
    assert growth(16384) < LIMIT


@pytest.mark.slow
@pytest.mark.skipif(not runnable(), reason="needs the native kernels: no C++ compiler was found")
def test_an_additive_score_of_16384_keys_natively() -> None:
    assert growth(16384, "Native") < LIMIT // 2
