"""The first call of a process takes what the second takes, and some milliseconds for what is kept."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [file for file in sorted((ROOT / "src").rglob("*.py")) if file.name != "vjp.py"]


@pytest.mark.full
def test_no_call_imports_the_compiler_or_sympy() -> None:
    script = [sys.executable, str(ROOT / "tests" / "first_calls.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["100 calls"]


def slow(node: ast.AST) -> str | None:
    """What is written instead of something of torch's that imports its compiler or sympy."""
    if isinstance(node, ast.ClassDef):
        modes = any(ast.unparse(base).endswith("TorchDispatchMode") for base in node.bases)
        return "regard.core.dispatch_mode.DispatchMode" if modes and node.name != "DispatchMode" else None
    if not isinstance(node, ast.Call):
        return None
    called, given = ast.unparse(node.func), [keyword.arg for keyword in node.keywords]
    if called == "torch.broadcast_shapes":
        return "regard.core.shapes.broadcast_shape"
    cotangents = called == "torch.autograd.grad" and (len(node.args) > 2 or "grad_outputs" in given)
    return "regard.core.vjp.vjp" if cotangents or called == "torch.autograd.backward" else None


@pytest.mark.parametrize(
    "line",
    [
        "class A(TorchDispatchMode): pass",
        "torch.broadcast_shapes((1,), (2,))",
        "torch.autograd.grad(y, x, g)",
        "torch.autograd.grad(y, x, grad_outputs=g)",
    ],
)
def test_a_line_that_imports_them_is_found(line: str) -> None:
    assert any(slow(node) for node in ast.walk(ast.parse(line)))


def test_no_line_imports_them() -> None:
    found = {
        f"{file.relative_to(ROOT)}:{node.lineno}": f"write {instead}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if (instead := slow(node)) and isinstance(node, ast.stmt | ast.expr)
    }
    assert found == {}
