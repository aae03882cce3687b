"""Plans of calls with a Custom that is a function of a dot product: the bits of the general way, and its gradients."""

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

LENGTHS = [(1, 3), (1, 40), (2, 64), (3, 7), (9, 4), (40, 64), (7, 7), (70, 70)]
THIRD = rg.Where(lambda b, h, i, j: (i + j) % 3 != 0)
STRUCTURES = {(min(nq, 2), nq == nk) for nq, nk in LENGTHS}  # what a program of pairs belongs to


@dataclass(frozen=True, eq=False)
class Near(rg.Modifier):
    slope: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s - at.heads(self.slope) * (at.i - at.j).abs().clamp(max=8)


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()


def by_head(q: Tensor, k: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(0.5 * q @ k.mT * w[:, None, None]) * 3 + b


def made(nq: int, nk: int, **given: Any) -> list[Tensor]:
    return [torch.randn(2, h, n, 16, **given) for h, n in ((4, nq), (2, nk), (2, nk))]


def both(given: list[Tensor], score: rg.Score, **options: Any) -> Tensor:
    """The output, which must be that of the general way."""
    with torch.no_grad():
        found = rg.attention(*given, score=score, **options)
        general = rg.attention(*given, score=score, **options, backend=Unplanned())
        assert torch.equal(found, general)
        right = rg.attention(*(t.double() for t in given), score=score, **options, backend=rg.Reference())
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)
    return found


@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal(), THIRD], ids=repr)
def test_lengths_and_tensors_are_those_of_the_call(mask: rg.Mask) -> None:
    for nq, nk in LENGTHS:
        score = rg.Custom(by_head, (torch.rand(4), torch.rand(1)))
        both(made(nq, nk), score, mask=mask, positions=rg.tail(nq, nk))
    assert len(plan_cache.plans()) == len(STRUCTURES)


@pytest.mark.parametrize("modified", [False, True])
def test_gradients_of_other_calls(modified: bool) -> None:
    for nq, nk in LENGTHS:
        learned = [*made(nq, nk), torch.rand(4), torch.rand(1), torch.rand(4)]
        q, k, v, w, b, slope = (t.requires_grad_() for t in learned)
        score: rg.Score = rg.Custom(by_head, (w, b))
        leaves = [q, k, v, w]
        if modified:
            score, leaves = score >> Near(slope), [*leaves, slope]
        given = {"mask": rg.Causal(), "positions": rg.tail(nq, nk)}
        found, general, right = (
            torch.autograd.grad(rg.attention(q, k, v, score=score, **given, **how).sin().sum(), leaves)
            for how in ({}, {"backend": Unplanned()}, {"backend": rg.Reference()})
        )
        for mine, same, expected in zip(found, general, right, strict=True):
            assert torch.equal(mine, same)
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)
    assert len(plan_cache.plans()) == len(STRUCTURES)


def test_a_number_that_the_function_reads_is_that_of_the_call() -> None:
    numbers = [1.0]

    def reads_a_list(q: Tensor, k: Tensor) -> Tensor:
        return numbers[0] * torch.tanh(q @ k.mT)

    def times(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda q, k: factor * torch.tanh(q @ k.mT)

    for factor in (1.0, 1.0, 2.0, 0.5, 1.0):
        numbers[0] = factor
        for score in (rg.Custom(times(factor)), rg.Custom(reads_a_list)):
            both(made(3, 9), score)
            q, k, v = made(3, 9, requires_grad=True)
            found, right = (
                torch.autograd.grad(rg.attention(q, k, v, score=score, **how).sin().sum(), (q, k, v))
                for how in ({}, {"backend": rg.Reference()})
            )
            for mine, expected in zip(found, right, strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)


def test_a_tensor_that_the_function_holds_has_its_numbers_of_the_call() -> None:
    width = torch.ones(())
    score = rg.Custom(lambda q, k: torch.tanh(q @ k.mT * width))
    for n in range(3):
        width.fill_(n + 1)
        both(made(1, 9), score)


def test_functions_of_one_text_with_other_names_around_them() -> None:
    """Two that look alike read their own variables."""

    def of(sign: int, other: Callable[[Tensor], Tensor]) -> rg.Custom:
        return rg.Custom(lambda q, k: sign * other(q @ k.mT))

    for sign, other in ((1, torch.tanh), (-1, torch.tanh), (1, torch.sigmoid), (1, torch.tanh)):
        both(made(2, 9), of(sign, other))


def test_one_that_is_no_product_for_some_widths_alone() -> None:
    """What a function was found to compute holds for its widths, heads and tensors."""

    def fn(q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(q @ k.mT) if q.shape[-1] == 16 else -torch.cdist(q, k)

    for width in (16, 8, 16):
        q, k, v = (torch.randn(2, 4, n, width) for n in (5, 9, 9))
        found = rg.attention(q, k, v, score=rg.Custom(fn))
        right = rg.attention(q, k, v, score=rg.Custom(fn), backend=rg.Reference())
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_one_that_looks_at_the_numbers_of_a_tensor() -> None:
    def fn(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(q @ k.mT) if w.sum() > 0 else -torch.cdist(q, k)

    for w in (1.0, -1.0, 1.0):
        q, k, v = (torch.randn(2, 4, n, 16) for n in (5, 9, 9))
        score = rg.Custom(fn, (torch.full((3,), w),))
        found, right = rg.attention(q, k, v, score=score), rg.attention(q, k, v, score=score, backend=rg.Reference())
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_rows_that_the_function_makes_have_no_plan() -> None:
    gate = torch.rand(16)
    for _ in range(2):
        both(made(3, 9), rg.Custom(lambda q, k, w: torch.tanh((q * w) @ k.mT), (gate,)))
    assert not plan_cache.plans()


def test_a_plan_holds_no_tensors_of_a_call() -> None:
    w = torch.rand(4)
    alive = StorageWeakRef(w.untyped_storage())
    both(made(2, 9), rg.Custom(by_head, (w, torch.rand(1))))
    assert plan_cache.plans()
    del w
    gc.collect()
    assert alive.expired()
