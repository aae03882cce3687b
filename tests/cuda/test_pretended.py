"""The calls of test_cuda_calls.py on a device that is the CPU by another name, in a process that cannot go back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_no_operation_has_tensors_of_two_devices() -> None:
    calls = Path(__file__).with_name("test_cuda_calls.py")
    command = [sys.executable, "-m", "pytest", "-q", "--full", "-p", "no:cacheprovider", str(calls)]
    env = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "REGARD_NOTHING"))}
    run = subprocess.run(command, env={**env, "REGARD_TEST_DEVICE": "pretended"}, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:]
