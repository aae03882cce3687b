"""Plans of calls with a sum over features: other tensors, lengths and numbers give the bits of the general way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
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
