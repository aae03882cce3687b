"""What regard calls of MKL's vector functions is called once in a single thread when regard is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard.core.mkl import FUNCTIONS

# ATen/cpu/vml.h: the functions of tensors of real numbers that torch gives to MKL.
GIVEN_TO_MKL = {
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "sin",
    "sqrt", "tan", "tanh", "trunc",
}  # fmt: skip


def called() -> set[str]:
    """The names of all functions and methods that regard's modules call: exp of t.exp(), t.exp_(), torch.exp(t)."""
    sources = Path(regard.__file__).parent.rglob("*.py")
    calls = (node for path in sources for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {call.func.attr.rstrip("_") for call in calls if isinstance(call.func, ast.Attribute)}


@pytest.mark.full
def test_each_function_that_regard_calls_is_chosen() -> None:
    assert called() & GIVEN_TO_MKL == set(FUNCTIONS)


@pytest.mark.full
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch was built without MKL")
def test_they_are_chosen_when_regard_is_imported() -> None:
    script = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if len(arguments) == 1 and isinstance(arguments[0], torch.Tensor):
            print(function.overloadpacket.__name__, arguments[0].dtype, arguments[0].numel())
        return function(*arguments, **(keywords or {}))

with Calls():
    import regard
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    printed = run.stdout.splitlines()
    assert {f"{name} {dtype} 1" for name in FUNCTIONS for dtype in (torch.float32, torch.float64)} <= set(printed)
