"""examples/long_context.py: two processes train on a text with the losses and the entropies of one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "long_context.py"
SMALL = ("--length", "1500", "--steps", "2", "--layers", "2", "--width", "64")


def run(processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(SCRIPT)]
    return subprocess.run([sys.executable, *command, *options], capture_output=True, text=True, check=False)


def numbers(line: str, output: str) -> list[float]:
    found = re.search(rf"^{line} (.*) nats", output, re.MULTILINE)
    assert found is not None, output
    return [float(x) for x in found[1].split()]


@pytest.mark.full
def test_two_processes_find_what_one_finds() -> None:
    outputs = [run(processes, *SMALL) for processes in (1, 2)]
    one, two = (output.stdout for output in outputs)
    assert two.count("bytes of text") == 2, outputs[1].stderr
    for line in ("loss", "entropy"):
        assert numbers(line, two) == pytest.approx(numbers(line, one), abs=2e-6)


@pytest.mark.full
def test_a_text_that_one_process_may_not_hold() -> None:
    limited = ("--length", "8192", "--steps", "1", "--memory", "350")
    alone = run(1, *limited)
    assert alone.returncode and re.search("allocate memory|MemoryError|bad_alloc", alone.stderr), alone.stderr[-3000:]
    assert len(numbers("loss", run(2, *limited).stdout)) == 1
