"""The way of q to the kernels, as design.md tells it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from needed import needs_kernels

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@needs_kernels
def test_design_says_through_which_files_q_passes_and_how_many_functions_are_called() -> None:
    """A process of its own: the first call of a kind makes its plan."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate" / "way.py")], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("| call | functions called | files |")
    assert ran.stdout in (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
