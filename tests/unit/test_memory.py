"""Memory grows with the sequence, not with its square: peaks of forward, backward and looking, each in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from needed import needs_kernels

MEASURE = """
import json, resource, sys
import torch, regard as rg

n, what = int(sys.argv[1]), sys.argv[2]

def looking(n):
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, n, 32), torch.randn(1, 1, n, 32)
    f = rg.facts
    facts = (
        f.Entropy(), f.MaxScore(), f.Top(8), f.Received(), f.MeanReceived(), f.MaxReceived(), f.Distance(), f.Map(),
        f.ScoreMap(), f.Histogram(), f.Mass.first(4), f.Within(before=9, after=9), f.Offsets((-1, 1)), f.Rows([5]),
    )
    norms = rg.heads.value_norms(k, torch.randn(2, 32, 64))
    carried = tuple(f.Carried(norms, fact) for fact in (f.Received(), f.Top(8), f.Map(), f.Rows([5])))
    rg.look(q, k, facts=(*facts, *carried), mask=rg.Causal())

def linting(n):
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, n, 32), torch.randn(1, 1, n, 32)
    assert not rg.lint(q, k, k, mask=rg.Where(lambda b, h, i, j: j <= i), within=rg.Causal())

def losing(n):
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, n, 32, requires_grad=True) for _ in range(2))
    out = rg.entropy(q, k, mask=rg.Causal()).sum() + rg.max_score(q, k, mask=rg.Causal()).sum()
    out.backward()
    assert all(t.grad.isfinite().all() for t in (q, k))

def dense(n):
    q = torch.randn(2, n, 32, requires_grad=True)
    torch.special.entr(torch.softmax(q @ q.mT, -1)).sum().backward()

def attending(n):
    backend = {"Tiled": rg.Tiled(), "Native": rg.Native(), "Reference": rg.Reference()}[what]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 64, requires_grad=True) for _ in range(3))
    w_q, w_k, w = (torch.randn(*size).mul(0.1).requires_grad_() for size in ((64, 32), (64, 32), (32,)))
    score = rg.Additive(w_q, w_k, w)
    rg.attention(q[None], k[None], v[None], score=score, backend=backend).square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v, w_q, w_k, w))

def neighbours(n):
    def near(b, h, i, j):
        return ((i // 256 - j // 256).abs() <= 3) & ((i % 256 - j % 256).abs() <= 3)

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    rg.attention(q, k, v, mask=rg.Where(near), backend=rg.Native()).square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))

def pairs(n):
    function = {"weights": rg.attention_weights, "scores": rg.attention_scores}[what]
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, n, 32, requires_grad=True) for _ in range(2))
    answer = function(q, k, mask=rg.Causal())
    assert answer.shape == (1, 2, n, n)

def peak():
    try:  # of this program alone: ru_maxrss begins at what the process that started it held
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

known = {"looking": looking, "linting": linting, "losing": losing, "dense": dense, "weights": pairs, "scores": pairs}
known["neighbours"] = neighbours
run = known.get(what, attending)
run(64)  # what loads once is no growth
before = peak()
run(n)
print(json.dumps(peak() - before))
"""

# as many numbers of 4 bytes as a dense evaluation would hold once: heads × n² × hidden
DENSE = {n: 2 * n * n * 32 * 4 for n in (1024, 2048, 4096)}
LIMIT = 1_000_000_000  # at n = 16,384, where a dense evaluation takes 68 GB


def growth(n: int, what: str = "Tiled") -> int:
    # one thread holds what several hold; several that wait for a busy core take many times as long. glibc keeps small
    # blocks that were freed, between those that were not: as much as it happens to, up to four times what is held
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(n), what],
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout))


@pytest.mark.full
def test_an_additive_score_in_linear_memory() -> None:
    """Of an eighth of the sequence an eighth of the limit, of a quarter a quarter; dense they would be 1 and 4 GB."""
    few, many = growth(2048), growth(4096)
    assert few < LIMIT // 8 < DENSE[2048] // 8
    assert many < LIMIT // 4 < DENSE[4096] // 16 and many < 2.2 * few


@pytest.mark.full
@needs_kernels
def test_an_additive_score_natively() -> None:
    """Two heads of 64 of n = 16,384 in half of the limit; a part of that here."""
    assert growth(4096, "Native") < LIMIT // 8


@pytest.mark.full
def test_the_measure_sees_a_dense_evaluation() -> None:
    assert growth(1024, "Reference") > DENSE[1024]


# of one n × n of 2 heads in float32
SQUARE = {n: 2 * n * n * 4 for n in (2048, 6000)}


@pytest.mark.full
@pytest.mark.parametrize("what", ["looking", "linting", "losing"])
def test_looking_in_linear_memory(what: str) -> None:
    """A third of one matrix of weights, of which a dense evaluation holds several."""
    assert growth(6000, what) < SQUARE[6000] // 3


@pytest.mark.full
@pytest.mark.parametrize("what", ["weights", "scores"])
def test_weights_and_scores_hold_their_answer_and_one_strip(what: str) -> None:
    assert SQUARE[6000] < growth(6000, what) < 1.2 * SQUARE[6000]


@pytest.mark.full
def test_the_measure_sees_a_dense_entropy() -> None:
    assert growth(2048, "dense") > 2 * SQUARE[2048]


@pytest.mark.full
@needs_kernels
def test_an_additive_score_of_16384_keys_natively() -> None:
    assert growth(16384, "Native") < LIMIT // 2


@pytest.mark.full
@needs_kernels
def test_neighbours_in_an_image_of_65536_tokens() -> None:
    """Both passes: 3 KB a token; a bit a pair would be 8 KB, and 2 KB with a quarter of the tokens."""
    few, many = growth(1 << 14, "neighbours"), growth(1 << 16, "neighbours")
    assert many < 5 * few
    assert many < 250_000_000 < (1 << 32) // 8 // 2
