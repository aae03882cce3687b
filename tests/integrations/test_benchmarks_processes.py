"""The benchmark of several processes, for one small call: it ends, and its answer is that of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.processes import Case, run


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_line_of_the_table() -> None:
    line = run(Case(512, 2, "zigzag", backward=True), 2)
    _, call, ranks, _, _, sent, _, error, _ = (part.strip() for part in line.split("|"))
    assert call == "512 tokens, 2 x 64, causal, zigzag, both" and ranks == "2"
    assert float(sent) > 0 and float(error) < 1e-5
