"""Scores and masks of a person's own in graphs: nodes that make the programs of the kernels when they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

import regard as rg
from needed import needs_kernels
from regard.backends.native.args import TEXTS
from regard.core.region import Region
from regard.runtime import plan_cache

pytestmark = [
    pytest.mark.full,  # torch's compiler takes seconds for each graph
    needs_kernels,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.compile follows no copy of a score before torch 2.13"),
]

LENGTHS = (37, 150)
RATE = 0.25


@dataclass(frozen=True)
class Temperature(rg.Modifier):
    """A learned number for each head."""

    positional = False
    log: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * at.heads(self.log.exp())


@dataclass(frozen=True)
class Distances(rg.Modifier):
    """A learned table of clipped distances, and a number that stands outside."""

    table: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return torch.tanh(s) * 4 + self.table[(at.i - at.j).clamp(-8, 8) + 8] * RATE


@dataclass(frozen=True)
class Gates(rg.Modifier):
    """Learned numbers of queries and keys, of which there are as many as the call has."""

    of_queries: Tensor
    of_keys: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        far = (at.row - at.col).abs() > 5
        return torch.where(far, s * at.keys(self.of_keys).sigmoid(), s + at.queries(self.of_queries))


@dataclass(frozen=True)
class Pairs(rg.Modifier):
    """A learned bias of pairs, cubed."""

    bias: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + at.pairs(self.bias) ** 3


@dataclass(frozen=True)
class Stride(rg.Mask):
    """README's."""

    n: int

    def visible(self, at: Region) -> Tensor:
        return (at.j % self.n == 0) | (at.i == at.j)


@dataclass(frozen=True)
class Near(rg.Mask):
    """Keys that are nearer than a number of their own."""

    reach: Tensor

    def visible(self, at: Region) -> Tensor:
        return (at.i - at.j).abs() <= at.keys(self.reach)


Given = dict[str, Tensor]


def drawn(n: int, dtype: torch.dtype = torch.float32) -> Given:
    """Everything that a call may be given, for n queries and n + 5 keys."""
    found = {
        "q": torch.randn(2, 4, n, 8),
        "k": torch.randn(2, 2, n + 5, 8),
        "v": torch.randn(2, 2, n + 5, 6),
        "log": torch.randn(4) / 4,
        "table": torch.randn(17),
        "of_queries": torch.randn(n),
        "of_keys": torch.randn(2, n + 5),
        "bias": torch.randn(4, n, n + 5) / 2,
        "sink": torch.randn(4),
    }
    return {name: t.to(dtype).requires_grad_() for name, t in found.items()}


SPARSE = rg.Where(lambda b, h, i, j: (i * 3 + j * 5 + h + b) % 7 < 4)
CALLS: dict[str, Callable[[Given], dict[str, Any]]] = {
    "heads": lambda t: {"score": rg.ScaledDot() >> Temperature(t["log"])},
    "a table, causal": lambda t: {"score": rg.Dot() >> Distances(t["table"]), "mask": rg.Causal()},
    "queries and keys": lambda t: {"score": rg.ScaledDot() >> Gates(t["of_queries"], t["of_keys"]), "sink": t["sink"]},
    "pairs, dilated": lambda t: {"score": rg.ScaledDot() >> Pairs(t["bias"]), "mask": rg.Dilated(3) | rg.Prefix(2)},
    "after a soft cap, a mask": lambda t: {
        "score": rg.ScaledDot() >> rg.SoftCap(5.0) >> Distances(t["table"]),
        "mask": SPARSE & rg.Causal(),
    },
    "cosine, dropout": lambda t: {
        "score": rg.Cosine(4.0) >> Temperature(t["log"]),
        "mask": rg.Window(9, 3),
        "dropout": rg.Dropout(0.3, seed=5),
    },
    "a function of pairs": lambda t: {"mask": SPARSE},
    "a function beside intervals": lambda t: {"mask": SPARSE & rg.Causal() | rg.Prefix(3), "sink": t["sink"]},
    "a mask": lambda t: {"mask": Stride(4)},
    "a mask with a tensor": lambda t: {"mask": Near(t["of_keys"].detach().round().long() + 2)},
}


def attend(name: str, given: Given) -> Tensor:
    positions = rg.tail(given["q"].shape[-2], given["k"].shape[-2])
    return rg.attention(given["q"], given["k"], given["v"], **CALLS[name](given), positions=positions)


def results(run: Callable[[str, Given], Tensor], name: str, given: Given) -> list[Tensor]:
    out = run(name, given)
    seed = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    gradients = torch.autograd.grad(out, tuple(given.values()), seed, materialize_grads=True)
    return [t.double() for t in (out, *gradients)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph, no plan, and no shortcut to one, as in a process whose first call is compiled."""
    torch._dynamo.reset()
    plan_cache.clear()
    monkeypatch.setattr(plan_cache, "_shortcut", None)
    yield
    torch._dynamo.reset()


class Watched:
    """A compiler that keeps what the nodes of the kernels are given, by the names of the operator's arguments."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.shapes: list[torch.Size] = []  # of all that a graph computes

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target == torch.ops.regard.forward:
                schema = torch.ops.regard.forward.default._schema.arguments
                given = zip((argument.name for argument in schema), node.args, strict=True)
                self.nodes.append({name: value for name, value in given if value is not None})
            value = node.meta.get("example_value")
            if node.op != "placeholder" and isinstance(value, Tensor):
                self.shapes.append(value.shape)
        return graph.forward


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CALLS), ("queries and keys", torch.bfloat16), ("a mask", torch.bfloat16)],
)
def test_values_and_gradients_of_one_graph_for_all_lengths(name: str, dtype: torch.dtype) -> None:
    """The same as eager, and as the definition in float64; a second length makes no second graph."""
    before = counters["stats"]["unique_graphs"]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in LENGTHS:
        given = drawn(n, dtype)
        exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
        got, eager, right = (
            results(run, name, at) for run, at in ((compiled, given), (attend, given), (attend, exact))
        )
        close = {"rtol": 2e-2, "atol": 6e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 2e-5}
        torch.testing.assert_close(got, right, **close)
        torch.testing.assert_close(got, eager, **close)
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_is_a_node(name: str) -> None:
    """Its modifiers and its mask are texts and tensors: no node of the graph has a number for each pair."""
    watched, given = Watched(), drawn(37)
    torch.compile(attend, backend=watched, fullgraph=True)(name, given)
    (node,) = watched.nodes
    texts = dict(zip(TEXTS, node["texts"].split("\n"), strict=True))
    assert bool(texts["score_text"]) == ("score" in CALLS[name](given)) and not texts["similarity_text"]
    assert bool(texts["mask_text"]) and not {"allowed", "tiles", "mask_code"} & node.keys()
    of_pairs = [shape for shape in watched.shapes if tuple(shape[-2:]) == (37, 42)]
    assert not of_pairs or name == "pairs, dilated"  # whose bias the caller has


def windowed(reach: int) -> rg.Mask:
    return rg.Where(lambda b, h, i, j: (i - j).abs() < reach)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_that_a_function_reads_is_seen_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool | None
) -> None:
    """In a function outside, in a variable around it, and in a field; also where torch expects other numbers."""

    def three(q: Tensor, *masks: rg.Mask) -> tuple[Tensor, ...]:
        score = rg.Dot() >> Distances(q[0, 0, :17, 0])
        return rg.attention(q, q, q, score=score), *(rg.attention(q, q, q, mask=mask) for mask in masks)

    q = torch.randn(1, 2, 37, 8)
    compiled = torch.compile(three, backend="eager", fullgraph=True, dynamic=dynamic)
    for n in (2, 3, 5, 7):
        monkeypatch.setitem(globals(), "RATE", n)
        given = q, windowed(n), Stride(n)
        torch.testing.assert_close(compiled(*given), three(*given), rtol=1e-4, atol=1e-5)


def test_what_is_not_recorded_runs_as_before() -> None:
    """Functions that read tensors, or what they hold no name for; explain says so."""
    table, flags = torch.randn(9), torch.rand(200) < 0.7

    @dataclass(frozen=True)
    class Reads(rg.Modifier):
        def modify(self, s: Tensor, at: Region) -> Tensor:
            return s + table[(at.i - at.j) % 9]

    call: dict[str, Any] = {"score": rg.Dot() >> Reads(), "mask": rg.Where(lambda b, h, i, j: flags[j])}
    watched, given = Watched(), drawn(37)
    q, k, v = given["q"], *(given[name].detach()[..., :37, :].requires_grad_() for name in "kv")
    got = torch.compile(lambda q, k, v: rg.attention(q, k, v, **call), backend=watched, fullgraph=True)(q, k, v)
    torch.testing.assert_close(got, rg.attention(q, k, v, **call))
    assert not watched.nodes
    said = dict(rg.explain(q, k, v, **call).facts)["in graphs"]
    assert "tile by tile in PyTorch: it reads a tensor that none of its fields holds" in said
    assert "the mask is written out" in said


def test_what_only_some_numbers_allow_runs_by_tiles_in_the_node() -> None:
    """Whole numbers that the kernels cannot hold are known when the graph runs."""

    @dataclass(frozen=True)
    class Far(rg.Modifier):
        numbers: Tensor

        def modify(self, s: Tensor, at: Region) -> Tensor:
            return s + ((at.keys(self.numbers) + at.i) % 5) * 0.5

    def far(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
        return rg.attention(q, k, v, score=rg.ScaledDot() >> Far(numbers), mask=rg.Window(9, 9), sink=0.5)

    given = drawn(37)
    q, k, v = given["q"], *(given[name].detach()[..., :37, :].requires_grad_() for name in "kv")
    compiled = torch.compile(far, backend="aot_eager", fullgraph=True)
    for numbers in (torch.arange(37), torch.arange(37) * (1 << 40)):
        got, right = (
            (out := run(q, k, v, numbers), *torch.autograd.grad(out.sin().sum(), (q, k, v))) for run in (compiled, far)
        )
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


REACH = 5


def _reaches(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() < REACH


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_variable_that_the_graph_assigns_before_the_call(dynamic: bool) -> None:
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))

    def call(reach: int) -> Tensor:
        global REACH
        REACH = reach
        return rg.attention(q, k, v, mask=rg.Where(_reaches))

    compiled = torch.compile(call, backend="eager", dynamic=dynamic)
    for reach in (3, 7, 9):
        torch.testing.assert_close(compiled(reach), call(reach))


LIMITS = numpy.array([3])
SHAPED = torch.zeros(3)


def _below_an_array(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() < int(LIMITS[0])


def _below_a_size(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() < SHAPED.shape[0]


@pytest.mark.parametrize("fn", [_below_an_array, _below_a_size])
def test_what_torch_does_not_guard_is_not_recorded(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    compiled = torch.compile(lambda q: rg.attention(q, k, v, mask=rg.Where(fn)), backend="eager")
    for n in (3, 7, 9, 4):
        monkeypatch.setitem(globals(), "LIMITS", numpy.array([n]))
        monkeypatch.setitem(globals(), "SHAPED", torch.zeros(n))
        torch.testing.assert_close(compiled(q), rg.attention(q, k, v, mask=rg.Window(n - 1, n - 1)))


def test_functions_with_defaults_that_a_graph_makes() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))

    def call(q: Tensor, n: int) -> Tensor:
        return rg.attention(q, k, v, mask=rg.Where(lambda b, h, i, j, n=n: (i - j).abs() < n))

    compiled = torch.compile(call, backend="eager")
    for n in (3, 7, 9):
        torch.testing.assert_close(compiled(q, n), call(q, n))


class Buffered(torch.nn.Module):
    """A score whose function reads a buffer of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("t", torch.rand(40))

    def forward(self, q: Tensor) -> Tensor:
        return rg.attention(q, q, q, score=rg.Dot() >> Read(lambda s, at: s * self.t[at.col]))


@dataclass(frozen=True)
class Read(rg.Modifier):
    fn: Callable[[Tensor, Region], Tensor]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.fn(s, at)


def test_export_of_a_function_that_reads_a_buffer() -> None:
    model, q = Buffered(), torch.randn(1, 2, 40, 16)
    exported = torch.export.export(model, (q,), strict=False).module()
    torch.testing.assert_close(exported(q), model(q))
