"""Multiply-adds a cycle of the kernels' inner loops, as llvm-mca predicts them from the compiler's assembly.

`python -m benchmarks.predicted` writes results/predicted.md, and beside the predictions what this machine measures.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = Path(__file__).with_name("inner_loops.cpp")
ANALYZER = shutil.which("llvm-mca-22")  # this release alone: others describe the processors otherwise
X86, ARM = shutil.which("g++"), shutil.which("aarch64-linux-gnu-g++")

MARCH = {
    "avx2": "-march=x86-64-v3",
    "avx512": "-march=x86-64-v4",
    "avx512bf16": "-march=x86-64-v4 -mavx512bf16",
    "neon": "-march=armv8-a",
    "neonbf16": "-march=armv8.2-a+bf16",
    "sve256": "-march=armv8.2-a+sve+bf16 -msve-vector-bits=256",
}
LANES = {"avx2": 8, "avx512": 16, "avx512bf16": 16, "neon": 4, "neonbf16": 4, "sve256": 8}
# LLVM has one description for all of Apple's processors, of Cyclone (2013): three vector pipes, where they have four.
PROCESSORS = {
    "neoverse-n1": ("neon",),
    "neoverse-v1": ("neon", "neonbf16", "sve256"),
    "neoverse-v2": ("neon", "neonbf16"),
    "apple-m1": ("neon",),
    "apple-m4": ("neon", "neonbf16"),
    "znver4": ("avx2", "avx512", "avx512bf16"),
    "sapphirerapids": ("avx2", "avx512", "avx512bf16"),
}
# Multiply-adds of one instruction, by its name and the registers it takes.
PRODUCTS = {
    r"vfmadd231ps\b.*%ymm": 8,
    r"vfmadd231ps\b.*%zmm": 16,
    r"vdpbf16ps\b.*%zmm": 32,
    r"fmla\b.*\.4s": 4,
    r"fmla\b.*\bz\d+\.s": 8,
    r"bfdot\b.*\.4s": 8,
    r"bfdot\b.*\bz\d+\.s": 16,
    r"bfmmla\b.*\.4s": 16,
    r"bfmmla\b.*\bz\d+\.s": 32,
}
NUMBERS = {"Floats": "float32", "BFloat16Pairs": "bfloat16"}
JUMP = re.compile(r"\s(?:j\w+|b(?:\.?\w+)?|cbn?z|tbn?z)\s(?:.*\s)?(\.L\d+)$")


@dataclass(frozen=True)
class Loop:
    """The instructions of an inner loop; function: which product it is, of which elements."""

    function: str
    elements: str
    lines: tuple[str, ...]

    @property
    def products(self) -> int:
        return sum(map(products_of, self.lines))

    @property
    def spills(self) -> int:
        """How many instructions reach for the stack: registers were too few."""
        return sum(bool(re.search(r"\(%rsp|\[sp\b", line)) for line in self.lines)


@dataclass(frozen=True)
class Predicted:
    """Multiply-adds a cycle, and the most that the processor's ports take of that instruction."""

    rate: float
    limit: float


def products_of(line: str) -> int:
    return next((count for form, count in PRODUCTS.items() if re.match(form, line)), 0)


def flags(isa: str) -> list[str]:
    """What CMakeLists.txt compiles the kernels with."""
    listed = re.search(r"set\(flags ([^)]*)\)", (ROOT / "native/CMakeLists.txt").read_text())
    assert listed
    return [*listed[1].split(), *MARCH[isa].split(), f'-DREGARD_ISA="isa/{isa}.h"', f"-I{ROOT / 'native'}"]


def compiler(isa: str) -> str | None:
    return ARM if isa.startswith(("neon", "sve")) else X86


@functools.cache
def functions(isa: str) -> tuple[tuple[str, str], ...]:
    """The compiler's assembly of inner_loops.cpp: the name of each function, and its lines."""
    made = [str(compiler(isa)), *flags(isa), "-S", str(SOURCE), "-o", "-"]
    text = subprocess.run(made, check=True, capture_output=True, text=True).stdout
    return tuple((body[: body.index(":")], body) for body in re.split(r"\n(?=_Z\w+:)", text)[1:])


def inner_loops(isa: str) -> list[Loop]:
    """The loops with most products of the two microkernels, of floats and of pairs of bfloat16."""
    found: list[Loop] = []
    for name, body in functions(isa):
        known = re.match(r"_ZN6regardL\d+(dot_rows|value_rows)I.*?(Floats|BFloat16Pairs)", name)
        loops = list(_loops(body)) if known else []
        if known and loops:
            found.append(Loop(known[1], known[2], max(loops, key=lambda lines: sum(map(products_of, lines)))))
    return found


def loops_of_dtype(isa: str) -> list[Loop]:
    """Those that this instruction set is for. Where another has the same loops of floats, only those of pairs."""
    return [loop for loop in inner_loops(isa) if loop.elements != "Floats" or not isa.endswith("bf16")]


def weight_loops(isa: str) -> list[Loop]:
    """The loops that turn the scores of two keys and a vector of queries into weights."""
    found: list[Loop] = []
    for name, body in functions(isa):
        if known := re.match(r"_ZN6regardL11weigh_plainILi\d+ELb([01])E", name):
            elements = "Floats" if known[1] == "0" else "BFloat16Pairs"
            found.append(Loop("weigh_plain", elements, max(_loops(body), key=len)))
    return [loop for loop in found if loop.elements != "Floats" or not isa.endswith("bf16")]


def _loops(function: str) -> Iterator[tuple[str, ...]]:
    """The instructions between each jump back and its target that hold no such jump themselves."""
    lines = [line.split("//")[0].rstrip() for line in function.split("\n")]
    targets: dict[str, int] = {}
    last = -1  # the latest jump back
    for n, line in enumerate(lines):
        if label := re.match(r"(\.L\d+):", line):
            targets[label[1]] = n
        jump = JUMP.match(line)
        if jump and jump[1] in targets:
            first = targets[jump[1]]
            inside = lines[first + 1 : n]
            if last < first:
                yield tuple(x.strip() for x in inside if re.match(r"\s+[a-z]", x))
            last = n


def predict(loop: Loop, processor: str, isa: str) -> Predicted:
    """Of a loop of products that repeats without end, its data in the first-level cache."""
    cycles, infos = analyze(loop, processor, isa)
    each = next((n for n, line in enumerate(loop.lines) if products_of(line)))
    limit = products_of(loop.lines[each]) / infos[each]["RThroughput"]
    return Predicted(loop.products / cycles, limit)


def weights_per_cycle(loop: Loop, processor: str, isa: str) -> float:
    return 2 * LANES[isa] / analyze(loop, processor, isa)[0]


def analyze(loop: Loop, processor: str, isa: str) -> tuple[float, list[dict[str, float]]]:
    """Cycles of one round of a loop, and what llvm-mca says of each of its instructions."""
    target = "aarch64-linux-gnu" if compiler(isa) == ARM else "x86_64-linux-gnu"
    words = [str(ANALYZER), f"-mtriple={target}", f"-mcpu={processor}", "-json", "-iterations=200"]
    if isa in ("neonbf16", "sve256"):
        words.append("-mattr=+bf16")
    said = subprocess.run(words, input="\n".join(loop.lines), check=True, capture_output=True, text=True).stdout
    region = json.loads(said)["CodeRegions"][0]
    summary, infos = region["SummaryView"], region["InstructionInfoView"]["InstructionList"]
    assert len(infos) == len(loop.lines), "llvm-mca counts other instructions"
    return summary["TotalCycles"] / summary["Iterations"], infos


def measured(isa: str) -> dict[str, float]:
    """Multiply-adds a cycle of dot_rows on this machine, which must run that instruction set."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "loops"
        made = [str(compiler(isa)), *flags(isa), "-DREGARD_MEASURE", str(SOURCE), "-o", str(program)]
        subprocess.run(made, check=True)
        said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {elements: float(rate) for elements, rate in (line.split() for line in said.splitlines())}


PAGE = """# Predicted: multiply-adds a cycle of the inner loops

What llvm-mca {version} *predicts* for the loops that the compiler made of the two products of the forward (dot_rows:
keys times queries; value_rows: values times weights), repeated without end, data in the first-level cache: `python -m
benchmarks.predicted`. Nobody ran these loops on the processors of this table. Spills: instructions that reach for the
stack.

On Arm the loops of bfloat16 multiply by BFMMLA, those of float32 by FMLA. float16 is widened to float32 and multiplied
by the latter: FMLA on halves would round each product and sum to 11 bits, and FMLAL, whose sums are float32, multiplies
no more numbers a cycle than FMLA. Neoverse V1 has four vector pipes of 128 bits, which take two instructions of 256:
the limits of neon and sve256 are the same, and sve256 reaches them with half the instructions. LLVM describes every
Apple processor as Cyclone of 2013, with three vector pipes (an M1 has four: a limit of 16), and gives Sapphire Rapids
one 512-bit multiplier where it has two.

{predicted}

## Weights

Between the two products scores become weights: two exponentials, two sums, two stores (weigh_plain), for two keys and a
vector of queries a round. sve256 reads powers of 2 from a table that the processor has (FEXPA), the others compute a
longer polynomial.

{weights}

## How far such predictions are from what is measured

The same loops, measured on {machine} (dot_rows with its stores, 96 elements or pairs wide; the shortest of many runs; a
cycle is the time of one of many additions that depend on each other; other programs ran).

{measured}

Where LLVM knows an instruction, its prediction was at most a fifth too low. It believes that VDPBF16PS takes three
cycles on Zen 4; it takes one. So of a prediction for Arm, the order of loads and products, the dependences and the
absence of spills are to be believed; a rate is as good as LLVM's table of that processor.
"""


def predicted_rows() -> list[str]:
    """A table: each processor's loops, their predicted rate, its limit, the share, spills."""
    lines = ["| processor | kernels | loop | numbers | *predicted* | limit of the ports | share | spills |"]
    lines.append("| --- | --- | --- | --- | --: | --: | --: | --: |")
    loops = {isa: loops_of_dtype(isa) for isa in MARCH}
    for processor, sets in PROCESSORS.items():
        for isa in sets:
            for loop in loops[isa]:
                found = predict(loop, processor, isa)
                row = (processor, isa, loop.function, NUMBERS[loop.elements], f"{found.rate:.1f}", f"{found.limit:.0f}")
                lines.append(f"| {' | '.join(row)} | {found.rate / found.limit:.0%} | {loop.spills} |")
    return lines


def weight_rows() -> list[str]:
    """A table: how many weights a cycle each processor computes of scores."""
    lines = ["| processor | kernels | numbers | *weights a cycle* |", "| --- | --- | --- | --: |"]
    for processor, sets in PROCESSORS.items():
        for isa in sets:
            for loop in weight_loops(isa):
                row = (processor, isa, NUMBERS[loop.elements], f"{weights_per_cycle(loop, processor, isa):.2f}")
                lines.append(f"| {' | '.join(row)} |")
    return lines


def measured_rows(processor: str) -> list[str]:
    """A table of the prediction for this machine's processor beside what is measured on it."""
    lines = ["| kernels | *predicted* | measured | predicted / measured |", "| --- | --: | --: | --: |"]
    for isa in PROCESSORS[processor]:
        rates = measured(isa)
        for loop in loops_of_dtype(isa):
            if loop.function == "dot_rows":
                found, was = predict(loop, processor, isa), rates[loop.elements.removeprefix("BFloat16")]
                lines.append(f"| {isa} | {found.rate:.1f} | {was:.1f} | {found.rate / was:.2f} |")
    return lines


if __name__ == "__main__":
    if not (ANALYZER and X86 and ARM):
        sys.exit("llvm-mca-22, g++ and aarch64-linux-gnu-g++ are needed (Debian: llvm-22, g++, g++-aarch64-linux-gnu)")
    version = subprocess.run([ANALYZER, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"LLVM version (\S+)", version)[1]
    page = PAGE.format(
        version=version,
        predicted="\n".join(predicted_rows()),
        weights="\n".join(weight_rows()),
        machine="a Zen 4",
        measured="\n".join(measured_rows("znver4")),
    )
    (ROOT / "benchmarks/results/predicted.md").write_text(page)
    print(page)
