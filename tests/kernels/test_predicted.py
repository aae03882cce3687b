"""The inner loops that the compiler makes: llvm-mca predicts that they keep the multipliers busy; no spills."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import predicted

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (predicted.ANALYZER and predicted.ARM and predicted.X86),
        reason="needs llvm-mca-22 and compilers for x86-64 and aarch64 (in Debian the packages llvm-22, g++ and "
        "g++-aarch64-linux-gnu)",
    ),
]
# Multiply-adds a cycle, at least. LLVM's own mistakes about a processor are in benchmarks/results/predicted.md.
LEAST = {
    ("neoverse-n1", "neon", "Floats"): 6.2,
    ("neoverse-v1", "neon", "Floats"): 14.5,
    ("neoverse-v2", "neon", "Floats"): 12.3,
    ("apple-m1", "neon", "Floats"): 11,
    ("neoverse-v1", "neonbf16", "BFloat16Pairs"): 53,
    ("neoverse-v2", "neonbf16", "BFloat16Pairs"): 40,
    ("apple-m4", "neonbf16", "BFloat16Pairs"): 40,
    ("neoverse-v1", "sve256", "Floats"): 15.5,
    ("neoverse-v1", "sve256", "BFloat16Pairs"): 54,
    ("znver4", "avx2", "Floats"): 15,
    ("znver4", "avx512", "Floats"): 12,
    ("sapphirerapids", "avx2", "Floats"): 15,
    ("sapphirerapids", "avx512", "Floats"): 15,
}

loops = functools.lru_cache(predicted.loops_of_dtype)


@pytest.mark.parametrize("isa", predicted.MARCH)
def test_inner_loops_hold_their_sums_in_registers(isa: str) -> None:
    found = loops(isa)
    for elements in {loop.elements for loop in found}:
        same = [loop for loop in found if loop.elements == elements]
        assert sorted(loop.function for loop in same) == ["dot_rows", "value_rows"]
        assert [loop.spills for loop in same] == [0, 0], same


@pytest.mark.parametrize(("processor", "isa", "elements"), LEAST)
def test_inner_loops_are_predicted_to_be_fast(processor: str, isa: str, elements: str) -> None:
    for loop in loops(isa):
        if loop.elements != elements:
            continue
        found = predicted.predict(loop, processor, isa)
        assert LEAST[processor, isa, elements] <= found.rate <= found.limit * 1.01, (loop.function, found, loop.lines)


def test_the_table_of_powers_makes_weights_faster_than_a_polynomial() -> None:
    rates = {
        (isa, loop.elements): predicted.weights_per_cycle(loop, "neoverse-v1", isa)
        for isa in ("neon", "neonbf16", "sve256")
        for loop in predicted.weight_loops(isa)
    }
    assert rates["sve256", "Floats"] > 1.5 * rates["neon", "Floats"]
    assert rates["sve256", "BFloat16Pairs"] > 1.5 * rates["neonbf16", "BFloat16Pairs"]


def test_a_loop_that_spills_is_noticed() -> None:
    lines = ("ldr q1, [sp, 16]", "fmla v0.4s, v1.4s, v2.s[0]", "str q0, [sp, 32]")
    slow = predicted.Loop("dot_rows", "Floats", lines)
    assert slow.spills == 2
    assert predicted.predict(slow, "neoverse-v1", "neon").rate < 4
