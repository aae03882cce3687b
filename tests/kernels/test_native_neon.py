"""The kernels for aarch64, cross-compiled and run in an emulator: NEON, SVE and SME do what plain vectors do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cross_compiled import ROOT, kernels, run

COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (COMPILER and EMULATOR and shutil.which("cmake")),
        reason="needs cmake, a cross compiler and an emulator of aarch64 (in Debian the packages cmake, "
        "g++-aarch64-linux-gnu and qemu-user)",
    ),
]
ENTRIES = ("forward", "backward", "additive_forward", "additive_backward", "facts")
SVE256 = "max,sve256=on"
SME = "max,sme512=on"
# Processors that the emulator knows, and what runs on them, best first, as ffi.runnable() asks: all that there is, with
# a matrix unit of 512 bits (as Apple's M4) and of less, with vectors of SVE of 256 bits (as Graviton 3's), of 512, of
# 128 (as Graviton 4's) and none; and Graviton 2's, which has no bfloat16.
RUNS = {
    "max,sve256=on,sme512=on": "sme sve256 neonbf16 neon base",
    SME: "sme neonbf16 neon base",
    SVE256: "sve256 neonbf16 neon base",
    "max": "neonbf16 neon base",
    "max,sve-default-vector-length=16": "neonbf16 neon base",
    "max,sve=off": "neonbf16 neon base",
    "neoverse-n1": "neon base",
    "cortex-a57": "neon base",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the kernels: of a wheel for aarch64 (AARCH64_WHEEL), or built as an installation builds them."""
    target = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}")
    folder = kernels(tmp_path_factory.mktemp("aarch64"), os.environ.get("AARCH64_WHEEL"), *target)
    made = {path.name for path in folder.glob("*.so")}
    sets = set(" ".join(RUNS.values()).split())
    assert made == {*(f"libregard_{isa}.so" for isa in sets), "regard_python.so"}
    return folder


@pytest.fixture(scope="module")
def compare(built: Path) -> Path:
    return compiled(built, "native_compare.cpp")


def compiled(folder: Path, source: str, *objects: Path) -> Path:
    """A program of this folder, compiled for aarch64."""
    flags = ("-std=c++17", "-O1", "-Wno-psabi", f"-I{ROOT / 'native'}", f"-Wl,-rpath,{folder}")
    program = folder / "_".join([Path(source).stem, *(path.stem for path in objects)])
    run(str(COMPILER), *flags, ROOT / "tests/kernels" / source, *objects, "-ldl", "-o", program)
    return program


def emulated(processor: str, program: Path, *words: str | Path) -> str:
    """What a program prints on a processor that the emulator knows."""
    libc = run(str(COMPILER), "-print-file-name=libc.so.6").strip()
    return run(str(EMULATOR), "-cpu", processor, "-L", Path(libc).parent.resolve().parent, program, *words)


def different(said: str, entry: str) -> int:
    """How many buffers of an entry had other bits."""
    return int(next(line for line in said.splitlines() if line.startswith(f"{entry}: ")).split()[3])


@pytest.mark.parametrize("processor", RUNS)
def test_the_best_that_a_processor_runs_is_chosen(processor: str, built: Path, compare: Path) -> None:
    neon = built / "libregard_neon.so"
    assert emulated(processor, compare, neon, neon, "0", "1").count(f"runs {RUNS[processor]}\n") == 2


def test_neon_computes_what_plain_vectors_compute(built: Path, compare: Path) -> None:
    objects = (built / "libregard_base.so", built / "libregard_neon.so")
    said = emulated("neoverse-n1", compare, *objects, "200", "1")
    for entry in ENTRIES:
        assert f"\n{entry}: 0 buffers" not in said and f"\n{entry}: " in said, said


def test_products_of_bfloat16_are_those_of_floats_but_for_the_rounding_of_weights(built: Path, compare: Path) -> None:
    objects = (built / "libregard_neon.so", built / "libregard_neonbf16.so")
    said = emulated("max", compare, *objects, "800", "1", "pairs")
    for entry in ("forward", "backward", "facts"):
        assert different(said, entry) > 20, said  # these calls did multiply pairs


def test_the_other_dtypes_have_the_same_bits_with_bfloat16(built: Path, compare: Path) -> None:
    objects = (built / "libregard_neon.so", built / "libregard_neonbf16.so")
    said = emulated("max", compare, *objects, "60", "2", "without bfloat16")
    assert "the largest difference is 0 of what is allowed" in said, said


def test_sve_computes_what_neon_computes(built: Path, compare: Path) -> None:
    objects = (built / "libregard_neon.so", built / "libregard_sve256.so")
    said = emulated(SVE256, compare, *objects, "120", "7", "without bfloat16")
    for entry in ENTRIES:
        assert f"\n{entry}: 0 buffers" not in said and f"\n{entry}: " in said, said


def test_products_of_bfloat16_are_those_of_floats_with_sve(built: Path, compare: Path) -> None:
    objects = (built / "libregard_neon.so", built / "libregard_sve256.so")
    said = emulated(SVE256, compare, *objects, "400", "1", "pairs")
    assert different(said, "forward") > 5 and different(said, "backward") > 5, said  # these calls did multiply pairs


@pytest.mark.parametrize(("calls", "words"), [("600", ()), ("80", ("tiles in use",))])
def test_outer_products_have_the_bits_of_neon(calls: str, words: tuple[str, ...], built: Path, compare: Path) -> None:
    objects = (built / "libregard_neonbf16.so", built / "libregard_sme.so")
    said = emulated(SME, compare, *objects, calls, "3", *words)
    # facts begin to add at another key
    assert [different(said, entry) for entry in ENTRIES if entry != "facts"] == [0] * 4, said


@pytest.mark.parametrize(
    ("processor", "isa", "calls"), [("max", "neonbf16", 200), (SVE256, "sve256", 80), (SME, "sme", 80)]
)
def test_wrong_arguments_are_refused(processor: str, isa: str, calls: int, built: Path) -> None:
    said = emulated(processor, compiled(built, "native_fuzz.cpp", built / f"libregard_{isa}.so"), str(calls), "1")
    for entry in ENTRIES:
        tried = [line for line in said.splitlines() if line.startswith(f"{entry}:")]
        assert len(tried) > 40, f"{entry} was called with {len(tried)} kinds of wrong arguments"
