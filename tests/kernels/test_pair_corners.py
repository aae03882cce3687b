"""Functions of a pair where torch's answer is easily missed: ties, zeros, numbers that wrap, objects that hide."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from needed import needs_kernels
from pair_definition import BATCH, HEADS, WIDTH, Mod, N, Numbers, definition, largest_errors
from regard.compat.torch import flex_attention

pytestmark = needs_kernels


def compare(mod: Mod, dtype: torch.dtype = torch.float32, times: float = 1.0, bound: float = 3e-5) -> None:
    """The output and the gradients of q, k and v beside the definition, where it need not run in the kernels."""
    torch.manual_seed(0)
    q, k, v = ((torch.randn(BATCH, HEADS, N, WIDTH) * x).to(dtype).requires_grad_() for x in (times, 1.0, 1.0))
    twins = q.detach().double(), k.detach().double(), v.detach().double()
    for twin in twins:
        twin.requires_grad_()
    found, right = flex_attention(q, k, v, mod), definition(*twins, mod, None)
    results = [[out, *torch.autograd.grad(out.sum(), of)] for out, of in ((found, (q, k, v)), (right, twins))]
    for mine, other in zip(*results, strict=True):
        assert (mine - other).abs().max() <= bound * max(float(other.detach().abs().max()), 1.0)


@pytest.mark.parametrize("mod", [lambda s, b, h, i, j: s.asinh(), lambda s, b, h, i, j: s.fmod(0.7) + s])
def test_a_derivative_at_0(mod: Mod) -> None:
    compare(mod, times=0.0)


@pytest.mark.parametrize("name", ["amax", "amin"])
def test_equal_numbers_share_the_derivative_of_the_greatest(name: str) -> None:
    def case(numbers: Numbers) -> Mod:
        table = numbers.learn(N, 3)
        table.data.zero_()
        return lambda s, b, h, i, j: s * getattr(table[i] + table[j], name)() + s

    errors = largest_errors(case, None)
    assert max(errors.values()) <= 3e-5, errors


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda i, j: i.to(torch.uint8) - j.to(torch.uint8),
        lambda i, j: (i + j).to(torch.uint8) << 2,
        lambda i, j: i.to(torch.int8) * j.to(torch.int8),
        lambda i, j: ((i - j) * 11).to(torch.int8),
    ],
)
def test_narrow_whole_numbers_wrap(wrapped: Mod) -> None:
    compare(lambda s, b, h, i, j: s + 0.01 * wrapped(i, j))


def tenths(dtype: torch.dtype) -> Tensor:
    return (torch.arange(N) / 10).to(dtype)


SECONDS = 1.7e9 + torch.arange(N, dtype=torch.float64) / 8  # since 1970: float32 counts them in steps of 128
NARROW, HALVES, BYTES = tenths(torch.bfloat16), tenths(torch.float16), torch.arange(N).to(torch.uint8)


@pytest.mark.parametrize(
    "sees",
    [
        lambda i, j: NARROW[(i - j).abs()] == 0.7,  # 0.7 as a bfloat16
        lambda i, j: HALVES[(i - j).abs()] <= 0.3,
        lambda i, j: HALVES.mul(300)[(i - j).abs()] == (i - j).abs() * 30,  # 2,049 is 2,048 as a float16
        lambda i, j: BYTES[(i - j).abs()] > -1,  # 255
        lambda i, j: (i - j).abs().to(torch.uint8) < 300,  # 44
        lambda i, j: SECONDS[j] < SECONDS[i] - 2,
    ],
)
def test_comparisons_in_a_dtype_that_makes_other_numbers(sees: Mod) -> None:
    compare(lambda s, b, h, i, j: torch.where(sees(i, j), s, s * 0.3))
    compare(lambda s, b, h, i, j: torch.where(sees(i, j) | (i == j), s, float("-inf")))


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, i, j: s - 0.1 * (SECONDS[i] - SECONDS[j]).abs(),
        lambda s, b, h, i, j: s + SECONDS[i] - SECONDS[j],
        lambda s, b, h, i, j: s - (SECONDS[i * j % N] % 7).float(),
        lambda s, b, h, i, j: s - torch.stack([SECONDS[i], -SECONDS[j]]).sum().float() * (j % 3),
        lambda s, b, h, i, j: s + torch.sin(SECONDS[(i - j).abs()]),
    ],
)
def test_differences_of_large_numbers_in_float64(mod: Mod) -> None:
    compare(mod)


def test_products_in_float64_run_in_the_kernels() -> None:
    def case(numbers: Numbers) -> Mod:
        slopes, table = numbers.learn(HEADS).double(), numbers.fixed(N).double()
        return lambda s, b, h, i, j: s - slopes[h].exp() * (i - j).abs() * 0.1 * table[(i * j) % N]

    errors = largest_errors(case, None)
    assert max(errors.values()) <= 3e-5, errors


def test_numbers_of_rows_in_half_precision_are_rounded() -> None:
    rows, columns = torch.randn(2, N, 6).bfloat16()
    compare(lambda s, b, h, i, j: s - 3 * (rows[i] - columns[j]).float().abs().sum())
    compare(lambda s, b, h, i, j: s - 0.1 * torch.stack([rows[i, 0], i + j]).float().sum())


def test_whole_numbers_without_a_sign_wrap() -> None:
    compare(lambda s, b, h, i, j: s + (i - 2 * j).to(torch.uint16).to(torch.int64) * 1e-4)


def test_a_learned_factor_of_a_product_of_rows() -> None:
    def case(numbers: Numbers) -> Mod:
        c, query, key = numbers.learn(), numbers.fixed(N, 4), numbers.fixed(N, 4)
        return lambda s, b, h, i, j: s + c * torch.dot(query[i], key[j])

    errors = largest_errors(case, None)
    assert max(errors.values()) <= 3e-5, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_rows_are_not_rounded(dtype: torch.dtype) -> None:
    query, key = 4 * torch.randn(2, N, 8)
    compare(
        lambda s, b, h, i, j: s + torch.dot(query[i], key[j]), dtype, bound=0.02 if dtype == torch.bfloat16 else 2e-3
    )


class Rate:
    rate = 0.1


def test_what_goes_into_keywords_of_any_name_is_read() -> None:
    given = Rate()
    given.rate = 0.5

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, **others: Any) -> Tensor:
        return s - others["given"].rate * (i - j).abs()

    compare(functools.partial(mod, given=given))


class Optional(nn.Module):
    """Reads its weight where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.randn(N)), False

    def forward(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + self.weight[i] * (j % 3) if self.use else s * 2 - 0.1 * (i - j).abs()


def test_a_learned_tensor_that_a_branch_leaves_out() -> None:
    module = Optional()
    for module.use in (True, False, True):
        q = torch.randn(BATCH, HEADS, N, WIDTH, requires_grad=True)
        grad = torch.autograd.grad(flex_attention(q, q, q, module).sum(), module.weight, allow_unused=True)[0]
        assert (grad is not None and bool(grad.any())) == module.use


class Slots:
    __slots__ = ("rate", "unused")
    factor = 2.0

    def bias(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() * self.rate

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * self.factor - self.bias(i, j) if self.rate < 1 else s * self.unused


def test_objects_with_slots_alone() -> None:
    mod = Slots()
    for mod.rate in (0.1, 0.5):
        compare(mod)


class Scale(float):
    rate = 0.1


def test_numbers_with_attributes() -> None:
    scale = Scale(0.5)
    for scale.rate in (0.1, 0.5):
        compare(lambda s, b, h, i, j: s * scale - scale.rate * (i - j).abs())
