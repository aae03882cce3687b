"""Derivatives by every road that torch has, and what happens to inputs on the way."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import regard as rg
from regard import testing
from regard.backends.base import Backend

BACKENDS = [rg.Tiled(rows=2, keys=3), rg.Reference()]
SMALL = testing.frame((2,), 2, nq=3, nk=5)
F64 = torch.float64

pytestmark = pytest.mark.parametrize("backend", BACKENDS, ids=repr)


def run(case: testing.Case, backend: Backend) -> Tensor:
    given = {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}
    return rg.attention(case.q, case.k, case.v, dropout=case.dropout, backend=backend, **given)


def tensors(score: str = "Pipeline", mask: str = "Or") -> tuple[testing.Case, tuple[Tensor, ...]]:
    """A small case, and every tensor of it that has a derivative."""
    case = testing.draw(SMALL, dk=3, dv=2, score=testing.scores(SMALL, 3)[score], mask=testing.masks(SMALL)[mask])
    case = replace(case, sink=torch.randn(2, dtype=F64)).leaves(F64)
    return case, tuple(case.differentiable.values())


def function(case: testing.Case, backend: Backend) -> Callable[..., Tensor]:
    """The case as a function of its tensors, in the order of `differentiable`."""

    def call(*given: Tensor) -> Tensor:
        q, k, v, *rest = given
        score = case.score.with_tensors(iter(rest[:-1]))
        return run(replace(case, q=q, k=k, v=v, score=score, sink=rest[-1]), backend)

    return call


DERIVATIVES: dict[str, Callable[..., bool]] = {
    "first": gradcheck,
    "second": gradgradcheck,
    "forward": partial(gradcheck, check_forward_ad=True, check_backward_ad=False),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("score", [s for s in testing.scores(SMALL, 3) if s != "Dot"])
def test_first_second_and_forward_derivatives(backend: Backend, score: str, derivative: str) -> None:
    case, given = tensors(score)
    assert DERIVATIVES[derivative](function(case, backend), given, fast_mode=True)


def test_second_derivatives_of_the_lse_alone(backend: Backend) -> None:
    case, _ = tensors()

    def f(q: Tensor, k: Tensor) -> Tensor:
        return rg.attention_state(q, k, case.v.detach(), backend=backend).finish()[1]

    assert gradgradcheck(f, (case.q, case.k), fast_mode=True)


def test_second_derivative_where_only_the_value_needs_one(backend: Backend) -> None:
    case, _ = tensors()
    out = rg.attention(case.q.detach(), case.k.detach(), case.v, backend=backend)
    g = torch.autograd.grad(out.square().sum(), case.v, create_graph=True)[0]
    h = torch.autograd.grad(g.square().sum(), case.v)[0]
    assert h.isfinite().all() and (h != 0).any()


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)))
def test_every_subset_of_inputs(backend: Backend, needs: tuple[bool, ...]) -> None:
    case, given = tensors("Bias")
    whole = torch.autograd.grad(run(case, backend).sin().sum(), given)
    some = tuple(t.detach().requires_grad_(need) for t, need in zip(given, (*needs, False), strict=True))
    out = function(case, backend)(*some).sin().sum()
    assert out.requires_grad == any(needs)
    if not any(needs):
        return
    wanted = [t for t in some if t.requires_grad]
    expected = [g for g, need in zip(whole, needs, strict=False) if need]
    for a, b in zip(torch.autograd.grad(out, wanted), expected, strict=True):
        assert testing.error(a, b) < 1e-15


def test_only_the_sink_needs_a_gradient(backend: Backend) -> None:
    case, given = tensors()
    whole = torch.autograd.grad(run(case, backend).sin().sum(), given)[-1]
    sink = case.sink
    alone = function(case, backend)(*(t.detach() for t in given[:-1]), sink).sin().sum()
    assert testing.error(torch.autograd.grad(alone, sink)[0], whole) < 1e-15


@pytest.mark.parametrize("kind", ["expanded", "transposed", "gaps"])
def test_cotangents_of_any_strides(backend: Backend, kind: str) -> None:
    case, given = tensors()
    out = run(case, backend)
    cotangent = {
        "expanded": torch.randn(2, 1, 1, 2, dtype=F64).expand_as(out),
        "transposed": torch.randn(2, 2, 2, 3, dtype=F64).mT,
        "gaps": torch.randn(2, 2, 3, 4, dtype=F64)[..., ::2],
    }[kind]
    a = torch.autograd.grad(out, given, cotangent, retain_graph=True)
    b = torch.autograd.grad(out, given, cotangent.contiguous())
    assert all(testing.error(x, y) < 1e-15 for x, y in zip(a, b, strict=True))


def test_backward_twice(backend: Backend) -> None:
    case, given = tensors()
    out = run(case, backend).sum()
    a, b = torch.autograd.grad(out, given, retain_graph=True), torch.autograd.grad(out, given)
    assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "mask"])
def test_an_input_changed_before_backward_is_noticed(backend: Backend, which: str) -> None:
    case, _ = tensors("Bias")
    allowed = torch.rand(2, 2, 3, 5) < 0.8
    case = replace(case, mask=rg.Dense(allowed))
    bias = case.score.tensors()[0]
    changed = {"q": case.q, "k": case.k, "v": case.v, "bias": bias, "mask": allowed}[which]
    want = torch.autograd.grad(run(case, backend).sum(), case.v)[0]
    out = run(case, backend)
    with torch.no_grad():
        changed.logical_not_() if changed.dtype == torch.bool else changed.add_(1)
    if isinstance(backend, rg.Reference) and which in ("q", "bias"):  # it works on a copy of these
        assert torch.equal(torch.autograd.grad(out.sum(), case.v)[0], want)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_without_gradients(backend: Backend) -> None:
    case, _ = tensors()
    expected = run(case, backend)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = run(case, backend)
            assert torch.equal(out, expected) and not out.requires_grad
            assert rg.attention_weights(case.q, case.k, score=case.score, positions=case.positions).shape[-1] == 5


def test_inference_tensors_come_out_of_inference_mode(backend: Backend) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 4)
    assert rg.attention(x, x, x, backend=backend).shape == (3, 4)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap(backend: Backend, axis: int) -> None:
    case, given = tensors()
    f = function(case, backend)
    many = tuple(torch.stack([t.detach(), t.detach() * 1.5, -t.detach()], axis if t.dim() > 1 else 0) for t in given)
    axes = tuple(axis if t.dim() > 1 else 0 for t in given)
    got = torch.func.vmap(f, axes)(*many)
    want = torch.stack([f(*(t.select(a, n) for t, a in zip(many, axes, strict=True))) for n in range(3)])
    assert testing.error(got, want) < 1e-14


def test_vmap_over_a_mask(backend: Backend) -> None:
    q, allowed = torch.randn(3, 4, dtype=F64), torch.rand(7, 3, 3) < 0.7
    got = torch.func.vmap(lambda a: rg.attention(q, q, q, mask=rg.Dense(a), backend=backend))(allowed)
    want = torch.stack([rg.attention(q, q, q, mask=rg.Dense(a), backend=backend) for a in allowed])
    assert testing.error(got, want) < 1e-14


def test_torch_func(backend: Backend) -> None:
    case, given = tensors()
    f = function(case, backend)
    detached = tuple(t.detach() for t in given)
    every = tuple(range(len(given)))
    want = torch.autograd.grad(f(*given).sin().sum(), given)
    got = torch.func.grad(lambda *t: f(*t).sin().sum(), every)(*detached)
    assert all(testing.error(a, b) < 1e-14 for a, b in zip(got, want, strict=True))
    cotangent = torch.randn(2, 2, 3, 2, dtype=F64)
    tangents = tuple(torch.randn_like(t) for t in detached)
    out, pull = torch.func.vjp(f, *detached)
    _, push = torch.func.jvp(f, detached, tangents)
    pulled = sum((g * t).sum() for g, t in zip(pull(cotangent), tangents, strict=True))
    assert testing.error(pulled, (push * cotangent).sum()) < 1e-13
    assert testing.error(out, f(*detached)) < 1e-14
    hessian = torch.func.hessian(lambda v: f(*detached[:2], v, *detached[3:]).square().sum())(detached[2])
    assert testing.error(hessian, hessian.permute(4, 5, 6, 7, 0, 1, 2, 3)) < 1e-13


def test_forward_mode_by_dual_numbers(backend: Backend) -> None:
    case, _ = tensors()
    with warnings.catch_warnings(), forward_ad.dual_level():
        dual = forward_ad.make_dual(case.q.detach(), torch.ones_like(case.q))
        tangent = forward_ad.unpack_dual(run(replace(case, q=dual), backend)).tangent
    _, push = torch.func.jvp(lambda q: run(replace(case, q=q), backend), (case.q.detach(),), (torch.ones_like(case.q),))
    assert testing.error(tangent, push) < 1e-15 and (push != 0).any()


@pytest.mark.parametrize("drop", [rg.Dropout(0.5), rg.Dropout(0.5, seed=3)])
def test_checkpointing_drops_the_same_again(backend: Backend, drop: rg.Dropout) -> None:
    case, given = tensors()
    case = replace(case, dropout=drop)
    found = []
    for keep in (True, False):
        torch.manual_seed(3)
        out = checkpoint(run, case, backend, use_reentrant=False) if keep else run(case, backend)
        found.append(torch.autograd.grad(out.sin().sum(), given))
    assert all(map(torch.equal, *found))


def test_inputs_are_never_written_and_outputs_share_no_memory(backend: Backend) -> None:
    case, given = tensors()
    before = [(t._version, t.detach().clone(), t.data_ptr()) for t in given]
    out = run(case, backend)
    grads = torch.autograd.grad(out.sum(), given)
    weights = rg.attention_weights(case.q, case.k, score=case.score, positions=case.positions)
    for t, (version, content, _) in zip(given, before, strict=True):
        assert t._version == version and torch.equal(t, content)
    made = {t.untyped_storage().data_ptr() for t in (out, weights, *grads)}
    assert not made & {t.untyped_storage().data_ptr() for t in given} and len(made) == 2 + len(grads)


@pytest.mark.parametrize("n", [1, 3])
def test_one_key_s_output_is_no_view_of_its_value(backend: Backend, n: int) -> None:
    x = torch.randn(n, 4)
    assert rg.attention(x, x, x, backend=backend).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_many_threads(backend: Backend) -> None:
    case, given = tensors()

    def work(_: int) -> list[Tensor]:
        out = run(case, backend)
        return [out, *torch.autograd.grad(out.sum(), given)]

    want = work(0)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(work, range(24)):
            assert all(map(torch.equal, got, want))


def test_a_state_is_freed_with_its_last_reference(backend: Backend) -> None:
    """What a Function keeps on itself of its own outputs is a cycle, which reference counting does not free."""
    case, _ = tensors()
    gc.collect()
    gc.disable()
    try:
        state = rg.attention_state(case.q, case.k, case.v, positions=case.positions, backend=backend)
        held = [weakref.ref(t) for t in (state.m, state.l, state.o)]
        del state
        assert all(one() is None for one in held)
    finally:
        gc.enable()
