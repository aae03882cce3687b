"""Kernels for another system than this one: of a wheel, or built here, and commands that run them."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, **environment: str) -> str:
    """What a command prints; fails with it where the command does."""
    given, surrounding = [str(word) for word in words], {**os.environ, **environment}
    ran = subprocess.run(given, env=surrounding, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def kernels(folder: Path, wheel: str | None, *target: str) -> Path:
    """Where they are, in a folder: of a wheel, or built as an installation builds them, for a target of CMake."""
    if wheel:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
        return folder / "regard/backends/kernels"
    given = (f"-DOUTPUT={folder}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS=-Werror")
    run("cmake", *target, *given, "-S", ROOT / "native", "-B", folder / "build")
    run("cmake", "--build", folder / "build", "--parallel", "2")
    return folder
