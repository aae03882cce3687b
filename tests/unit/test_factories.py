"""No tensor of the library depends on torch's default dtype or default device, which are the caller's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

SOURCE = Path(__file__).parent.parent.parent / "src"
# what torch.device(...) as a context changes; frombuffer lies where its buffer does
FACTORIES = {f.__name__ for f in _device_constructors()} | {"frombuffer"}
LEGACY = {"Tensor", "FloatTensor", "DoubleTensor", "LongTensor", "IntTensor", "BoolTensor"}


def torch_calls(source: str) -> Iterator[tuple[ast.Call, str]]:
    """Calls of torch.name(...), and their names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if isinstance(of, ast.Name) and of.id == "torch":
                yield node, node.func.attr


def complaints(source: str) -> list[str]:
    found = []
    for call, name in torch_calls(source):
        named = {keyword.arg for keyword in call.keywords}
        if name in LEGACY:
            found.append(f"line {call.lineno}: torch.{name}(...) has the default dtype and device")
        if name not in FACTORIES or None in named:
            continue
        wanted = {"dtype"} if name == "frombuffer" else {"dtype", "device"}
        found += [f"line {call.lineno}: torch.{name} without {word}=" for word in sorted(wanted - named)]
    return found


def test_every_factory_call_names_dtype_and_device() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 200 and not [f"{path}: {said}" for path in paths for said in complaints(path.read_text())]


def test_the_check_can_fail() -> None:
    assert len(complaints("torch.empty(3)")) == 2
    assert complaints("torch.arange(3, dtype=torch.int64)") == ["line 1: torch.arange without device="]
    assert complaints("torch.Tensor(3)") and not complaints("torch.zeros(1, dtype=d, device=e)")
