"""The native forward as one node of a graph: torch.compile(fullgraph=True), torch.export, fake tensors.

Whether a first call becomes a graph at all is asked in test_graphs_fresh.py, in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.backends.native.args import lower
from regard.backends.native.lower_mask import lower_mask
from regard.backends.native.torch_ops import inputs_of, traced
from regard.call.arguments import build_problem
from selection import few

pytestmark = needs_kernels

N = 70
ALLOWED, BIAS = torch.rand(N, N) > 0.5, torch.randn(4, N, N)
CALLS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"mask": rg.Causal()},
    "no interval": {"mask": rg.Causal() & rg.Window(5, 0) | rg.Prefix(3)},
    "lengths": {"mask": rg.Lengths(keys=torch.tensor([30, N]))},
    "documents": {"mask": rg.Documents(torch.arange(N) // 9)},
    "dense": {"mask": rg.Dense(ALLOWED)},
    "steps": {"score": rg.ScaledDot() >> rg.SoftCap(3.0) >> rg.Alibi(rg.Alibi.geometric(4))},
    "log distances": {"score": rg.ScaledDot() >> rg.LogDistance(torch.rand(4), 0.1)},
    "bias": {"score": rg.ScaledDot() >> rg.Bias(BIAS)},
    "table": {"score": rg.ScaledDot() >> rg.RelativeBias(torch.randn(32, 4), rg.T5Buckets(32, 128))},
    "sink": {"sink": 0.5},
    "cosine": {"score": rg.Cosine(3.0)},
    "dropout": {"dropout": rg.Dropout(0.1, seed=3)},
}


class Layer(torch.nn.Module):
    def __init__(self, given: dict[str, object]) -> None:
        super().__init__()
        self.given = given

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attention(q, k, v, **self.given)


def inputs() -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 4, N, 32) for _ in range(3))


def nodes(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "regard" in str(node.target)]


@pytest.mark.parametrize("name", few(CALLS, "documents", "dense"))
def test_compiled_whole_it_is_one_node(name: str) -> None:
    torch.compiler.reset()
    seen: list[list[str]] = []

    def watch(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(nodes(module.graph))
        return module.forward

    layer, given = Layer(CALLS[name]), inputs()
    with torch.no_grad():
        out = torch.compile(layer, backend=watch, fullgraph=True)(*given)
        torch.testing.assert_close(out, layer(*given), rtol=1e-6, atol=1e-6)
    assert seen == [["regard.forward"]]


@pytest.mark.parametrize("name", ["plain", "no interval", "bias"])
def test_exported_it_is_one_node_for_every_length(name: str) -> None:
    layer, given = Layer(CALLS[name]), inputs()
    long = torch.export.Dim("long", min=2, max=4096)
    shapes = {"q": {2: long}, "k": {2: long}, "v": {2: long}} if name == "plain" else None
    with torch.no_grad():
        program = torch.export.export(layer, given, dynamic_shapes=shapes)
        assert nodes(program.graph) == ["regard.forward.default"]
        torch.testing.assert_close(program.module()(*given), layer(*given), rtol=0, atol=0)
        if shapes is not None:
            other = tuple(torch.randn(2, 4, 33, 32) for _ in range(3))
            torch.testing.assert_close(program.module()(*other), layer(*other), rtol=0, atol=0)


def test_positions_changed_in_place_are_not_trusted_in_a_graph() -> None:
    torch.compiler.reset()
    at = rg.tail(N, N)
    at.k.copy_(torch.randperm(N))

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attention(q, k, v, mask=rg.Causal(), positions=at)

    given = inputs()
    with torch.no_grad():
        got = torch.compile(causal, backend="eager", fullgraph=True)(*given)
        torch.testing.assert_close(got, causal(*given), rtol=1e-5, atol=1e-5)


def test_a_graph_made_before_positions_were_looked_at_is_made_anew() -> None:
    torch.compiler.reset()
    causal = torch.compile(
        lambda at, *given: rg.attention(*given, mask=rg.Causal(), positions=at), backend="eager", fullgraph=True
    )
    given, at = inputs(), rg.tail(N, N)
    for change in (None, lambda: at.q.sub_(2), lambda: at.k.add_(1)):
        if change is not None:
            change()
        right = rg.attention(*given, mask=rg.Causal(), positions=at)
        torch.testing.assert_close(causal(at, *given), right, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_in_a_graph_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t).requires_grad_() for t in inputs())
        (first,) = torch.autograd.grad(rg.attention(q, k, v).sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            torch.autograd.grad(first.sum(), q)


def test_fake_tensors_know_the_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(torch.randn(2, h, 5, d)) for h, d in ((6, 8), (2, 8), (2, 3)))
        out = rg.attention(q, k, v)
    assert out.shape == (2, 6, 5, 3) and out.dtype == torch.float32


@pytest.mark.parametrize("name", ["plain", "steps", "bias", "dense", "dropout"])
def test_torch_finds_the_operation_well_formed(name: str) -> None:
    given = CALLS[name]
    score, mask = given.get("score", rg.ScaledDot()), given.get("mask", rg.Everything())
    q, k, v = inputs()
    problem, _ = build_problem(q, k, v, score, mask, None, given.get("dropout"))
    lowered = lower(problem, lower_mask(problem, None))
    told = tuple(inputs_of(lowered))
    torch.library.opcheck(torch.ops.regard.forward.default, told, test_utils=("test_schema", "test_faketensor"))
    (out, stats), (right, lse) = traced(lowered), rg.Native().forward(problem)
    assert torch.equal(out, right)
    torch.testing.assert_close(stats.lse, lse, rtol=1e-6, atol=1e-6)


LEARNED: dict[str, dict[str, object]] = {
    "plain": {"mask": rg.Causal()},
    "bias": {"score": rg.ScaledDot(torch.rand(4)) >> rg.Bias(torch.randn(4, N, N))},
    "shared bias": {"score": rg.ScaledDot() >> rg.Bias(torch.randn(1, N))},
    "steps": {"score": rg.Dot() >> rg.SoftCap(9.0) >> rg.Alibi(torch.rand(4))},
    "one slope": {"score": rg.ScaledDot() >> rg.Alibi(torch.rand(1))},
    "table": {"score": rg.ScaledDot() >> rg.RelativeBias(torch.randn(32, 4), rg.T5Buckets(32, 128))},
    "one table": {"score": rg.ScaledDot() >> rg.RelativeBias(torch.randn(32, 1), rg.T5Buckets(32, 128))},
    "bilinear": {"score": rg.Bilinear(torch.randn(32, 32) / 9)},
    "sink": {"sink": torch.randn(4), "mask": rg.Causal() & rg.Window(5, 0) | rg.Prefix(3)},
    "dropout": {"dropout": rg.Dropout(0.1, seed=3)},
}


@pytest.mark.full
@pytest.mark.parametrize("name", few(LEARNED, "bias", "table", "dropout"))
def test_compiled_training_is_two_nodes(name: str) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    given = LEARNED[name]
    held = [t for value in given.values() for t in ([value] if isinstance(value, Tensor) else _floats(value))]
    seen: list[list[str]] = []

    def watch(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(nodes(module.graph))
        return make_boxed_func(module.forward)

    leaves = [t.requires_grad_() for t in (*inputs(), *held)]
    layer, q, k, v = Layer(given), *leaves[:3]
    backend = aot_autograd(fw_compiler=watch, bw_compiler=watch)
    for run in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        run(q, k, v).sin().sum().backward()
        mine = [t.grad for t in leaves]
        for t in leaves:
            t.grad = None
        right = mine if run is layer else right  # noqa: F821
    assert seen == [["regard.forward.default"], ["regard.backward.default"]]
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for t in held:
        t.requires_grad_(False)


def _floats(value: object) -> list[Tensor]:
    assert isinstance(value, (rg.Score, rg.Mask, rg.Dropout))
    return [t for t in value.tensors() if t.dtype.is_floating_point]
