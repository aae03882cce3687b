"""Graphs that serve every length: how many are made, and what they hold of a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

import regard as rg
from needed import needs_kernels
from regard.backends.native.lower_mask import MASK_TENSORS
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
    "dilated": lambda q, k: {"mask": rg.Dilated(3) & rg.Causal() | rg.Prefix(2)},
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


@pytest.mark.full
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
        (rg.Dilated(3) | rg.Prefix(torch.tensor([2, 4])), {"mask_0", "mask_1", "mask_2"}),
        (rg.Dilated(3) & rg.Causal(), {"mask_0", "mask_1"}),
        (ROWS, {"mask_0", "mask_1"}),
        (ROWS & rg.Causal(), {"mask_0", "mask_1"}),
        (rg.Where(lambda b, h, i, j: SLOPES[h] > 0.2) & rg.Causal(), {"allowed", "last"}),
    ],
    ids=lambda given: repr(given) if isinstance(given, rg.Mask) else ",".join(sorted(given)),
)
def test_what_a_graph_holds_of_a_mask(mask: rg.Mask, operands: set[str]) -> None:
    """A rule, intervals, or the mask itself as a text and tensors; a byte a pair of what cannot be recorded."""
    names = {argument.name for argument in torch.ops.regard.forward.default._schema.arguments}
    of_masks = {"start", "stop", "first", "last", "key_counts", "query_counts", "q_documents", "k_documents", "allowed"}
    of_masks |= set(MASK_TENSORS)
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


@pytest.mark.full
@pytest.mark.parametrize(
    "mask",
    [
        rg.Retained(torch.full((2, 13), 20)),
        rg.Retained(torch.full((2, 4, 13), 20)),
        rg.Documents(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 13, dtype=torch.int64)),
        rg.Lengths(keys=torch.tensor([3, 9])),
        rg.Dense(torch.rand(2, 1, 1, 13) < 0.5) | rg.Dilated(2),
    ],
    ids=repr,
)
def test_a_batch_that_may_change_beside_a_mask_of_one(mask: rg.Mask) -> None:
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 13, 8)
    for t in (q, k):
        torch._dynamo.maybe_mark_dynamic(t, 0)
    run = torch.compile(
        lambda q, k: rg.attention(q, k, k, mask=mask, positions=rg.tail(1, 13)), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(run(q, k), rg.attention(q, k, k, mask=mask, positions=rg.tail(1, 13)))
