"""The kernels for Windows, cross-compiled and run by Wine: what one instruction set computes, another does."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from cross_compiled import ROOT, kernels, run

# Clang 14 does not find Debian's MinGW-w64.
COMPILER = os.environ.get("CLANG") or next(filter(shutil.which, [f"clang++-{n}" for n in range(30, 18, -1)]), "")
TARGET = "x86_64-w64-mingw32"
WINE = shutil.which("wine64") or shutil.which("wine64", path="/usr/lib/wine")  # Debian's wine64 has it there
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (WINE and shutil.which("cmake") and shutil.which(f"{TARGET}-g++") and shutil.which(COMPILER)),
        reason="needs cmake, Clang 19 or later, MinGW-w64 and Wine (in Debian the packages cmake, clang-22, "
        "g++-mingw-w64-x86-64-posix and wine64)",
    ),
]
ENTRIES = ("forward", "backward", "additive_forward", "additive_backward", "facts")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the kernels: of a wheel for Windows (WINDOWS_WHEEL), or built as an installation builds them."""
    system = ("-DCMAKE_SYSTEM_NAME=Windows", "-DCMAKE_SYSTEM_PROCESSOR=x86_64")
    compiler = (f"-DCMAKE_CXX_COMPILER={COMPILER}", f"-DCMAKE_CXX_COMPILER_TARGET={TARGET}")
    return kernels(tmp_path_factory.mktemp("windows"), os.environ.get("WINDOWS_WHEEL"), *system, *compiler)


def compiled(folder: Path, source: str, *objects: Path) -> Path:
    """A program of this folder, compiled for Windows."""
    program = folder / f"{'_'.join([Path(source).stem, *(path.stem for path in objects)])}.exe"
    flags = ("-std=c++17", "-O1", "-static", f"-I{ROOT / 'native'}")
    run(f"{TARGET}-g++", *flags, ROOT / "tests/kernels" / source, *objects, "-o", program)
    return program


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of programs: a Windows of their own, without a word on what it lacks."""
    prefix = str(tmp_path_factory.mktemp("wine") / "prefix")
    return {"WINEPREFIX": prefix, "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml="}


def test_what_the_objects_need_comes_with_windows_and_python(built: Path) -> None:
    names = {path.name for path in built.glob("*.dll")}
    sets = ("base", "avx2", "avx512", "avx512bf16")
    assert names == {*(f"libregard_{isa}.dll" for isa in sets), "regard_python.dll"}
    for name in names:
        said = run(f"{TARGET}-objdump", "--private-headers", built / name)
        own = "python3.dll" if name == "regard_python.dll" else "api-ms-win-crt-math-l1-1-0.dll"
        assert set(re.findall(r"DLL Name: (\S+)", said)) == {"KERNEL32.dll", "msvcrt.dll", own}


def test_another_compiler_than_clang_is_refused_by_name(tmp_path: Path) -> None:
    options = f"-DCMAKE_SYSTEM_NAME=Windows;-DCMAKE_CXX_COMPILER={TARGET}-g++"
    where = (f"-DSOURCE={ROOT / 'native'}", f"-DBINARY={tmp_path / 'build'}", f"-DOUTPUT={tmp_path}")
    said = run("cmake", *where, f"-DOPTIONS={options}", "-P", ROOT / "native/build.cmake")
    assert "regard is installed without its native kernels" in said
    assert (tmp_path / "why_not.txt").read_text() == (
        "the C++ compiler failed when regard was installed: on Windows it must be LLVM-MinGW's Clang, not GNU\n"
    )


# So many calls as the two sets agree on when they are compiled for Linux.
@pytest.mark.parametrize(("one", "other", "calls"), [("base", "avx2", 50), ("avx2", "avx512", 200)])
def test_two_instruction_sets_compute_the_same(
    one: str, other: str, calls: int, built: Path, windows: dict[str, str]
) -> None:
    objects = [built / f"libregard_{isa}.dll" for isa in (one, other)]
    program = compiled(built, "native_compare.cpp")
    said = run(str(WINE), program, objects[0], objects[0], "0", "1", **windows)
    if other not in said.split():
        pytest.skip(f"this processor does not run {other}")
    said = run(str(WINE), program, *objects, str(calls), "1", **windows)
    for entry in ENTRIES:
        assert f"\n{entry}: 0 buffers" not in said and f"\n{entry}: " in said, said


def test_wrong_arguments_are_refused(built: Path, windows: dict[str, str]) -> None:
    program = compiled(built, "native_fuzz.cpp", built / "libregard_avx2.dll")
    said = run(str(WINE), program, "300", "1", **windows)
    for entry in ENTRIES:
        tried = [line for line in said.splitlines() if line.startswith(f"{entry}:")]
        assert len(tried) > 40, f"{entry} was called with {len(tried)} kinds of wrong arguments"
