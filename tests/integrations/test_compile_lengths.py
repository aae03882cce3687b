"""Graphs that serve every length: how many are made, what they hold of a mask, and AOTInductor."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

import regard as rg
from needed import needs_kernels
from regard.runtime import plan_cache

LENGTHS = range(5, 205, 10)  # 20 of them
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
PREFIX_LM = rg.Causal() | rg.Prefix(3)
AFTER = ~rg.Causal()
ROWS = rg.Where(lambda b, h, i, j: (i >= j) | (j % 3 == 0))


def documents(q: Tensor, k: Tensor) -> dict[str, Any]:
    return {"mask": rg.Documents(torch.arange(q.shape[-2]) // 4) & rg.Causal()}


CALLS: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "plain": lambda q, k: {},
    "causal, slopes, soft cap": lambda q, k: {
        "score": rg.ScaledDot() >> rg.Alibi(SLOPES) >> rg.SoftCap(20.0),
        "mask": rg.Causal(),
    },
    "window, sink": lambda q, k: {"mask": rg.Window(before=6, after=0), "sink": 0.5},
    "the last queries": lambda q, k: {"mask": rg.Causal(), "positions": rg.tail(q.shape[-2], k.shape[-2])},
    "prefix language model": lambda q, k: {"mask": PREFIX_LM},
    "documents": documents,
    "where": lambda q, k: {"mask": ROWS},
    "dropout": lambda q, k: {"dropout": rg.Dropout(0.2, seed=3)},
    "tiled": lambda q, k: {"mask": rg.Causal(), "backend": rg.Tiled()},
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph, no plan, and no shortcut to one, as in a process whose first call is compiled."""
    torch._dynamo.reset()
    plan_cache.clear()
    monkeypatch.setattr(plan_cache, "_shortcut", None)
    yield
    torch._dynamo.reset()


def draw(n: int) -> tuple[Tensor, ...]:
    shapes = ((2, 4, n - 2, 8), (2, 2, n, 8), (2, 2, n, 8))
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


def attend(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if name != "the last queries":
        q, k, v = q, k[..., :-2, :], v[..., :-2, :]
    return rg.attention(q, k, v, **CALLS[name](q, k))


@pytest.mark.full
@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2)])
@pytest.mark.parametrize("name", CALLS)
def test_graphs_for_20_lengths(name: str, dynamic: bool | None, most: int) -> None:
    """Forward and backward: one graph where lengths are said to change, a second where torch finds out."""
    before = counters["stats"]["unique_graphs"]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n in LENGTHS:
        given, found = draw(n), list[tuple[Tensor, ...]]()
        for run in (compiled, attend):  # eager calls in between, whose plans no graph may depend on
            out = run(name, *given)
            found.append((out, *torch.autograd.grad(out.sin().sum(), given)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] - before <= most


@needs_kernels
@pytest.mark.parametrize(
    ("mask", "operands"),
    [
        (rg.Causal(), {"last"}),
        (rg.Window(before=6, after=0) & rg.Lengths(keys=torch.tensor([3, 5])), {"first", "last", "key_counts"}),
        (rg.Documents(torch.arange(11) // 4) & rg.Causal(), {"last", "q_documents", "k_documents"}),
        (PREFIX_LM, {"start", "stop"}),
        (PREFIX_LM & rg.Window(before=6, after=0), {"start", "stop"}),
        (AFTER, {"start", "stop"}),
        (ROWS, {"allowed"}),
    ],
    ids=repr,
)
def test_a_mask_of_intervals_is_a_rule_in_a_graph(mask: rg.Mask, operands: set[str]) -> None:
    """Not a byte a pair, which a graph has of masks that are no intervals."""
    names = {argument.name for argument in torch.ops.regard.forward.default._schema.arguments}
    of_masks = {"start", "stop", "first", "last", "key_counts", "query_counts", "q_documents", "k_documents", "allowed"}
    assert of_masks <= names
    found: list[set[str]] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target == torch.ops.regard.forward:
                schema = torch.ops.regard.forward.default._schema.arguments
                given = zip((argument.name for argument in schema), node.args, strict=True)
                found.append({name for name, value in given if value is not None})
        return graph.forward

    run = torch.compile(lambda q, k, v: rg.attention(q, k, v, mask=mask), backend=look, fullgraph=True)
    q, k, v = torch.randn(2, 4, 11, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    torch.testing.assert_close(run(q, k, v), rg.attention(q, k, v, mask=mask, backend=rg.Reference()))
    assert [each & of_masks for each in found] == [operands]


class SelfAttention(torch.nn.Module):
    """A layer whose mask is a value."""

    def __init__(self, mask: rg.Mask) -> None:
        super().__init__()
        self.projection, self.mask = torch.nn.Linear(16, 48), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return rg.attention(q, k, v, mask=self.mask).transpose(1, 2).flatten(2)


@needs_kernels
@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler for AOTInductor")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own
def test_aot_inductor_packages_a_layer_for_every_length(tmp_path: Path) -> None:
    layer, n = SelfAttention(PREFIX_LM).eval(), torch.export.Dim("n", min=3, max=4096)
    with torch.no_grad():
        program = torch.export.export(layer, (torch.randn(2, 40, 16),), dynamic_shapes={"x": {1: n}})
        packed = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        run = torch._inductor.aoti_load_package(packed)
        for length in (40, 7, 300):
            x = torch.randn(2, length, 16)
            torch.testing.assert_close(run(x), layer(x))
