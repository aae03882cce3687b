"""Calls of a structure seen before that are differentiated: the gradients of the long way, to the last bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard import testing
from regard.backends.native.training_plan import TrainingPlan
from regard.runtime import plan_cache

pytestmark = needs_kernels

FRAMES = {
    "square": testing.frame(nq=23, nk=23, batch=(2,), heads=4),
    "no head axis": testing.frame(nq=19, nk=19, batch=(3,), heads=1, headed=False),
}


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()


def kept() -> int:
    return sum(isinstance(plan, TrainingPlan) for plan in plan_cache.plans())


def gradients(given: tuple[Tensor, ...], cotangent: Tensor | None, **how: Any) -> tuple[Tensor, ...]:
    """out, then the gradients of those of q, k and v that have one."""
    out = rg.attention(*given, **how)
    wanted = [t for t in given if t.requires_grad]
    return out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out) if cotangent is None else cotangent)


def same(given: tuple[Tensor, ...], cotangent: Tensor | None = None, **how: Any) -> None:
    """The short way, twice, and the long way."""
    right = gradients(given, cotangent, **how, backend=Unplanned())
    for _ in range(2):
        for mine, exact in zip(gradients(given, cotangent, **how), right, strict=True):
            assert torch.equal(mine, exact) and mine.dtype == exact.dtype


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape or (2, 4, 23, 16)).to(dtype).requires_grad_() for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("score", [score for score in testing.scores(FRAMES["square"]) if score != "Custom"])
@pytest.mark.parametrize("mask", testing.masks(FRAMES["square"]))
def test_every_mask_and_score(mask: str, score: str, size: str, dtype: torch.dtype) -> None:
    at = FRAMES[size]
    case = testing.draw(at, score=testing.scores(at)[score], mask=testing.masks(at)[mask]).leaves(dtype)
    fixed = case.score.with_tensors(iter([t.detach() for t in case.score.tensors()]))
    same((case.q, case.k, case.v), torch.randn_like(case.q[..., : case.v.shape[-1]]), score=fixed, mask=case.mask)


@pytest.mark.parametrize("mask", testing.masks(FRAMES["square"]))
def test_every_mask_has_a_plan(mask: str) -> None:
    same(draw(), mask=testing.masks(FRAMES["square"])[mask])
    assert kept() == 1


def test_what_is_kept() -> None:
    given = draw()
    allowed, bias, sink = torch.rand(23, 23) > 0.5, torch.randn(4, 1, 23), torch.rand(4)
    for how in (
        {},
        {"mask": rg.Causal()},
        {"mask": rg.Dense(allowed)},
        {"score": rg.ScaledDot() >> rg.Bias(bias)},
        {"sink": sink, "mask": rg.Window(3, 0)},
    ):
        before = kept()
        same(given, **how)
        assert kept() == before + 1, how
    before = kept()
    learned = torch.randn(23, 23, requires_grad=True)
    assert rg.attention(*given, score=rg.ScaledDot() >> rg.Bias(learned)).requires_grad
    shared = tuple(t.detach()[:1].requires_grad_() for t in given[1:])
    same((given[0], *shared))  # each key is read for two batch elements
    assert kept() == before
    for how in (
        {"dropout": rg.Dropout(0.1, seed=3)},
        {"mask": rg.Lengths(torch.tensor([3, 9])), "positions": rg.tail(23, 23)},
        {"positions": rg.head(23, 23), "mask": rg.Causal(), "score": rg.ScaledDot() >> rg.Alibi(torch.rand(4))},
    ):
        before = kept()
        same(given, **how)
        assert kept() == before + 1, how


@pytest.mark.parametrize("dropout", [None, rg.Dropout(0.2, seed=4)])
def test_one_plan_serves_all_lengths(dropout: rg.Dropout | None) -> None:
    for nq, nk in ((5, 9), (1, 10), (12, 12), (5, 30)):
        lengths, at = torch.tensor([nk - 1, nk]), rg.tail(nq, nk)
        given = tuple(torch.randn(2, 4, n, 8, requires_grad=True) for n in (nq, nk, nk))
        same(given, mask=rg.Lengths(lengths) & rg.Causal(), positions=at, dropout=dropout)
        given = tuple(torch.randn(2, n, 8, requires_grad=True) for n in (nq, nk, nk))
        same(given, mask=rg.Window(3, 0), positions=at, dropout=dropout)
    assert kept() == 2


def test_one_key_and_then_two() -> None:
    """A row by itself has no stride; the next call's gradients, as far apart as its own would be, have one."""
    for nq, nk in ((3, 1), (3, 2), (1, 2), (2, 2)):
        same(tuple(torch.randn(n, 8, requires_grad=True) for n in (nq, nk, nk)))
    assert kept() == 1


def test_gradients_of_gradients_drop_the_same() -> None:
    q, k, v = (torch.randn(2, 7, 4, requires_grad=True) for _ in range(3))
    found = []
    for backend in (None, rg.Tiled()):
        torch.manual_seed(2)
        out = rg.attention(q, k, v, dropout=rg.Dropout(0.4), mask=rg.Causal(), backend=backend)
        (g,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), (k, v)))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_some_need_no_gradient(needs: tuple[bool, ...]) -> None:
    for _ in range(2):
        same(tuple(t.detach().requires_grad_(need) for t, need in zip(draw(), needs, strict=True)))
    assert kept() == 1


def test_strides_groups_and_widths() -> None:
    wide = torch.randn(2, 23, 12, 16, requires_grad=True)
    q, k, v = (part.transpose(1, 2) for part in wide.split((8, 2, 2), 2))
    for cotangent in (None, torch.randn(2, 23, 8, 16).transpose(1, 2), torch.ones(1, 1, 1, 1).expand(2, 8, 23, 16)):
        cotangent = torch.ones(2, 8, 23, 16) if cotangent is None else cotangent
        out = [rg.attention(q, k, v, mask=rg.Causal(), backend=backend) for backend in (None, None, Unplanned())]
        first, second, right = (torch.autograd.grad(t, wide, cotangent, retain_graph=True)[0] for t in out)
        assert torch.equal(first, right) and torch.equal(second, right)
    assert kept() == 1
    q, k, v = draw(3, 40, 24)
    same((q, k[:, :9], v[:, :9, :5]), torch.randn(3, 5, 40).mT)
    x = draw()[0]
    mine, right = (gradients((x, x, x), None, backend=backend)[1] for backend in (None, Unplanned()))
    torch.testing.assert_close(mine, right)  # autograd adds the three in another order
    assert kept() == 3


def test_many_cotangents_of_one_forward() -> None:
    q, k, v = draw()
    out = rg.attention(q, k, v)
    one, two = (torch.autograd.grad(out, (q, k, v), g * torch.ones_like(out), retain_graph=True) for g in (1, 2))
    assert all(torch.equal(2 * a, b) for a, b in zip(one, two, strict=True))


def test_gradients_of_gradients() -> None:
    q, k, v = draw(1, 2, 7, 5)

    def twice(backend: rg.Backend | None) -> tuple[Tensor, ...]:
        out = rg.attention(q, k, v, mask=rg.Causal(), backend=backend)
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))

    for mine, right in zip(twice(None), twice(rg.Tiled()), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    assert kept() == 1


@pytest.mark.parametrize("move", [lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t.double()])
def test_hooks_may_move_what_is_saved(move: Callable[[Tensor], Tensor]) -> None:
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in draw(2, 23, 4, 16))
    right = gradients((q, k, v), None)
    with torch.autograd.graph.saved_tensors_hooks(move, lambda t: t.float()):
        for mine, exact in zip(gradients((q, k, v), None), right, strict=True):
            assert torch.equal(mine, exact)


def test_what_was_changed_in_place_is_noticed() -> None:
    q, k, v = draw()
    bias = torch.zeros(23, 23)
    for changed in (k, bias):
        out = rg.attention(q, k, v, score=rg.ScaledDot() >> rg.Bias(bias))
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def scores(learned: bool) -> dict[str, rg.Score]:
    def made(*shape: int) -> Tensor:
        return (torch.randn(shape) / 4).requires_grad_(learned)

    return {
        "additive": rg.Additive(made(16, 12), made(16, 12), made(12), made(12)),
        "projected before": rg.Additive(None, None, made(4, 16)),
        "sigmoid, of a query": rg.Additive(made(4, 16, 16), None, made(16), made(16), rg.Sigmoid()),
        "bilinear": rg.Bilinear(made(16, 16)),
        "cosine": rg.Cosine(),
    }


def answers(given: tuple[Tensor, ...], score: rg.Score, **how: Any) -> tuple[Tensor, ...]:
    """out and the gradients of all that has one."""
    out = rg.attention(*given, score=score, **how)
    wanted = [t for t in (*given, *score.tensors()) if t.requires_grad]
    return out.detach(), *torch.autograd.grad(out, wanted, torch.linspace(-1, 1, out.numel()).view(out.shape))


@pytest.mark.parametrize("nq", [1, 30])
@pytest.mark.parametrize("name", ["additive", "projected before", "sigmoid, of a query", "bilinear", "cosine"])
def test_scores_that_prepare_queries_and_keys(name: str, nq: int) -> None:
    given = tuple(torch.randn(2, 4, n, 16, requires_grad=True) for n in (nq, 30, 30))
    for how in ({}, {"mask": rg.Dense(torch.rand(nq, 30) > 0.3)}):
        for learned in (True, False):
            score = scores(learned)[name]
            right = answers(given, score, backend=Unplanned(), **how)
            before = kept()
            for _ in range(2):
                for mine, exact in zip(answers(given, score, **how), right, strict=True):
                    assert torch.equal(mine, exact)
            assert kept() == before + (learned or bool(score.tensors()))
            # other numbers in the same structure
            other = scores(learned)[name]
            for mine, exact in zip(
                answers(given, other, **how), answers(given, other, backend=Unplanned(), **how), strict=True
            ):
                assert torch.equal(mine, exact)
            assert kept() == before + (learned or bool(score.tensors()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_additive_scores_in_half_precision(dtype: torch.dtype) -> None:
    given = tuple(torch.randn(3, n, 16).to(dtype).requires_grad_() for n in (2, 30, 30))
    score = rg.Additive(
        torch.randn(16, 12, requires_grad=True), torch.randn(16, 12), torch.randn(12, requires_grad=True)
    )
    for mine, exact in zip(answers(given, score), answers(given, score, backend=Unplanned()), strict=True):
        assert torch.equal(mine, exact) and mine.dtype == exact.dtype
    assert kept() == 1
    # its w is copied on the way: each call must look
    converted = rg.Additive(None, None, torch.randn(16, dtype=dtype, requires_grad=True))
    assert rg.attention(*given, score=converted).requires_grad and kept() == 1


def test_inputs_and_parameters_are_let_go() -> None:
    given = tuple(torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3))
    score = rg.Additive(torch.randn(16, 8, requires_grad=True), torch.randn(16, 8), torch.randn(8, requires_grad=True))
    answers(given, score)
    gone = [weakref.ref(t) for t in (*given, *score.tensors())]
    del given, score
    gc.collect()
    assert kept() == 1 and all(each() is None for each in gone)


def test_a_modifier_that_learns_is_posed_each_time() -> None:
    given = tuple(torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3))
    score = rg.Additive(None, None, torch.randn(16)) >> rg.Bias(torch.randn(9, 9, requires_grad=True))
    answers(given, score)
    sink = torch.randn(4, requires_grad=True)
    (g,) = torch.autograd.grad(rg.attention(*given, sink=sink).sum(), sink)
    assert g.abs().max() > 0 and kept() == 0


def test_gradients_of_gradients_of_prepared_scores() -> None:
    given = tuple(torch.randn(2, 3, n, 5, requires_grad=True) for n in (4, 7, 7))
    score = rg.Additive(torch.randn(5, 6, requires_grad=True), torch.randn(5, 6), torch.randn(6, requires_grad=True))
    leaves = (*given, score.tensors()[0], score.tensors()[2])

    def twice(backend: rg.Backend | None) -> tuple[Tensor, ...]:
        out = rg.attention(*given, score=score, backend=backend)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for mine, right in zip(twice(None), twice(rg.Tiled()), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)
    assert kept() == 1
