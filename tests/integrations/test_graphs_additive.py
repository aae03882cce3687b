"""Additive scores and sums over features in graphs: a text, of which the operator makes the call when it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.core.region import Region
from regard.scores.activations import Activation

pytestmark = [
    pytest.mark.full,  # torch's compiler takes seconds for each graph
    needs_kernels,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.compile follows no copy of a score before torch 2.13"),
]

HEADS, WIDTH, HIDDEN = 4, 16, 24


@dataclass(frozen=True)
class Gate(rg.Modifier):
    t: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * torch.sigmoid(s) + at.heads(self.t)


class Layer(torch.nn.Module):
    def __init__(self, activation: Activation, then: Callable[[Tensor], rg.Score] | None, mask: rg.Mask) -> None:
        super().__init__()
        self.activation, self.then, self.mask = activation, then, mask
        shapes = (WIDTH, HIDDEN), (HEADS, WIDTH, HIDDEN), (HEADS, HIDDEN), (HIDDEN,)
        self.w_q, self.w_k, self.w, self.b = (torch.nn.Parameter(torch.randn(shape) / 3) for shape in shapes)
        self.t = torch.nn.Parameter(torch.rand(HEADS))

    def similarity(self) -> rg.Score:
        return rg.Additive(self.w_q, self.w_k, self.w, self.b, self.activation)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = self.similarity()
        if self.then is not None:
            score = score >> self.then(self.t)
        at = rg.tail(q.shape[-2], k.shape[-2])
        return rg.attention(q, k, v, score=score, mask=self.mask, positions=at, sink=0.5)


class Usual(Layer):
    """With the activation that Additive has where none is given."""

    def similarity(self) -> rg.Score:
        return rg.Additive(self.w_q, self.w_k, self.w, self.b)


class Features(Layer):
    """A Gaussian with a learned width of each feature, and a gate of each head."""

    def __init__(self, then: Callable[[Tensor], rg.Score] | None, mask: rg.Mask) -> None:
        super().__init__(rg.Tanh(), then, mask)
        self.widths = torch.nn.Parameter(torch.rand(HEADS, WIDTH) + 0.5)
        self.gates = torch.nn.Parameter(torch.rand(HEADS, 1))
        self.factor = torch.nn.Parameter(torch.rand(()))

    def similarity(self) -> rg.Score:
        return rg.Elementwise(gaussian, tensors=(self.widths, self.gates, self.factor))


def gaussian(q: Tensor, k: Tensor, width: Tensor, gate: Tensor, factor: Tensor) -> Tensor:
    return -(((q - k) / width) ** 2) * torch.sigmoid(gate) * factor / WIDTH


LAYERS: dict[str, Callable[[], Layer]] = {
    "tanh": lambda: Usual(rg.Tanh(), None, rg.Causal()),
    "leaky ReLU": lambda: Layer(rg.LeakyReLU(0.1), None, rg.Window(5, 2) & ~rg.Dilated(3)),
    "own modifier": lambda: Layer(rg.Sigmoid(), Gate, rg.Dilated(3)),
    "features": lambda: Features(None, rg.Causal()),
    "features, own modifier": lambda: Features(Gate, rg.Window(5, 2) & ~rg.Dilated(3)),
    "steps": lambda: Layer(rg.Tanh(), lambda t: rg.SoftCap(2.0) >> rg.Alibi(t), rg.Causal()),
}


def inputs(nq: int, nk: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, HEADS, n, WIDTH, dtype=dtype) for n in (nq, nk, nk)]


def nodes(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if str(node.target).startswith("regard.")]


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_it_is_one_node(name: str) -> None:
    torch.compiler.reset()
    seen: list[list[str]] = []

    def watch(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(nodes(module.graph))
        return module.forward

    layer = LAYERS[name]()
    compiled = torch.compile(layer, backend=watch, fullgraph=True)
    with torch.no_grad():
        for nq, nk in ((7, 19), (33, 80), (40, 90)):
            given = inputs(nq, nk)
            torch.testing.assert_close(compiled(*given), layer(*given), rtol=1e-5, atol=1e-6)
    assert seen == [["regard.forward"]] * 2  # of one length, and of any


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name: str) -> None:
    torch.compiler.reset()
    layer, given = LAYERS[name](), [t.requires_grad_() for t in inputs(33, 80)]
    of_features = isinstance(layer, Features)
    own = (layer.widths, layer.gates, layer.factor) if of_features else (layer.w_q, layer.w_k, layer.w, layer.b)
    leaves = [*given, *own, *([layer.t] if layer.then else [])]
    out, right = torch.compile(layer, backend="aot_eager", fullgraph=True)(*given), layer(*given)
    g = torch.randn_like(out)
    for mine, expected in zip(*(torch.autograd.grad(x, leaves, g) for x in (out, right)), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    layer, given = LAYERS["tanh"](), inputs(33, 80, dtype)
    with torch.no_grad():
        out, right = torch.compile(layer, backend="eager", fullgraph=True)(*given), layer(*given)
    assert out.dtype == right.dtype
    torch.testing.assert_close(out, right, rtol=1e-2, atol=1e-2)


def test_exported_for_every_length() -> None:
    layer, long = LAYERS["own modifier"](), torch.export.Dim("long", min=2, max=4096)
    shapes = {"q": {2: 7}, "k": {2: long}, "v": {2: long}}
    with torch.no_grad():
        program = torch.export.export(layer, tuple(inputs(7, 19)), dynamic_shapes=shapes)
        assert nodes(program.graph) == ["regard.forward.default"]
        given = inputs(7, 50)
        torch.testing.assert_close(program.module()(*given), layer(*given), rtol=1e-5, atol=1e-6)


@dataclass
class Scaled:
    """A function whose number may change, without that torch.compile would notice."""

    by: float

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q - k).abs() * self.by


def test_a_function_that_cannot_be_recorded_is_right_too() -> None:
    torch.compiler.reset()
    function, given = Scaled(0.1), inputs(7, 19)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attention(q, k, v, score=rg.Elementwise(function), positions=rg.tail(7, 19))

    compiled = torch.compile(attend, backend="eager")
    for function.by in (0.1, 0.3):
        torch.testing.assert_close(compiled(*given), attend(*given), rtol=1e-5, atol=1e-6)


def test_a_call_without_queries() -> None:
    torch.compiler.reset()
    layer, given = LAYERS["tanh"](), inputs(0, 5)
    with torch.no_grad():
        out = torch.compile(layer, backend="eager", fullgraph=True)(*given)
    assert out.shape == layer(*given).shape


def test_explain_says_where_a_score_runs_in_graphs() -> None:
    q, k, v = inputs(7, 19)

    def told(score: rg.Score) -> str | None:
        return dict(rg.explain(q, k, v, score=score, positions=rg.tail(7, 19)).facts).get("in graphs")

    w = torch.randn(WIDTH)
    assert told(rg.Additive(None, None, w)) is None
    assert told(rg.Additive(None, None, w) >> Gate(torch.rand(HEADS))) == (
        "the modifiers are a program, which is made where the graph runs"
    )
    assert told(rg.Elementwise(lambda q, k: -(q - k).abs())) == (
        "the function of features is recorded, and becomes a program where the graph runs"
    )
    assert told(rg.Elementwise(lambda q, k: -(q - k).abs() * w.sum())) == (
        "the score runs tile by tile in PyTorch: it reads a tensor that none of its fields holds"
    )
