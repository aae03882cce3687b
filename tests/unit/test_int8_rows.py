"""Rows of int8 with a scale each: what rounding does to them, and what readers see."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from needed import needs_kernels
from regard.backends.native.direct import round_rows
from regard.core.deferred import kept_alike
from regard.core.int8_rows import Int8Rows, rounded
from regard.core.paged import Paged


def made(x: Tensor, dtype: torch.dtype | None = None) -> Int8Rows:
    return Int8Rows(*rounded(x), dtype or x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1.0, 3e4])
def test_each_number_is_within_half_a_scale(dtype: torch.dtype, size: float) -> None:
    x = (torch.randn(3, 2, 101, 17, dtype=torch.float64) * size / 8).to(dtype)
    numbers, scales = rounded(x)
    assert numbers.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (3, 2, 101, 1)
    assert torch.equal(scales[..., 0], (x.to(torch.promote_types(dtype, torch.float32)).abs().amax(-1) / 127).float())
    assert (numbers.abs().amax(-1) == 127).all()
    off = (numbers.double() * scales.double() - x.double()).abs()
    assert (off <= scales.double() * (0.5 + 2**-16)).all()


def test_rows_of_zeros_and_rows_without_numbers() -> None:
    numbers, scales = rounded(torch.tensor([[0.0, -0.0], [1e-45, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [2.0, 1.0]]))
    assert scales[0] == 0 and not numbers[:2].any()
    assert scales[2:4].isnan().all() and not numbers[2:4].any()
    assert numbers[4].tolist() == [127, 64]
    wide = Int8Rows(numbers, scales, torch.float32).widened(torch.float32)
    assert not wide[:2].any() and wide[2:4].isnan().all() and wide[4, 0] == 2.0
    for shape in ((3, 0), (0, 3), (2, 0, 0)):
        numbers, scales = rounded(torch.ones(shape))
        assert numbers.shape == shape and scales.shape == (*shape[:-1], 1)


def test_a_row_depends_on_no_other() -> None:
    x = torch.randn(2, 3, 29, 11)
    numbers, scales = rounded(x)
    for chosen in (lambda t: t[..., 5:6, :], lambda t: t[:1, 1:, ::3], lambda t: t.transpose(0, 1)):
        part = rounded(chosen(x))
        assert torch.equal(part[0], chosen(numbers)) and torch.equal(part[1], chosen(scales))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_to_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.randn(400, 3, 2, 17) * torch.logspace(-44, 37, 400)[:, None, None, None]
    x[5, 0, 0, 3], x[6, 0, 0, 3], x[7, 0, 0], x[8, 0, 0] = torch.nan, torch.inf, 0.0, -0.0
    x[9] = torch.arange(17.0) + 111  # 127 is the largest: the numbers are whole
    x[10] = torch.arange(17.0) / 2 - 127  # and halves, which go to the even number
    for each in x.to(dtype):
        for lying in (each, each.transpose(0, 1), each.transpose(0, 1).contiguous().transpose(0, 1)):
            found = round_rows(lying)
            assert found is not None
            for mine, right in zip(found, rounded(lying), strict=True):
                torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_what_the_kernel_leaves_to_torch() -> None:
    x = torch.randn(3, 2, 17)
    assert round_rows(x) is not None
    for other in (x.half(), x.double(), x.int(), x.mT, x[0, 0], x[:0], x.repeat(200, 1, 1), x.clone().requires_grad_()):
        assert round_rows(other) is None
    with Copied():
        assert round_rows(x) is None


class Copied(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"k has dtype torch\.int32; rows are rounded to int8 from float16, .* convert"):
        rounded(torch.ones(2, 3, dtype=torch.int32), "k")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_readers_get_the_products_in_the_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 7, 5).to(dtype)
    rows = made(x)
    exact = rows.numbers.double() * rows.scales.double()
    assert rows.dtype == dtype and rows.shape == x.shape
    wide = torch.promote_types(dtype, torch.float32)
    written = (rows.numbers.to(wide) * rows.scales.to(wide)).to(dtype)
    assert torch.equal(rows + 0, written) and torch.equal(rows.clone(), written) and rows.tolist() == written.tolist()
    assert rows.written_out().data_ptr() == rows.data_ptr()
    for twin in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert type(twin) is Tensor and torch.equal(twin, written)
    if dtype != torch.bfloat16:
        assert np.array_equal(rows.numpy(), written.numpy())
    # converted, they are the products themselves, not their rounding to dtype
    assert torch.equal(rows.to(torch.float64), exact if dtype != torch.float64 else written)
    if dtype == torch.bfloat16:
        assert torch.equal(rows.float(), rows.numbers.float() * rows.scales)
    with pytest.raises(TypeError, match="read only; write to a clone"):
        rows.add_(1)
    with pytest.raises(TypeError, match="read only; write to a clone"):
        rows[0] = 1


def test_rows_lie_alike_or_not() -> None:
    x = torch.randn(2, 3, 4, 5)
    k, v = made(x), made(x)
    assert kept_alike(k, v) and not kept_alike(k, x) and not kept_alike(x, v)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)

    def pages(t: Tensor, table: Tensor) -> Paged:
        return Paged(torch.zeros(4, 3, 2, t.shape[-1], dtype=t.dtype), table, 4)

    a, b = (Int8Rows(pages(k.numbers, table), pages(k.scales, table), torch.float32) for _ in range(2))
    c = Int8Rows(pages(k.numbers, table), pages(k.scales, table.clone()), torch.float32)
    assert kept_alike(a, b) and not kept_alike(a, v) and not kept_alike(a, c) and not kept_alike(k, b)
    assert a.in_pages and not k.in_pages


def test_numbers_that_lie_across_are_written_out_in_rows() -> None:
    """torch takes rows that are kept in another form to be contiguous."""
    x = torch.randn(1, 2, 17, 6)
    numbers, scales = rounded(x)
    across = Int8Rows(numbers.mT.contiguous().mT, scales, torch.float32)
    assert torch.equal(across @ x[0, 0].mT, (numbers * scales) @ x[0, 0].mT)
    assert across.written_out().is_contiguous()
