"""Plans of calls with a sum over features: other tensors, lengths and numbers give the bits of the general way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard.core.region import Region
from regard.runtime import plan_cache

pytestmark = needs_kernels

LENGTHS = [(1, 3), (1, 4), (2, 64), (3, 7), (9, 4), (40, 64), (7, 7)]


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()


def both(nq: int, nk: int, score: rg.Score, **given: Any) -> Tensor:
    """The output of random tensors, which must be that of the general way."""
    q, k, v = (torch.randn(2, h, n, 16) for h, n in ((4, nq), (2, nk), (2, nk)))
    with torch.no_grad():
        found = rg.attention(q, k, v, score=score, **given)
        general = rg.attention(q, k, v, score=score, **given, backend=Unplanned())
        assert torch.equal(found, general)
        right = rg.attention(*(t.double() for t in (q, k, v)), score=score, **given, backend=rg.Reference())
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)
    return found


def gaussian(q: Tensor, k: Tensor, width: Tensor, scale: Tensor) -> Tensor:
    return -scale.exp() * ((q - k) / (1 + width.square())) ** 2 / 8


@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal(), rg.Window(5, 0)], ids=repr)
def test_lengths_and_tensors_are_those_of_the_call(mask: rg.Mask) -> None:
    for nq, nk in LENGTHS:
        score = rg.Elementwise(gaussian, (torch.randn(16), torch.randn(4, 1)))
        both(nq, nk, score, mask=mask, positions=rg.tail(nq, nk))
    assert len(plan_cache.plans()) == 1


def test_tensors_of_other_shapes_have_a_plan_of_their_own() -> None:
    for shapes in (((16,), (4, 1)), ((4, 16), (4, 1)), ((16,), ())):
        both(2, 9, rg.Elementwise(gaussian, tuple(torch.randn(shape) for shape in shapes)))
    assert len(plan_cache.plans()) == 3


def test_steps_after_it_are_part_of_the_plan() -> None:
    for cap in (3.0, 5.0):
        for _ in range(2):
            both(2, 9, rg.Elementwise(lambda q, k: -(q - k).abs()) >> rg.SoftCap(cap))


def test_a_number_that_the_function_reads_is_that_of_the_call() -> None:
    numbers = [1.0]

    def reads_a_list(q: Tensor, k: Tensor) -> Tensor:
        return -numbers[0] * (q - k).abs()

    def times(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda q, k: -factor * (q - k).abs()

    for factor in (1.0, 1.0, 2.0, 0.5, 1.0):
        numbers[0] = factor
        both(1, 9, rg.Elementwise(times(factor)))
        both(1, 9, rg.Elementwise(reads_a_list))


def test_a_tensor_that_the_function_holds_has_its_numbers_of_the_call() -> None:
    width = torch.ones(16)
    score = rg.Elementwise(lambda q, k: -(q - k).abs() * (width if q.shape[-1] == 16 else width[: q.shape[-1]]))
    for n in range(3):
        width.fill_(n + 1)
        both(1, 9, score)


def test_a_plan_holds_no_tensors_of_a_call() -> None:
    w = torch.randn(16)
    alive = StorageWeakRef(w.untyped_storage())
    both(2, 9, rg.Elementwise(lambda q, k, w: q * k * w, (w,)))
    assert plan_cache.plans()
    del w
    gc.collect()
    assert alive.expired()


def test_a_call_with_gradients_beside_a_plan() -> None:
    w = torch.randn(16, requires_grad=True)
    score = rg.Elementwise(lambda q, k, w: -(q - k).abs() * w.exp() / 4, (w,))
    both(2, 9, score)
    q, k, v = (torch.randn(2, 4, n, 16) for n in (2, 9, 9))
    (found,) = torch.autograd.grad(rg.attention(q, k, v, score=score).square().sum(), w)
    (right,) = torch.autograd.grad(rg.attention(q, k, v, score=score, backend=rg.Reference()).square().sum(), w)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def gradients(q: Tensor, k: Tensor, v: Tensor, score: rg.Score, learned: list[Tensor], **given: Any) -> list[Tensor]:
    """Those of a call, of its tensors that have any, by a cotangent that follows from its output."""
    return list(torch.autograd.grad(rg.attention(q, k, v, score=score, **given).sin().sum(), learned))


@pytest.mark.parametrize("modified", [False, True])
def test_gradients_of_other_calls_are_those_of_the_general_way(modified: bool) -> None:
    for nq, nk in LENGTHS:
        width, scale, slope = (torch.randn(*shape, requires_grad=True) for shape in ((16,), (4, 1), (4,)))
        score: rg.Score = rg.Elementwise(gaussian, (width, scale))
        if modified:
            score = score >> Gate(slope)
        q, k, v = (torch.randn(2, h, n, 16, requires_grad=True) for h, n in ((4, nq), (2, nk), (2, nk)))
        learned = [q, k, v, width, scale, *([slope] if modified else [])]
        given = {"mask": rg.Causal(), "positions": rg.tail(nq, nk)}
        found = gradients(q, k, v, score, learned, **given)
        general = gradients(q, k, v, score, learned, **given, backend=Unplanned())
        assert all(torch.equal(x, y) for x, y in zip(found, general, strict=True))
        wide = [t.detach().double().requires_grad_() for t in learned]
        exact: rg.Score = rg.Elementwise(gaussian, (wide[3], wide[4]))
        exact = exact >> Gate(wide[5]) if modified else exact
        right = gradients(*wide[:3], exact, wide, **given, backend=rg.Reference())
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)
    # the program of a modifier belongs to one query or several, and to as many queries as keys or not
    structures = {(min(nq, 2), nq == nk) for nq, nk in LENGTHS} if modified else {()}
    assert len(plan_cache.plans()) == len(structures)


@dataclass(frozen=True, eq=False)
class Gate(rg.Modifier):
    """A modifier of one's own, so that two programs run: over features, and for pairs."""

    slope: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * torch.sigmoid(s + at.heads(self.slope))


@pytest.mark.parametrize("which", [(3,), (4,), (0, 4), (1,), (2, 3)], ids=str)
def test_only_the_gradients_that_are_wanted(which: tuple[int, ...]) -> None:
    tensors = [*(torch.randn(2, 4, n, 16) for n in (5, 9, 9)), torch.randn(16), torch.randn(4, 1)]
    for n in which:
        tensors[n].requires_grad_()
    learned = [tensors[n] for n in which]
    for _ in range(2):
        score = rg.Elementwise(gaussian, tuple(tensors[3:]))
        found = gradients(*tensors[:3], score, learned)
        right = gradients(*tensors[:3], score, learned, backend=rg.Reference())
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert len(plan_cache.plans()) == 1


def test_a_width_that_changed_before_the_backward_is_refused() -> None:
    width, scale = torch.randn(16), torch.randn(4, 1)
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (5, 9, 9))
    for changed in (False, False, True):
        out = rg.attention(q, k, v, score=rg.Elementwise(gaussian, (width, scale)))
        if changed:
            width.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()


def test_a_number_that_the_function_reads_is_that_of_the_training_call() -> None:
    numbers = [1.0]
    score = rg.Elementwise(lambda q, k: -numbers[0] * (q - k).abs() / 4)
    for factor in (1.0, 1.0, 2.0, 0.5):
        numbers[0] = factor
        q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (2, 9, 9))
        found, right = (gradients(q, k, v, score, [q, k, v], **given) for given in ({}, {"backend": rg.Reference()}))
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
