"""No call leaves tensors in reference cycles, which Python frees only when it looks for them, much later."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import regard as rg
from needed import needs_kernels
from regard import facts, testing
from regard.backends.base import Backend
from regard.compat.torch import flex_attention

pytestmark = pytest.mark.usefixtures("few_objects")

SOURCE = Path(__file__).parent.parent.parent / "src"
FRAME = testing.frame()
MASKS, SCORES = list(testing.masks(FRAME)), list(testing.scores(FRAME))
NATIVE = pytest.param(rg.Native(), marks=needs_kernels, id="Native")
BACKENDS = [NATIVE, pytest.param(rg.Tiled(rows=7, keys=11), id="Tiled"), pytest.param(rg.Reference(), id="Reference")]
BESSEL = rg.Where(lambda b, h, i, j: torch.special.bessel_j0((i - j).float()) > 0)  # a function that is no program


@contextmanager
def all_kept() -> Generator[None]:
    """What the collector would free is kept, and nothing is collected meanwhile."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()


def left_behind(call: Callable[[], object]) -> list[Tensor]:
    """Tensors that a call leaves in cycles. It runs once before: what is made once and kept is none."""
    call()
    with all_kept():
        call()
        gc.collect()
        return [item for item in gc.garbage if isinstance(item, Tensor)]


def trained(score: str, mask: str, backend: Backend | None) -> Callable[[], object]:
    """A forward and backward over float32 tensors, all of which require gradients."""
    problem = testing.draw(FRAME, score=testing.scores(FRAME)[score], mask=testing.masks(FRAME)[mask])
    q, k, v = (t.detach().float().requires_grad_() for t in (problem.q, problem.k, problem.v))
    own = problem.score.with_tensors(t.detach().float().requires_grad_() for t in problem.score.tensors())

    def call() -> None:
        out = rg.attention(q, k, v, score=own, mask=problem.mask, positions=problem.positions, backend=backend)
        out.sum().backward()

    return call


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, backend: Backend) -> None:
    assert not left_behind(trained("ScaledDot", mask, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", SCORES)
def test_scores(score: str, backend: Backend) -> None:
    if score != "Custom" or not isinstance(backend, rg.Native):
        assert not left_behind(trained(score, "Causal", backend))


def recorded_in_a_graph() -> Callable[[], object]:
    q = torch.randn(1, 2, 33, 8, requires_grad=True)
    compiled = torch.compile(lambda q: rg.attention(q, q, q, mask=BESSEL), backend="aot_eager", fullgraph=True)
    return lambda: compiled(q).sum().backward()


def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + torch.special.bessel_j0((i - j).float())


def flexible() -> Callable[[], object]:
    q = torch.randn(1, 2, 33, 8, requires_grad=True)
    return lambda: flex_attention(q, q, q, score_mod=score_mod).sum().backward()


def masked_flexibly() -> Callable[[], object]:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.special.bessel_j0((i - j).float()) > 0

    block_mask = create_block_mask(mask, None, None, 33, 33, device="cpu")
    q = torch.randn(1, 2, 33, 8)
    return lambda: flex_attention(q, q, q, block_mask=block_mask)


def over_a_closure() -> Callable[[], object]:
    """A function whose variables are bound: a tuple that holds a function, which reads a tensor."""
    q, table = torch.randn(1, 2, 33, 8), torch.randn(33, requires_grad=True)

    def call() -> None:
        numbers = table * 1
        inner = (lambda j: numbers[j],)
        flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + inner[0](j)).sum().backward()

    return call


def looked_at() -> Callable[[], object]:
    q = torch.randn(1, 2, 33, 8)
    return lambda: (rg.look(q, q, mask=BESSEL, facts=(facts.Entropy(),)), rg.explain(q, q, q, mask=BESSEL))


@needs_kernels
@pytest.mark.parametrize("made", [recorded_in_a_graph, flexible, masked_flexibly, over_a_closure, looked_at])
def test_functions(made: Callable[[], Callable[[], object]]) -> None:
    assert not left_behind(made())


def nested_that_call_themselves(source: str) -> list[str]:
    """Functions inside others that read their own name: a cycle of function and variable, made anew by each call."""
    found: list[str] = []
    for outer in ast.walk(ast.parse(source)):
        if isinstance(outer, ast.FunctionDef):
            inner = [node for node in ast.walk(outer) if isinstance(node, ast.FunctionDef) and node is not outer]
            for fn in inner:
                read = {node.id for node in ast.walk(fn) if isinstance(node, ast.Name)}
                found += [f"line {fn.lineno}: {fn.name}"] if fn.name in read else []
    return found


@pytest.mark.full
def test_no_function_is_made_that_calls_itself() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 200
    assert not [f"{path}: {said}" for path in paths for said in nested_that_call_themselves(path.read_text())]


def test_the_checks_can_fail() -> None:
    assert nested_that_call_themselves("def f():\n def g(): return g\n return g") == ["line 2: g"]

    def cyclic() -> None:
        t = torch.zeros(1)
        t.itself = t  # type: ignore[attr-defined]

    assert len(left_behind(cyclic)) == 1
