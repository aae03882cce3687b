"""What is seen of the package before anything is called: its names and its version."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard as rg

ROOT = Path(__file__).resolve().parents[2]


def test_completion_shows_public_names_alone() -> None:
    assert set(dir(rg)) == {*rg.__all__, "__version__", "compat", "parallel", "testing"}


def test_the_version_is_that_of_the_release() -> None:
    (released,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert rg.__version__ == released
    assert f"\nversion: {released}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.full
def test_a_type_checker_knows_what_calls_give(tmp_path: Path) -> None:
    """Strictly: a comment that expects an error where there is none is one too."""
    pytest.importorskip("pyright", reason="pip install 'regard[dev]', which CI does in its last step")
    shutil.copy(Path(__file__).with_name("typed_calls.py"), tmp_path)
    settings = {"reportUnnecessaryTypeIgnoreComment": "error", "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--project", str(tmp_path), "--pythonpath", sys.executable]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    if "error" not in found.stdout:
        pytest.skip(f"needs node, which pyright runs on: {found.stderr.strip()[-200:]}")
    assert "0 errors, 0 warnings" in found.stdout, found.stdout
