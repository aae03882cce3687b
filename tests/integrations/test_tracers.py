"""Tracers that record operations of torch: torch.jit.trace, make_fx. What they record answers for other numbers too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from regard.testing import Case, draw, frame, masks, scores
from selection import few

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated"),
]

AT = frame(batch=(2,), heads=4, nq=13, nk=17)
Function = Callable[..., Any]


@dataclass(frozen=True)
class Threshold(rg.Mask):
    """A mask of one's own whose tensor is an input."""

    level: Tensor

    def visible(self, at: Any) -> Tensor:
        return at.keys(self.level) <= at.i


def jit(fn: Function, given: tuple[Tensor, ...]) -> Function:
    return torch.jit.trace(fn, given, check_trace=False)


def real(fn: Function, given: tuple[Tensor, ...]) -> Function:
    return make_fx(fn, tracing_mode="real")(*given)


def early(fn: Function, given: tuple[Tensor, ...]) -> Function:
    return make_fx(fn, tracing_mode="real", pre_dispatch=True)(*given)


def symbolic(fn: Function, given: tuple[Tensor, ...]) -> Function:
    return make_fx(fn, tracing_mode="symbolic")(*given)


TRACERS = {"jit": jit, "make_fx": real, "make_fx pre-dispatch": early, "make_fx symbolic": symbolic}


def own(at: Any) -> Threshold:
    return Threshold(torch.randint(0, at.nk, (at.nk,)))


def calls() -> dict[str, Callable[[], Case]]:
    """By name, how to draw a call of each mask and score; each time with other numbers."""
    found: dict[str, Callable[[], Case]] = {}
    for name in masks(AT):
        found[f"mask {name}"] = lambda name=name: draw(AT, mask=masks(AT)[name])
    for name in scores(AT):
        found[f"score {name}"] = lambda name=name: draw(AT, score=scores(AT)[name])
    found["own mask"] = lambda: draw(AT, mask=own(AT))
    found["sink"] = lambda: draw(AT, mask=rg.Causal(), sink=True)
    found["dropout"] = lambda: draw(AT, dropout=rg.Dropout(0.3, seed=7))
    return found


CALLS = calls()


def single(call: Case) -> Case:
    return call.with_tensors(iter([t.float() if t.is_floating_point() else t for t in call.tensors()]))


def given(call: Case) -> dict[str, Any]:
    return {"score": call.score, "mask": call.mask, "positions": call.positions, "sink": call.sink}


def agrees(tracer: str, fn: Function, first: tuple[Tensor, ...], *others: tuple[Tensor, ...]) -> None:
    """Traced on the first numbers, the function answers as it does untraced on these and on others."""
    fn(*first)  # a structure that is kept must not be found while tracing
    traced = TRACERS[tracer](fn, first)
    for one in (first, *others):
        got, right = traced(*one), fn(*one)
        for a, b in zip(_listed(got), _listed(right), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert not b.isnan().any()


def _listed(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tracer", few(TRACERS, "make_fx"))
def test_every_call_is_traced_for_other_numbers(tracer: str, name: str) -> None:
    call, other = single(CALLS[name]()), single(CALLS[name]())

    def fn(*tensors: Tensor) -> Tensor:
        one = call.with_tensors(iter(tensors))
        return rg.attention(one.q, one.k, one.v, **given(one), dropout=one.dropout)

    agrees(tracer, fn, call.tensors(), other.tensors())


FUNCTIONS: dict[str, Function] = {
    "attention_state": lambda q, k, v, **given: [*rg.attention_state(q, k, v, **given).finish()],
    "attention_weights": lambda q, k, v, **given: rg.attention_weights(q, k, **given),
    "attention_scores": lambda q, k, v, sink, **given: rg.attention_scores(q, k, **given),
    "entropy": lambda q, k, v, **given: rg.entropy(q, k, **given),
    "max_score": lambda q, k, v, **given: rg.max_score(q, k, **given),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("tracer", ["jit", "make_fx"])
def test_every_function_is_traced_for_other_numbers(tracer: str, function: str) -> None:
    call, other = (single(draw(AT, mask=rg.Causal(), sink=True)) for _ in range(2))

    def fn(*tensors: Tensor) -> Any:
        one = call.with_tensors(iter(tensors))
        return FUNCTIONS[function](one.q, one.k, one.v, **given(one))

    agrees(tracer, fn, call.tensors(), other.tensors())


@pytest.mark.parametrize("tracer", TRACERS)
def test_look_is_refused(tracer: str) -> None:
    q, k = torch.randn(2, 4, 13, 8), torch.randn(2, 4, 13, 8)
    entropy = rg.facts.Entropy()
    with pytest.raises(rg.Unsupported, match="look cannot be traced"):
        TRACERS[tracer](lambda q, k: rg.look(q, k, facts=(entropy,))[entropy], (q, k))


@pytest.mark.parametrize("tracer", ["jit", "make_fx", "make_fx pre-dispatch"])
@pytest.mark.parametrize("score", [rg.ScaledDot(), rg.Distance()], ids=repr)
def test_numbers_that_were_finite_while_traced_need_not_be(tracer: str, score: rg.Score) -> None:
    """What a branch on values has decided is not kept: a hidden NaN leaks nowhere, a visible one is seen."""
    first, other = (tuple(torch.randn(2, 4, 13, 8) for _ in range(3)) for _ in range(2))
    traced = TRACERS[tracer](lambda q, k, v: rg.attention(q, k, v, score=score, mask=rg.Causal()), first)
    for t in other:
        t[0, 1, 7] = torch.nan
    right = rg.attention(*other, score=score, mask=rg.Causal())
    assert right[0, 1, :7].isfinite().all() and right[0, 1, 7:].isnan().all()
    torch.testing.assert_close(traced(*other), right, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 4, 14, 8), (2, 4, 26, 8), (2, 4, 1, 8), (4, 2, 13, 8), (2, 4, 104, 1)], ids=str)
def test_a_torchscript_trace_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    traced = jit(lambda q, k, v: rg.attention(q, k, v), tuple(torch.randn(2, 4, 13, 8) for _ in range(3)))
    with pytest.raises(RuntimeError, match=r"invalid for input of size|expanded size"):
        traced(*(torch.randn(shape) for _ in range(3)))


def test_a_torchscript_trace_has_gradients() -> None:
    first, other = (tuple(torch.randn(2, 4, 13, 8, requires_grad=True) for _ in range(3)) for _ in range(2))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attention(q, k, v, mask=rg.Causal())

    traced = jit(fn, first)
    for mine, right in zip(*(torch.autograd.grad(run(*other).sin().sum(), other) for run in (traced, fn)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_dropout_without_a_seed_is_refused_in_torchscript() -> None:
    x = torch.randn(2, 4, 13, 8)
    with pytest.raises(rg.Unsupported, match=r"Pass seed=\.\.\."):
        jit(lambda q: rg.attention(q, q, q, dropout=rg.Dropout(0.3)), (x,))


@pytest.mark.parametrize("tracer", ["make_fx", "make_fx symbolic"])
def test_gradients_are_traced(tracer: str) -> None:
    first, other = (tuple(torch.randn(2, 4, 13, 8) for _ in range(4)) for _ in range(2))

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
        return torch.autograd.grad(rg.attention(*leaves, mask=rg.Causal()), leaves, g)

    agrees(tracer, fn, first, other)


@pytest.mark.parametrize("score", [rg.ScaledDot(), rg.Additive(*(torch.randn(8, 9) for _ in "qk"), torch.randn(9))])
@pytest.mark.parametrize("positions", [None, rg.head(13, 13)], ids=["prepared", "posed"])
def test_a_backward_alone_is_traced(score: rg.Score, positions: rg.Positions | None) -> None:
    """The forward has run before, by kernels: what it kept is a constant of the graph, the cotangent an input."""
    leaves = tuple(torch.randn(2, 4, 13, 8, requires_grad=True) for _ in range(3))
    out = rg.attention(*leaves, score=score, mask=rg.Causal(), positions=positions)

    def fn(g: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, g, retain_graph=True)

    agrees("make_fx", fn, (torch.randn_like(out),), (torch.randn_like(out),))


class Replayed(TorchDispatchMode):
    """A tracer of one's own: it writes down each operation, to be run again on other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out

    def run(self, inputs: dict[Tensor, Tensor], answer: Tensor) -> Tensor:
        known: dict[int, Any] = {id(old): new for old, new in inputs.items()}
        for func, args, kwargs, out in self.steps:
            args, kwargs = torch.utils._pytree.tree_map(lambda t: known.get(id(t), t), (args, kwargs))
            again = func(*args, **kwargs)
            old, new = (torch.utils._pytree.tree_leaves(x) for x in (out, again))
            known.update((id(a), b) for a, b in zip(old, new, strict=True) if isinstance(a, Tensor))
        return known[id(answer)]


@pytest.mark.parametrize("score", [rg.ScaledDot(), rg.Additive(*(torch.randn(8, 9) for _ in "qk"), torch.randn(9))])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_dispatch_mode_sees_what_computes(score: rg.Score, grad: bool) -> None:
    first, other = (tuple(torch.randn(2, 4, 13, 8) for _ in range(3)) for _ in range(2))
    given = {"score": score, "mask": rg.Causal()}
    rg.attention(*first, **given)
    with torch.set_grad_enabled(grad), Replayed() as mode:
        leaves = tuple(t.requires_grad_(grad) for t in first)
        out = rg.attention(*leaves, **given)
    with torch.no_grad():
        got = mode.run(dict(zip(leaves, other, strict=True)), out)
        torch.testing.assert_close(got, rg.attention(*other, **given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tracer", ["make_fx", "make_fx pre-dispatch"])
def test_a_graph_without_guards_reads_nothing_beside_its_operands(tracer: str) -> None:
    """make_fx checks no shapes: a mask of another length is refused by the operation, which would read behind it."""
    q, k, v = (torch.randn(2, 4, 13, 8) for _ in range(3))

    def masked(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        return rg.attention(q, k, v, score=rg.ScaledDot() >> rg.Bias(bias), mask=rg.Dense(allowed))

    allowed, bias = torch.ones(2, 1, 13, 13, dtype=torch.bool), torch.randn(2, 4, 13, 13)
    traced = TRACERS[tracer](masked, (q, k, v, allowed, bias))
    with pytest.raises(rg.ShapeError, match="allowed has shape"):
        traced(q, k, v, allowed[..., :5, :5].clone(), bias)
    with pytest.raises(rg.ShapeError, match="bias has shape"):
        traced(q, k, v, allowed, bias[..., :5, :5].clone())
