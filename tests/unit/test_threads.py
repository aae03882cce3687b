"""Threads: what one does while another is in the middle of an import, of a call that is watched, of a patch."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.call.hooks import AttentionCall, notify, observing
from regard.compat.torch import routes
from regard.core import tracing
from regard.runtime import plan_cache

SOURCE = Path(__file__).resolve().parents[2] / "src" / "regard"


def calls() -> list[Tensor]:
    q = torch.randn(1, 2, 7, 8)
    recorded = q.clone().requires_grad_()
    found = [rg.attention(q, q, q, backend=backend) for backend in (None, rg.Tiled(), rg.Reference())]
    found.append(rg.attention(recorded, q, q))
    rg.explain(q, q, q)
    rg.look(q, q, facts=(rg.facts.Entropy(),))
    layer = torch.nn.MultiheadAttention(8, 2)
    with rg.record(layer):
        found.append(layer(q[0], q[0], q[0])[0])
    return found


@pytest.mark.parametrize(
    "name",
    [
        "torch.fx.experimental.symbolic_shapes",
        "torch._subclasses.fake_tensor",
        "torch._dynamo.eval_frame",
        "transformers.modeling_utils",
        "numpy",
        "jax",
    ],
)
def test_a_module_that_another_thread_is_importing_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """importlib puts a module in sys.modules before its code runs."""
    begun = ModuleType(name)
    begun.__spec__ = ModuleSpec(name, None)
    begun.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, begun)
    assert all(out.isfinite().all() for out in calls())
    with pytest.raises(TypeError, match="q is a list"):
        rg.attention([[1.0]], torch.zeros(1, 1), torch.zeros(1, 1))  # type: ignore[arg-type]


def test_loaded_tells_a_module_from_one_whose_import_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real import, which another thread looks at from within."""
    (tmp_path / "imported_by_a_test.py").write_text("import asked_by_a_test\nasked_by_a_test.look()\n")
    asked, found = ModuleType("asked_by_a_test"), list[Any]()

    def look() -> None:
        thread = threading.Thread(target=lambda: found.append(tracing.loaded("imported_by_a_test")))
        thread.start()
        thread.join()

    asked.look = look  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "asked_by_a_test", asked)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert tracing.loaded("imported_by_a_test") is None
        __import__("imported_by_a_test")
        assert found == [None]
        assert tracing.loaded("imported_by_a_test") is sys.modules["imported_by_a_test"]
    finally:
        sys.modules.pop("imported_by_a_test", None)


FRESH = """
import threading, torch
import regard as rg
errors = []
def call():
    try:
        for _ in range(40):
            q = torch.randn(1, 2, 7, 8)
            rg.attention(q, q, q, backend=rg.Tiled())
            rg.attention(q.requires_grad_(), q, q).sum().backward()
    except BaseException as error:
        errors.append(repr(error))
def load():
    import torch.fx.experimental.symbolic_shapes
threads = [threading.Thread(target=call) for _ in range(3)] + [threading.Thread(target=load)]
for thread in reversed(threads):
    thread.start()
for thread in threads:
    thread.join()
print(errors)
"""


@pytest.mark.full
def test_first_calls_of_threads_in_a_fresh_process() -> None:
    """While another thread imports what torch.compile needs."""
    ran = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=100, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


def test_modules_are_looked_up_by_loaded_alone() -> None:
    """Whatever reads sys.modules by a name may find a module whose import has begun."""
    found = [
        f"{file.relative_to(SOURCE)}:{node.lineno}"
        for file in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "get" and ast.unparse(node.value) == "sys.modules"
    ]
    assert [place.partition(":")[0] for place in found] == ["core/tracing.py"], found


def test_an_observer_of_another_thread_that_ends_takes_no_call_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread stops observing while this one looks for its observers."""
    opened, close, seen = threading.Event(), threading.Event(), list[AttentionCall]()

    def other() -> None:
        with observing(lambda call: None):
            opened.set()
            close.wait(60)

    thread, ident = threading.Thread(target=other), threading.get_ident
    thread.start()
    opened.wait(60)
    mine = ident()

    def get_ident() -> int:
        if ident() == mine and not close.is_set():
            close.set()
            thread.join()
        return ident()

    with observing(seen.append):
        monkeypatch.setattr(threading, "get_ident", get_ident)
        notify(lambda: AttentionCall(None, torch.zeros(1, 1), torch.zeros(1, 1)))
        monkeypatch.undo()
    assert close.is_set() and len(seen) == 1


def test_a_patch_that_another_thread_restores_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 7, 8)
    found = rg.patch(report=None)
    attention = torch.nn.functional.scaled_dot_product_attention

    class Elsewhere:
        """Asked for by the call; the other thread restores meanwhile."""

        @property
        def in_torch(self) -> bool:
            found.restore()
            return False

    monkeypatch.setattr(routes, "_THREAD", Elsewhere())
    torch.testing.assert_close(attention(q, q, q), rg.attention(q, q, q))
    assert found.calls.total() == 1


@needs_kernels
def test_another_thread_that_replaces_the_positions_of_a_plan_changes_no_call() -> None:
    """A plan keeps the positions that it read last, for the next layer."""
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 40, 8)
    slopes = torch.tensor([0.5, 0.25])

    def call(nk: int) -> Tensor:
        at = rg.tail(3, nk)
        keys = k[:, :, :nk]
        return rg.attention(q, keys, keys, score=rg.ScaledDot() >> rg.Alibi(slopes), mask=rg.Causal(), positions=at)

    plan_cache.clear()
    expected = call(40)
    (plan,) = plan_cache.plans()

    class Replaced(tuple[Any, ...]):
        """What a plan keeps, which another call replaces as soon as somebody has looked at it."""

        def __getitem__(self, index: Any) -> Any:
            thread = threading.Thread(target=call, args=(7,))
            thread.start()
            thread.join()
            return super().__getitem__(index)

    plan.positions = Replaced(plan.positions)
    assert torch.equal(call(40), expected)
