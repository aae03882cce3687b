"""An installation whose kernels do not compile works without them, and says why it has none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRIED = """
import torch, regard as rg
from regard.cli import doctor
q, k, v = (torch.randn(2, 4, 33, 16) for _ in range(3))
out = rg.attention(q, k, v, mask=rg.Causal())
torch.testing.assert_close(out, rg.attention(q, k, v, mask=rg.Causal(), backend=rg.Reference()))
print(rg.explain(q, k, v, mask=rg.Causal()))
print(doctor.here())
"""
COMPILERS = {
    "fails": ("echo 'x.cpp:1:2: error: no licence' >&2; exit 1", "the C++ compiler failed when regard was installed"),
    "fails with the kernels": (
        """case "$*" in
*attention/*.cpp*|*additive/*.cpp*|*facts/*.cpp*) echo 'x.cpp:1:2: error: no shuffle' >&2; exit 1;;
esac
exec c++ "$@" """,
        "the C++ compiler failed when regard was installed: x.cpp:1:2: error: no shuffle",
    ),
}


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_that_fails(name: str, tmp_path: Path) -> None:
    script, why = COMPILERS[name]
    if "exec c++" in script and not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    compiler, build, site = (tmp_path / part for part in ("compiler", "build", "site"))
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    given = {**os.environ, "CXX": str(compiler), "PYTHONPATH": str(site)}
    for step in (["-S", ROOT, "-B", build], ["--build", build], ["--install", build, "--prefix", site]):
        subprocess.run(["cmake", *step], env=given, check=True, capture_output=True)
    ignored = shutil.ignore_patterns("kernels", "__pycache__")
    shutil.copytree(ROOT / "src" / "regard", site / "regard", ignore=ignored, dirs_exist_ok=True)
    assert (site / "regard" / "backends" / "kernels" / "build.log").exists()
    ran = subprocess.run([sys.executable, "-c", TRIED], env=given, capture_output=True, text=True, check=True)
    plan, here = ran.stdout.split("\nregard ", 1)
    assert plan.startswith("backend") and "Tiled()" in plan.splitlines()[0]
    for said in (plan, here):
        assert why in " ".join(said.split()) and "build.log" in said
