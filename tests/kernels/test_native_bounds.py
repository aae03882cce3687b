"""Indices that lead beside what a call has: the native kernels return an error and read nothing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
from kernel_checks import modifiers
from needed import needs_kernels
from regard import testing
from regard.backends.native.args import KernelArgs, lower
from regard.backends.native.call_operands import OPERANDS
from regard.backends.native.ffi import library, runnable
from regard.backends.native.lower_mask import lower_mask
from regard.backends.native.torch_ops import traced
from regard.call.arguments import build_problem
from regard.core.int8_rows import Int8Rows, rounded
from regard.core.region import Region

ROOT = Path(__file__).parents[2]
KERNELS = (
    "native/attention/forward.cpp",
    "native/attention/write_pages.cpp",
    "native/attention/backward.cpp",
    "native/additive/additive.cpp",
    "native/facts/facts.cpp",
)
FUZZ = "tests/kernels/native_fuzz.cpp"
SOURCES = (*KERNELS, FUZZ)
FLAGS = ("-std=c++17", "-O0", "-g1", "-Wno-psabi", "-fsanitize=address", "-fno-sanitize-recover=all")
# Of kernels alone, not of the program that calls them. AddressSanitizer reports what is read at a null pointer.
UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize=null")
X86 = {
    "base": ["-march=x86-64"],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
    "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16"],
    "amx": ["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
MARCH = X86 if platform.machine() == "x86_64" else {"base": [], "neon": []}
ENTRIES = (
    *(f"{kind}{entry}" for kind in ("", "additive_") for entry in ("forward", "backward")),
    "facts",
)


ABLE = [isa for isa in runnable() if isa in MARCH] or ["base"]  # the widest first


def compilers() -> list[str]:
    return [name for name in ("g++", "clang++") if shutil.which(name)]


def instruction_sets() -> list[str]:
    """The narrowest and the widest that run here."""
    return sorted({ABLE[0], ABLE[-1]})


def compile_program(folder: Path, flags: dict[str, tuple[str, ...]]) -> Path:
    """A program of sources, each with flags of its own, by the first compiler there is."""

    def compiled(source: str) -> Path:
        target = folder / f"{Path(source).stem}.o"
        given = (*flags[source], f"-I{ROOT / 'native'}", "-c", str(ROOT / source), "-o", str(target))
        subprocess.run([compilers()[0], *given], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, flags))
    linked = {flag: None for each in flags.values() for flag in each if flag.startswith("-f")}
    subprocess.run([compilers()[0], *linked, *objects, "-o", folder / "program"], check=True)
    return folder / "program"


@pytest.mark.full
@pytest.mark.skipif(not compilers(), reason="needs a C++ compiler")
@pytest.mark.parametrize("isa", instruction_sets())
def test_the_c_interface_under_sanitizers(isa: str, tmp_path: Path) -> None:
    """Right calls pass; each wrong field or index of each entry point is refused, no byte beside a buffer is read.

    Undefined behavior is looked for on the widest set alone: the rest of the sources is the same, and it doubles the
    time of the compiler.
    """
    given = (f'-DREGARD_ISA="isa/{isa}.h"', *MARCH[isa], *FLAGS)
    undefined = UNDEFINED if isa == ABLE[0] else ()
    program = compile_program(tmp_path, {FUZZ: given, **dict.fromkeys(KERNELS, (*given, *undefined))})
    ran = subprocess.run([program, "300", "1"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for entry in ENTRIES:
        tried = [line for line in ran.stdout.splitlines() if line.startswith(f"{entry}:")]
        assert len(tried) > 40, f"{entry} was called with {len(tried)} kinds of wrong arguments"


@pytest.mark.full
@pytest.mark.skipif(not compilers(), reason="needs a C++ compiler")
def test_what_memory_held_before_changes_no_bit(tmp_path: Path) -> None:
    """Nothing is read that was not written: variables begin as zeros or a pattern, memory of the heap as other bytes.

    The heap's bytes are set by glibc. On the plainest instruction set: the rest of the sources is the same.
    """
    probe = [compilers()[0], "-x", "c++", "-ftrivial-auto-var-init=zero", "-fsyntax-only", os.devnull]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs GCC 12 or Clang 16, or later, which can set variables")
    said: list[str] = []
    for begins, byte in (("zero", "1"), ("pattern", "255")):
        folder = tmp_path / begins
        folder.mkdir()
        flags = ("-std=c++17", "-O1", "-Wno-psabi", f"-ftrivial-auto-var-init={begins}", '-DREGARD_ISA="isa/base.h"')
        sources = (*KERNELS, "tests/kernels/native_memory.cpp")
        program = compile_program(folder, dict.fromkeys(sources, (*flags, *MARCH["base"])))
        ran = subprocess.run(
            [program, "600", "1"], env={**os.environ, "MALLOC_PERTURB_": byte}, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        said.append(ran.stdout)
    assert "600 calls" in said[0] and said[0] == said[1]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs Clang, as a second C++ compiler")
@pytest.mark.parametrize("source", SOURCES)
def test_clang_takes_the_kernels(source: str) -> None:
    """All templates are instantiated; no code is written. No statement is a chain of several by commas (-Wcomma).

    GCC compiles the others, where it is there.
    """
    for isa in instruction_sets():
        given = ("-std=c++17", f'-DREGARD_ISA="isa/{isa}.h"', *MARCH[isa], f"-I{ROOT / 'native'}", ROOT / source)
        subprocess.run(["clang++", "-fsyntax-only", "-Wno-psabi", "-Werror=comma", *given], check=True)


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
    "a first key beyond the keys": (
        {"mask": rg.Lengths(first=torch.tensor([3, 0]))},
        "key_starts",
        34,
        "interval of keys",
    ),
    "a first key below 0": ({"mask": rg.Lengths(first=torch.tensor([3, 0]))}, "key_starts", -1, "interval of keys"),
    "a cell beyond the table": ({"score": TABLE}, "q_cell", 1 << 20, "places of queries and keys"),
}


@needs_kernels
@pytest.mark.parametrize("name", WRONG)
def test_an_index_out_of_range_in_a_graph(name: str) -> None:
    how, operand, value, message = WRONG[name]
    lowered = a_call(**how)
    told = lowered.operands[operand].clone()
    told.view(-1)[-1] = value
    with pytest.raises(ValueError, match=message):
        traced(lowered.with_operands(**{operand: told}))


ROWS = rg.Positions(torch.arange(24, 33), torch.arange(33))


@dataclass(frozen=True)
class Weighed(rg.Modifier):
    by_query: torch.Tensor
    by_pair: torch.Tensor

    def modify(self, s: torch.Tensor, at: Region) -> torch.Tensor:
        return s * at.queries(self.by_query) + at.pairs(self.by_pair)


APART = rg.Positions(2 * torch.arange(9) + 60, 2 * torch.arange(33))
HELD: dict[str, dict[str, Any]] = {  # a call for each operand
    **{
        name: {"score": score} for name, score in modifiers(testing.frame(batch=(3,), heads=4, nq=9, nk=33), 16).items()
    },
    "cells": {
        "score": rg.ScaledDot() >> rg.RelativeBias(torch.randn(7, 4), rg.ClippedBuckets(3, 3)),
        "positions": APART,
    },
    "a table of intervals": {"mask": rg.Prefix(torch.tensor([3, 5, 7])) & rg.Causal(), "positions": APART},
    "lengths": {"mask": rg.Lengths(torch.tensor([13, 15, 17]), torch.tensor([2, 7, 9]), torch.tensor([3, 5, 7]))},
    "shifts": {"mask": rg.Causal(), "positions": rg.tail(9, [33, 20, 21])},
    "documents": {"mask": rg.Documents(torch.randint(3, (9,)), torch.randint(3, (33,)))},
    "booleans": {"mask": rg.Dense(torch.rand(3, 4, 9, 33) < 0.5)},
    "keys that are retained": {"mask": rg.Retained(torch.randint(40, (3, 4, 33)))},
    "tiles": {"mask": rg.Dilated(3) | rg.Prefix(3)},
    "a sink": {"sink": torch.rand(4)},
    "scales of int8": {"kept": lambda x: Int8Rows(*rounded(x), x.dtype)},
    "a mask's program": {"mask": rg.Where(lambda b, h, i, j: (i - j) % 3 == 0)},
    "a program": {"score": rg.ScaledDot() >> Weighed(torch.rand(9), torch.rand(4, 9, 33))},
}


def lowered(how: dict[str, Any]) -> KernelArgs:
    q, k, v = torch.randn(3, 4, 9, 16), torch.randn(3, 2, 33, 16), torch.randn(3, 2, 33, 5)
    plain = {"score": rg.ScaledDot(), "mask": rg.Everything(), "positions": ROWS, "sink": None, "kept": torch.clone}
    how = {**plain, **how}
    problem, _ = build_problem(q, how["kept"](k), how["kept"](v), how["score"], how["mask"], how["positions"], None)
    problem = replace(problem, sink=how["sink"])
    return lower(problem, lower_mask(problem, library().tile))


@needs_kernels
@pytest.mark.parametrize("name", HELD)
def test_no_operand_may_be_shorter_than_the_call(name: str) -> None:
    """Whatever holds an operand of another call: the kernels would read beside it."""
    one = lowered(HELD[name])
    traced(one)
    for operand, t in one.operands.items():
        for axis in range(t.dim()):
            if t.shape[axis] > 1:
                with pytest.raises(ValueError):  # noqa: PT011
                    traced(one.with_operands(**{operand: t.narrow(axis, 0, t.shape[axis] - 1).contiguous()}))


def test_each_operand_is_held_by_a_call() -> None:
    held = {name for how in HELD.values() for name in lowered(how).operands}
    others = r"program_([2-9]|\d\d)"  # they are as the first two
    assert {name for name in held if not re.fullmatch(others, name)} == {
        name for name in OPERANDS if not re.fullmatch(others, name)
    }


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
