"""Memory of answers: apart from malloc's heap, and otherwise a tensor like any other."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from needed import needs_kernels
from regard.inspect.kept import LEAST, empty

FREE = """
import json, torch
import regard as rg

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

q, k = torch.randn(8, 4096, 4), torch.randn(8, 256, 4)
looks = [rg.look(q, k, facts=(rg.facts.Top(8),)) for _ in range(40)]
pin = torch.empty(1000)  # at the end of the heap
held = resident()
looks.clear()
print(json.dumps([held - resident(), 40 * 8 * 4096 * (8 * 12 + 4 + 4)]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs what Linux tells of a process")
@needs_kernels
@pytest.mark.full
def test_answers_are_given_back_to_the_system() -> None:
    """Also where malloc keeps all that is freed in its heap, as it does once tensors of 32 MB were freed."""
    keeping = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    command = [sys.executable, "-c", FREE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **keeping})
    assert done.returncode == 0, done.stderr
    freed, answers = json.loads(done.stdout)
    assert freed > 0.9 * answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, LEAST // 8, LEAST // 4 + 1])
def test_a_tensor_like_any_other(count: int, dtype: torch.dtype) -> None:
    kept = empty((3, count), dtype)
    assert (kept.shape, kept.dtype, kept.is_contiguous()) == ((3, count), dtype, True)
    right = torch.arange(3 * count, dtype=dtype).view(3, count)
    kept.copy_(right)
    assert torch.equal(pickle.loads(pickle.dumps(kept)), right)
    kept.share_memory_()
    assert torch.equal(kept, right)
