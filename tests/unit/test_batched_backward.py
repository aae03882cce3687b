"""Backwards whose cotangents torch transforms (batches, torch.vmap, forward mode): each is a loop of plain ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.functional import hessian, jacobian
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
import regard.runtime.autograd
import regard.runtime.plan_cache
from needed import needs_kernels
from regard import testing
from regard.backends.base import Backend
from selection import few

SOURCE = Path(__file__).resolve().parents[2] / "src" / "regard"
AT = testing.frame((2,), 2, nq=3, nk=5)
BATCH = 4
NATIVE = pytest.param(rg.Native(), marks=needs_kernels)
BACKENDS = [None, NATIVE, rg.Tiled(rows=2, keys=3), rg.Reference()]
Tensors = tuple[Tensor, ...]
Way = Callable[[Tensors, Tensors, Tensors, bool], Any]


def looped(outputs: Tensors, inputs: Tensors, batches: Tensors, create: bool) -> Tensors:
    """The definition: one backward for each element of the batches."""
    found = [
        torch.autograd.grad(outputs, inputs, each, retain_graph=True, create_graph=create, materialize_grads=True)
        for each in zip(*batches, strict=True)
    ]
    return tuple(map(torch.stack, zip(*found, strict=True)))


def batched(outputs: Tensors, inputs: Tensors, batches: Tensors, create: bool) -> Tensors:
    found = torch.autograd.grad(
        outputs, inputs, batches, retain_graph=True, create_graph=create, is_grads_batched=True, allow_unused=True
    )
    return tuple(t.new_zeros(BATCH, *t.shape) if g is None else g for t, g in zip(inputs, found, strict=True))


def mapped(outputs: Tensors, inputs: Tensors, batches: Tensors, create: bool) -> Tensors:
    def one(each: Tensors) -> Tensors:
        return torch.autograd.grad(
            outputs, inputs, each, retain_graph=True, create_graph=create, materialize_grads=True
        )

    return torch.vmap(one)(batches)


def pushed(outputs: Tensors, inputs: Tensors, batches: Tensors, create: bool) -> Tensors:
    """The backward is linear: its tangent for a cotangent's is its value for that."""
    found: list[Tensors] = []
    for each in zip(*batches, strict=True):
        with forward_ad.dual_level():
            dual = tuple(forward_ad.make_dual(torch.ones_like(t), t) for t in each)
            grads = torch.autograd.grad(
                outputs, inputs, dual, retain_graph=True, create_graph=create, materialize_grads=True
            )
            tangents = (forward_ad.unpack_dual(t).tangent for t in grads)
            found.append(tuple(torch.zeros_like(g) if t is None else t for g, t in zip(grads, tangents, strict=True)))
    return tuple(map(torch.stack, zip(*found, strict=True)))


WAYS: dict[str, Way] = {"is_grads_batched": batched, "vmap": mapped, "forward mode": pushed}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def close(found: Tensors, expected: Tensors) -> None:
    for a, b in zip(found, expected, strict=True):
        scale = max(float(b.detach().abs().max()), 1.0) if b.numel() else 1.0
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=scale * (1e-12 if b.dtype == torch.float64 else 1e-5))


def compared(way: Way, outputs: Tensor | Tensors, inputs: Tensors, create: bool = False) -> None:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    batches = tuple(torch.randn(BATCH, *t.shape, dtype=t.dtype) for t in outputs)
    expected = looped(outputs, inputs, batches, create)
    found = way(outputs, inputs, batches, create)
    close(found, expected)
    if create:
        assert any(t.requires_grad for t in found)
        again = [
            torch.autograd.grad(sum(t.square().sum() for t in each), inputs, retain_graph=True, materialize_grads=True)
            for each in (found, expected)
        ]
        close(*again)


def case_of(score: str, mask: str, backend: Backend | None, **more: Any) -> tuple[testing.Case, Tensors]:
    single = backend is None or isinstance(backend, rg.Native)
    case = testing.draw(AT, score=testing.scores(AT)[score], mask=testing.masks(AT)[mask], sink=True, **more)
    case = case.leaves(torch.float32 if single else torch.float64)
    return case, tuple(case.differentiable.values())


def arguments(case: testing.Case) -> dict[str, Any]:
    return {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}


def run(case: testing.Case, backend: Backend | None) -> Tensor:
    return rg.attention(case.q, case.k, case.v, **arguments(case), dropout=case.dropout, backend=backend)


@pytest.mark.parametrize("backend", [None, rg.Tiled(rows=2, keys=3), rg.Reference()], ids=repr)
@pytest.mark.parametrize("score", few(testing.scores(AT), "Pipeline", "Additive", "RelativeBias", "Bilinear"))
def test_every_score_that_learns(way: Way, score: str, backend: Backend | None) -> None:
    case, inputs = case_of(score, "Causal", backend)
    compared(way, run(case, backend), inputs)


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("score", ["Additive", "Bias", "RelativeBias"])
def test_gradients_that_are_differentiated_again(way: Way, score: str, backend: Backend | None) -> None:
    case, inputs = case_of(score, "Or", backend)
    compared(way, run(case, backend), inputs, create=True)


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("mask", few(testing.masks(AT), "Documents", "Dense", "Or", "nothing", "Where"))
def test_every_mask(way: Way, mask: str, backend: Backend | None) -> None:
    case, inputs = case_of("Bias", mask, backend)
    compared(way, run(case, backend), inputs)
    compared(way, run(replace(case, dropout=rg.Dropout(0.4, seed=7)), backend), inputs)


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
def test_a_call_whose_plan_is_remembered(way: Way, backend: Backend | None) -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    for _ in range(3):
        compared(way, rg.attention(q, k, v, mask=rg.Causal(), backend=backend), (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("create", [False, True], ids=["once", "create_graph"])
def test_states(way: Way, create: bool, backend: Backend | None) -> None:
    case, inputs = case_of("Pipeline" if backend else "Alibi", "Or", backend)
    state = rg.attention_state(case.q, case.k, case.v, **arguments(case), backend=backend)
    compared(way, (state.l, state.o), inputs, create)
    compared(way, state.l, inputs, create)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "weights": rg.attention_weights,
    "weights of rows": lambda *given, **more: rg.attention_weights(*given, rows=[2, 0], **more),
    "scores": lambda *given, sink, **more: rg.attention_scores(*given, **more).masked_fill(~SEEN, 0),
    "entropy": rg.entropy,
    "max_score": rg.max_score,
}
SEEN = torch.ones(3, 5, dtype=torch.bool).tril(2)  # causal, the queries last


@pytest.mark.parametrize("create", [False, True], ids=["once", "create_graph"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_written_out_and_facts_of_a_loss(way: Way, create: bool, name: str) -> None:
    case, (q, k, _, *rest) = case_of("Bias", "Causal", rg.Tiled())
    out = FUNCTIONS[name](case.q, case.k, **arguments(case))
    compared(way, out, (q, k, *rest), create)


def test_attention_over_parts(way: Way) -> None:
    q, k, v = (torch.randn(2, 3, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    parts = [(k[..., :3, :], v[..., :3, :]), (k[..., 3:, :], v[..., 3:, :])]
    compared(way, rg.attention_over(q, parts, mask=rg.Causal()), (q, k, v))


def test_hidden_values_that_are_not_finite(way: Way) -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    poisoned = v.detach().index_fill(-2, torch.tensor([4]), torch.nan).requires_grad_()
    hidden = rg.Lengths(keys=[4, 4])
    for backend in (None, rg.Tiled(), rg.Reference()):
        out = rg.attention(q, k, poisoned, mask=hidden, backend=backend)
        compared(way, out, (q, k, poisoned))


@pytest.mark.parametrize("backend", BACKENDS[:3], ids=repr)
def test_in_the_memory_of_one_backward(way: Way, backend: Backend | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by recorded operations, which keep every score."""

    def recorded(*_: Any) -> Tensors:
        raise AssertionError("the backward is recorded")

    for module in (regard.runtime.autograd, regard.runtime.plan_cache):
        monkeypatch.setattr(module, "differentiable_backward", recorded)
    case, inputs = case_of("Alibi", "Causal", backend)
    compared(way, run(case, backend), inputs)


@needs_kernels
def test_under_a_mode_that_sees_the_kernels_as_operators(way: Way) -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False):
        compared(way, rg.attention(q, k, v, mask=rg.Causal(), backend=rg.Native()), (q, k, v))


def test_patched_functions_of_torch(way: Way) -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8, requires_grad=True)
    with rg.patch():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        compared(way, out, (q, k, v))
        compared(way, layer(x, x, x, need_weights=True), (x, *layer.parameters()))


def test_nested_batches() -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    for backend in (None, rg.Tiled()):
        out = rg.attention(q, k, v, backend=backend)
        cotangents = torch.randn(2, 3, *out.shape)
        expected = looped((out,), (q, k, v), (cotangents.flatten(0, 1),), False)

        def batch(each: Tensor, out: Tensor = out) -> Tensors:
            return batched((out,), (q, k, v), (each,), False)

        def plain(each: Tensor, out: Tensor = out) -> Tensors:
            return torch.autograd.grad(out, (q, k, v), each, retain_graph=True)

        for nested in (torch._vmap_internals._vmap(batch), torch.vmap(torch.vmap(plain))):
            close(tuple(t.flatten(0, 1) for t in nested(cotangents)), expected)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # torch's own
def test_vectorized_jacobian_and_hessian(strategy: str, backend: Backend | None) -> None:
    given = tuple(torch.randn(1, 3, 2) for _ in range(3))

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rg.attention(q, k, v, mask=rg.Causal(), backend=backend)

    def loss(*each: Tensor) -> Tensor:
        return f(*each).sin().sum()

    close(jacobian(f, given, vectorize=True, strategy=strategy), jacobian(f, given))
    rows = hessian(loss, given, vectorize=True, outer_jacobian_strategy=strategy)
    for found, expected in zip(rows, hessian(loss, given), strict=True):
        close(found, expected)


@pytest.mark.parametrize("backend", [rg.Tiled(rows=2, keys=3), rg.Reference()], ids=repr)
def test_gradcheck_with_batches_and_every_mode(backend: Backend) -> None:
    q, k, v = (torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def f(*given: Tensor) -> Tensor:
        return rg.attention(*given, mask=rg.Causal(), backend=backend)

    every = {"check_batched_grad": True, "fast_mode": True}
    assert gradcheck(f, (q, k, v), **every, check_forward_ad=True, check_batched_forward_grad=True)
    assert gradgradcheck(f, (q, k, v), **every, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_recomputed_by_a_checkpoint() -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    out = checkpoint(lambda *given: rg.attention(*given, mask=rg.Causal()), q, k, v, use_reentrant=False)
    compared(batched, out, (q, k, v))


def functions_of_autograd() -> Iterator[tuple[str, str]]:
    """The name and the text of each class in src that is a node of autograd with a backward of its own."""
    for path in sorted(SOURCE.rglob("*.py")):
        for text in re.split(r"\n(?=class |def |@)", path.read_text()):
            found = re.match(r"class (\w+)\((?:torch\.autograd\.)?Function\)", text)
            if found:
                yield found[1], text
    yield "regard::forward", (SOURCE / "backends/native/torch_ops.py").read_text()


WITHOUT = {
    "_Linear": "it is what the others call; its backward does not exist",
    "_Between": "its backward asks autograd alone, whose nodes answer for themselves",
}


FUNCTIONS_OF_AUTOGRAD = dict(functions_of_autograd())


@pytest.mark.parametrize("name", FUNCTIONS_OF_AUTOGRAD)
def test_every_function_of_autograd_takes_transformed_cotangents(name: str) -> None:
    takes = "linear_in(" in FUNCTIONS_OF_AUTOGRAD[name]
    assert takes != (name in WITHOUT), f"the backward of {name} must call core.cotangents.linear_in"


def test_every_function_is_found() -> None:
    found = FUNCTIONS_OF_AUTOGRAD.keys()
    assert {"Attention", "RingAttention", *WITHOUT} <= found
    assert len(found) == sum(path.read_text().count("autograd.Function)") for path in SOURCE.rglob("*.py")) + 1
