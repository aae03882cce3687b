"""Gradients of float16 and float32 calls of many queries, whose numbers are sums of bfloat16 on a matrix unit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.core.value import Value
from test_native_parts import DISTRIBUTIONS, DTYPES, ODD_NUMBERS

pytestmark = needs_kernels

Tensors = tuple[Tensor, ...]


def gradients(tensors: Tensors, g: Tensor, backend: rg.Backend | None = None, **call: object) -> Tensors:
    """Of q, k, v and what follows them in `tensors`, a dense bias."""
    leaves = tuple(t.detach().requires_grad_() for t in tensors)
    score = {"score": rg.ScaledDot() >> rg.Bias(leaves[3])} if len(leaves) > 3 else {}
    return torch.autograd.grad(rg.attention(*leaves[:3], backend=backend, **score, **call), leaves, g)


@dataclass(frozen=True)
class Given(Value):
    """What gradients are computed of."""

    leaves: Tensors
    cotangent: Tensor
    mask: rg.Mask = rg.Everything()
    positions: rg.Positions | None = None
    dropout: rg.Dropout | None = None

    def by_reference(self, dtype: torch.dtype) -> Tensors:
        leaves, call = tuple(t.to(dtype) for t in self.leaves), {"mask": self.mask, "positions": self.positions}
        return gradients(leaves, self.cotangent.to(dtype), rg.Reference(), dropout=self.dropout, **call)


def exact_and_plain(tensors: Tensors, g: Tensor, **call: object) -> tuple[Tensors, Tensors]:
    """By the reference, in float64 and in the dtype of the tensors."""
    return _exact_and_plain(Given(tuple(t.clone() for t in tensors), g.clone(), **call))


@lru_cache(maxsize=16)
def _exact_and_plain(given: Given) -> tuple[Tensors, Tensors]:
    """Once for all instruction sets, and for all numbers that hide what is compared of them."""
    return given.by_reference(torch.float64), given.by_reference(given.cotangent.dtype)


@pytest.mark.parametrize("size", [(256, 640, 64), (300, 384, 128)])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_gradients_of_parts_are_those_of_float32(isa: str, distribution: str, size: tuple[int, int, int]) -> None:
    """No larger error than four times that of PyTorch's own products in float32: of the weights' gradients, the mean
    that is subtracted comes from the rounded output here. Other instructions round each sum of two numbers, too."""
    tensors = DISTRIBUTIONS[distribution](*size)
    g = torch.randn_like(tensors[0])
    exact, plain = exact_and_plain(tensors, g)
    times = 4 if isa == "amx" else 8
    for got, right, usual in zip(gradients(tensors, g), exact, plain, strict=True):
        ulp = torch.finfo(torch.float32).eps * right.abs().max()
        assert (got - right).abs().max() <= times * ((usual - right).abs().max() + ulp)


@pytest.mark.parametrize("number", [*ODD_NUMBERS, 1e13, 1e-25])
@pytest.mark.parametrize("which", ["q", "k", "v", "g"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_no_sum_of_parts(isa: str, dtype: torch.dtype, which: str, number: float) -> None:
    """Vectors multiply where an operand has one. The gradients of other queries, and all where the number is small, are
    as exact as ever."""
    nq, nk, eps = 260, 360, torch.finfo(dtype).eps
    q, k, v, g = (torch.randn(2, n, 64).to(dtype) for n in (nq, nk, nk, nq))
    call: dict[str, object] = {"mask": rg.Causal(), "positions": rg.tail(nq, nk)}
    place = {"q": q[0, 200, :1], "k": k[0, 300, :1], "v": v[0, 300, :1], "g": g[0, 200, :1]}[which]
    small = abs(number) < 1
    place.fill_(number if small else 0)
    exact, plain = exact_and_plain((q, k, v), g, **call)
    place.fill_(number)
    got = gradients((q, k, v), g, **call)
    if not small:
        got, exact, plain = ((of[0][:, :200],) for of in (got, exact, plain))
    for out, right, usual in zip(got, exact, plain, strict=True):
        assert (out - right).abs().max() <= 4 * (usual - right).abs().max() + 16 * eps * right.abs().max()


SIZES = {  # nq, nk, dk, dv, heads, heads of keys
    "several tiles": (290, 600, 64, 64, 2, 2),
    "odd widths": (257, 300, 33, 20, 2, 1),
    "wide": (256, 256, 128, 128, 1, 1),
}


def drawn(size: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a cotangent."""
    nq, nk, dk, dv, heads, key_heads = SIZES[size]
    shapes = ((2, heads, nq, dk), (2, key_heads, nk, dk), (2, key_heads, nk, dv), (2, heads, nq, dv))
    q, k, v, g = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v, g


def check(tensors: Tensors, g: Tensor, **call: object) -> None:
    exact, plain = exact_and_plain(tensors, g, **call)
    for got, right, usual in zip(gradients(tensors, g, **call), exact, plain, strict=True):
        assert testing.error(got, right) <= testing.tolerance(right, usual)


MASKS: dict[str, rg.Mask] = {
    "everything": rg.Everything(),
    "causal": rg.Causal(),
    "window": rg.Window(100, 20),
    "lengths": rg.Lengths(keys=torch.tensor([250, 130])),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_whose_edges_cut_tiles(isa: str, dtype: torch.dtype, size: str, mask: str) -> None:
    """Of a tile that an edge cuts, what every query of a block sees is streamed, the rest takes all steps."""
    *tensors, g = drawn(size, dtype)
    nq, nk = SIZES[size][:2]
    check(tuple(tensors), g, mask=MASKS[mask], positions=rg.tail(nq, nk))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_and_a_bias(isa: str, dtype: torch.dtype) -> None:
    """The bias has its gradient from the products' gradients of scores, which dropout scales."""
    *tensors, g = drawn("several tiles", dtype)
    bias = torch.randn(2, 290, 600).to(dtype)
    check((*tensors, bias), g, mask=rg.Causal(), positions=rg.tail(290, 600), dropout=rg.Dropout(0.3, seed=5))


@pytest.mark.parametrize("nq", [8, 40, 100])
def test_heads_of_a_group_as_rows(isa: str, nq: int) -> None:
    """The forward multiplies many rows on the unit, the backward few of each head by vectors: with its own row sums."""
    q, k, v = torch.randn(1, 64, nq, 64), 4 * torch.randn(1, 2, 600, 64), torch.randn(1, 2, 600, 64)
    check((q, k, v), torch.randn(1, 64, nq, 64))


def test_float_cotangents_of_float16(isa: str) -> None:
    """A cotangent of more bits than two parts hold is not rounded: vectors multiply."""
    q, k, v, g = drawn("several tiles", torch.float16)
    leaves, cotangent = tuple(t.requires_grad_() for t in (q, k, v)), torch.randn(g.shape)
    got = torch.autograd.grad((rg.attention_state(*leaves).finish()[0] * cotangent).sum(), leaves)
    exact = gradients(tuple(t.double() for t in (q, k, v)), cotangent.double(), rg.Reference())
    for one, right in zip(got, exact, strict=True):
        assert (one - right).abs().max() <= 1e-3 * right.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [None, torch.inf])
def test_bits(isa: str, dtype: torch.dtype, odd: float | None) -> None:
    """The same for one thread and two, also where vectors multiply since a number has no parts."""
    q, k, v, g = (torch.randn(2, 4, 500, 64).to(dtype) for _ in range(4))
    if odd is not None:
        v[0, 1, 400, 3] = odd
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(gradients((q, k, v), g, mask=rg.Causal()))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
