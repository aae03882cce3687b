"""Indices that lead beside what a call has: the native kernels return an error and read nothing."""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.native.args import KernelArgs, lower
from regard.backends.native.ffi import runnable
from regard.backends.native.lower_mask import lower_mask
from regard.backends.native.torch_ops import traced

ROOT = Path(__file__).parents[2]
SOURCES = (
    "native/attention/forward.cpp",
    "native/attention/write_pages.cpp",
    "native/attention/backward.cpp",
    "native/additive/additive.cpp",
    "native/facts/facts.cpp",
    "tests/kernels/native_fuzz.cpp",
)
FLAGS = ("-std=c++17", "-O0", "-g1", "-Wno-psabi", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
X86 = {"base": ["-march=x86-64"], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
MARCH = X86 if platform.machine() == "x86_64" else {"base": [], "neon": []}
ENTRIES = (
    *(f"{kind}{entry}" for kind in ("", "additive_") for entry in ("forward", "backward")),
    "facts",
)


def compilers() -> list[str]:
    return [name for name in ("g++", "clang++") if shutil.which(name)]


def instruction_sets() -> list[str]:
    """The narrowest and the widest that run here."""
    able = [isa for isa in runnable() if isa in MARCH] or ["base"]
    return sorted({able[0], able[-1]})


@pytest.mark.full
@pytest.mark.skipif(not compilers(), reason="needs a C++ compiler")
@pytest.mark.parametrize("isa", instruction_sets())
def test_the_c_interface_under_sanitizers(isa: str, tmp_path: Path) -> None:
    """Right calls pass; each wrong field or index of each entry point is refused, no byte beside a buffer is read."""
    given = (f'-DREGARD_ISA="isa/{isa}.h"', *MARCH[isa])
    compiler = compilers()[0]

    def compiled(source: str) -> Path:
        target = tmp_path / f"{Path(source).stem}.o"
        subprocess.run(
            [compiler, *FLAGS, *given, f"-I{ROOT / 'native'}", "-c", ROOT / source, "-o", target], check=True
        )
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, SOURCES))
    subprocess.run([compiler, *FLAGS, *objects, "-o", tmp_path / "fuzz"], check=True)
    ran = subprocess.run([tmp_path / "fuzz", "600", "1"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for entry in ENTRIES:
        tried = [line for line in ran.stdout.splitlines() if line.startswith(f"{entry}:")]
        assert len(tried) > 40, f"{entry} was called with {len(tried)} kinds of wrong arguments"


AT = rg.Positions(2 * torch.arange(7) + 60, 2 * torch.arange(33))


def a_call(score: rg.Score = rg.ScaledDot(), mask: rg.Mask = rg.Everything()) -> KernelArgs:
    q, k, v = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 33, 16), torch.randn(2, 2, 33, 5)
    problem = testing.Case(q, k, v, score, mask=mask, positions=AT).problem
    return lower(problem, lower_mask(problem, None))


TABLE = rg.ScaledDot() >> rg.RelativeBias(torch.randn(7, 4), rg.ClippedBuckets(3, 3))
LENGTHS = rg.Lengths(keys=torch.tensor([3, 33]))
# what a graph may hold, where nobody has looked at values
WRONG: dict[str, tuple[dict[str, Any], str, int, str]] = {
    "one key too many": ({"mask": rg.Prefix(70)}, "stop", 34, "interval of keys"),
    "far beyond the keys": ({"mask": rg.Prefix(70)}, "stop", 1 << 30, "interval of keys"),
    "before the keys": ({"mask": rg.Prefix(70)}, "start", -1, "interval of keys"),
    "a length beyond the keys": (
        {"mask": rg.Lengths(keys=torch.tensor([3, 33]))},
        "key_counts",
        34,
        "interval of keys",
    ),
    "a length below 0": ({"mask": LENGTHS}, "key_counts", -1, "interval of keys"),
    "a cell beyond the table": ({"score": TABLE}, "q_cell", 1 << 20, "places of queries and keys"),
}


@needs_kernels
@pytest.mark.parametrize("name", WRONG)
def test_an_index_out_of_range_in_a_graph(name: str) -> None:
    how, operand, value, message = WRONG[name]
    lowered = a_call(**how)
    told = getattr(lowered, operand).clone()
    told.view(-1)[-1] = value
    with pytest.raises(ValueError, match=message):
        traced(replace(lowered, **{operand: told}))


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize("n", [34, 1 << 30, (1 << 32) + 5])
def test_lengths_beyond_the_keys_in_a_compiled_graph(n: int) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return rg.attention(q, k, v, mask=rg.Lengths(keys=keys))

    torch.compiler.reset()
    q, k, v = (torch.randn(2, 4, 33, 16) for _ in range(3))
    right = torch.tensor([33, 20])
    eager = run(q, k, v, right)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, right), eager)
    with pytest.raises(ValueError, match="interval of keys"):
        compiled(q, k, v, torch.tensor([20, n]))
