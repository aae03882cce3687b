"""What an installation says where it has no kernels: one sentence, which the install and doctor show."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")


def built(folder: Path, *given: str) -> tuple[str, str]:
    """What the install prints, and what it leaves for doctor."""
    where = (f"-DSOURCE={ROOT / 'native'}", f"-DBINARY={folder / 'build'}", f"-DOUTPUT={folder}")
    words = ["cmake", *where, *given, "-P", str(ROOT / "native/build.cmake")]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr  # an installation without kernels works
    return ran.stderr, (folder / "why_not.txt").read_text()


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    printed, kept = built(tmp_path, "-DOPTIONS=-DCMAKE_CXX_COMPILER=/nowhere/c++")
    assert "installed without its native kernels" in printed
    assert kept == "no C++ compiler was found when regard was installed: there is no /nowhere/c++\n"
