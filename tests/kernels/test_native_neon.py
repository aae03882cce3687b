"""The kernels for aarch64, cross-compiled and run in an emulator: NEON does what plain vectors do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
pytestmark = [
    pytest.mark.full,
    # no "needs ...": a machine without them is complete (see MISSING in conftest.py)
    pytest.mark.skipif(
        not (COMPILER and EMULATOR and shutil.which("cmake")),
        reason="only where cmake, a cross compiler and an emulator of aarch64 are (in Debian the packages cmake, "
        "g++-aarch64-linux-gnu and qemu-user-static)",
    ),
]


def run(*words: str | Path) -> str:
    """What a command prints; fails with it where the command does."""
    ran = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of libregard_base.so and libregard_neon.so, built without a warning as an installation builds them."""
    folder = tmp_path_factory.mktemp("aarch64")
    target = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}")
    given = (f"-DOUTPUT={folder}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS=-Werror")
    run("cmake", *target, *given, "-S", ROOT / "native", "-B", folder / "build")
    run("cmake", "--build", folder / "build", "--parallel", "2")
    assert {path.name for path in folder.glob("*.so")} == {"libregard_base.so", "libregard_neon.so", "regard_python.so"}
    return folder


def emulated(folder: Path, source: str, objects: tuple[Path, ...], *words: str | Path) -> str:
    """What a program of this folder, compiled for aarch64, prints."""
    program, compiler = folder / Path(source).stem, str(COMPILER)
    flags = ("-std=c++17", "-O1", "-Wno-psabi", f"-I{ROOT / 'native'}", f"-Wl,-rpath,{folder}")
    run(compiler, *flags, ROOT / "tests/kernels" / source, *objects, "-ldl", "-o", program)
    libc = run(compiler, "-print-file-name=libc.so.6").strip()
    return run(str(EMULATOR), "-L", Path(libc).parent.resolve().parent, program, *words)


def test_neon_computes_what_plain_vectors_compute(built: Path) -> None:
    objects = (built / "libregard_base.so", built / "libregard_neon.so")
    said = emulated(built, "native_compare.cpp", (), *objects, "600", "1")
    assert said.count("runs neon base\n") == 2, said  # best first, as ffi.runnable() asks
    for entry in ("forward", "backward", "additive_forward", "additive_backward", "facts"):
        assert f"\n{entry}: 0 buffers" not in said and f"\n{entry}: " in said, said


def test_wrong_arguments_are_refused(built: Path) -> None:
    said = emulated(built, "native_fuzz.cpp", (built / "libregard_neon.so",), "200", "1")
    for entry in ("forward", "backward", "additive_forward", "additive_backward", "facts"):
        tried = [line for line in said.splitlines() if line.startswith(f"{entry}:")]
        assert len(tried) > 40, f"{entry} was called with {len(tried)} kinds of wrong arguments"
