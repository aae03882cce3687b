"""write_rows, write_rounded_rows: they write what torch writes, and what they leave to torch stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.testing._internal.logging_tensor import LoggingTensorMode

import regard as rg
from needed import needs_kernels
from regard.backends.native.direct import write_rounded_rows, write_rows
from regard.core.int8_rows import rounded
from regard.nn import FixedCache

pytestmark = needs_kernels

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8)


def buffers(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 3, 8, 5, dtype=dtype), torch.zeros(2, 3, 8, 4, dtype=dtype)


def laid_out(t: Tensor, order: list[int], step: int) -> Tensor:
    """The same numbers, the axes in another order in memory, `step` numbers apart."""
    memory = t.permute(order).repeat_interleave(step, -1)[..., ::step]
    return memory.permute([order.index(axis) for axis in range(t.dim())])


@settings(deadline=None)
@given(
    lead=st.lists(st.integers(0, 3), max_size=3),
    n=st.integers(0, 4),
    widths=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    row=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_it_copies_what_torch_copies(
    lead: list[int], n: int, widths: tuple[int, int], row: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    row = min(row, 6 - n)
    held, new, expected = [], [], []
    for width in widths:
        held.append(torch.randint(-9, 9, (*lead, 6, width)).to(dtype))
        order = data.draw(st.permutations(range(len(lead) + 2)))
        new.append(laid_out(torch.randint(-9, 9, (*lead, n, width)).to(dtype), order, data.draw(st.integers(1, 2))))
        expected.append(held[-1].clone())
        expected[-1][..., row : row + n, :] = new[-1]
    assert write_rows(row, new[0], held[0], new[1], held[1])
    assert torch.equal(held[0], expected[0]) and torch.equal(held[1], expected[1])


@settings(deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), max_size=3),
    n=st.integers(1, 4),
    widths=st.tuples(st.integers(2, 6), st.integers(2, 6)),
    row=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_it_rounds_what_torch_rounds(
    lead: list[int], n: int, widths: tuple[int, int], row: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """To the rows of buffers that lie as they like, but for the numbers of a row, which are neighbors."""
    row, axes = min(row, 6 - n), len(lead) + 1
    new, held, expected = [], [], []
    for width in widths:
        t = torch.randn(*lead, n, width).to(dtype)
        t.view(-1)[data.draw(st.integers(0, t.numel() - 1))] = data.draw(st.sampled_from([0.0, 3e30, torch.inf]))
        new.append(laid_out(t, [*data.draw(st.permutations(range(axes))), axes], 1))
        order = data.draw(st.permutations(range(axes)))
        buffers = torch.ones(*lead, 6, width, dtype=torch.int8), torch.ones(*lead, 6, 1)
        held.append(tuple(laid_out(buffer, [*order, axes], 1) for buffer in buffers))
        expected.append(tuple(buffer.clone() for buffer in buffers))
        for buffer, made in zip(expected[-1], rounded(t), strict=True):
            buffer[..., row : row + n, :] = made
    assert write_rounded_rows(row, new[0], held[0], new[1], held[1])
    for mine, right in zip(held, expected, strict=True):
        assert torch.equal(mine[0], right[0]) and torch.equal(mine[1].nan_to_num(7), right[1].nan_to_num(7))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


LEFT: dict[str, Callable[[], tuple[int, Tensor, Tensor]]] = {
    "no room": lambda: (7, ones(2, 3, 2, 5), ones(2, 3, 2, 4)),
    "a row before the first": lambda: (-1, ones(2, 3, 1, 5), ones(2, 3, 1, 4)),
    "another width": lambda: (0, ones(2, 3, 1, 5), ones(2, 3, 1, 5)),
    "other heads": lambda: (0, ones(2, 3, 1, 5), ones(2, 2, 1, 4)),
    "fewer axes": lambda: (0, ones(3, 1, 5), ones(3, 1, 4)),
    "more values than keys": lambda: (0, ones(2, 3, 1, 5), ones(2, 3, 2, 4)),
    "another dtype": lambda: (0, ones(2, 3, 1, 5), ones(2, 3, 1, 4, dtype=torch.int32)),
    "a parameter": lambda: (0, nn.Parameter(ones(2, 3, 1, 5)), ones(2, 3, 1, 4)),
    "a gradient": lambda: (0, ones(2, 3, 1, 5), ones(2, 3, 1, 4).requires_grad_()),
    "another device": lambda: (0, ones(2, 3, 1, 5).to("meta"), ones(2, 3, 1, 4)),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_does_not_fit_is_left(case: str) -> None:
    row, k, v = LEFT[case]()
    keys, values = buffers()
    assert not write_rows(row, k, keys, v, values)
    assert not keys.any() and not values.any()


@pytest.mark.parametrize("case", LEFT)
def test_what_does_not_fit_is_not_rounded(case: str) -> None:
    row, k, v = LEFT[case]()
    held = [(keys, torch.zeros(2, 3, 8, 1)) for keys in buffers(torch.int8)]
    assert not write_rounded_rows(row, k, held[0], v, held[1])
    assert not any(t.any() for part in held for t in part)


def test_few_scales_are_left() -> None:
    (keys, values), k, v = buffers(torch.int8), ones(2, 3, 2, 5), ones(2, 3, 2, 4)
    for short in ((2, 3, 7, 1), (2, 2, 8, 1), (2, 3, 8, 2)):
        few, scales = torch.zeros(short), torch.zeros(2, 3, 8, 1)
        assert not write_rounded_rows(6, k, (keys, scales), v, (values, few))
        assert not any(t.any() for t in (keys, values, few, scales))


def test_a_watched_copy_is_left() -> None:
    keys, values = buffers()
    with LoggingTensorMode():
        assert not write_rows(0, ones(2, 3, 1, 5), keys, ones(2, 3, 1, 4), values)
    assert not keys.any() and not values.any()


def test_many_rows_are_left_to_the_threads_of_torch() -> None:
    many = torch.zeros(1, 1, 5000, 64)
    assert not write_rows(0, many[..., :4000, :], many, many[..., :4000, :], many)
    assert write_rows(0, many[..., :200, :], many, many[..., :200, :], many)


@pytest.mark.parametrize("forget", ["crop", "reset"])
def test_gradients_through_keys_that_were_overwritten_are_refused(forget: str) -> None:
    cache, token = FixedCache(1, 2, 4, 8, 8), torch.randn(3, 1, 2, 1, 8)
    q = torch.randn(1, 2, 1, 8, requires_grad=True)
    out = rg.attention(q, *cache.append(token[0], token[0]))
    cache.append(token[1], token[1])
    out.sum().backward(retain_graph=True)  # what it read is as it was
    cache.crop(0) if forget == "crop" else cache.reset()
    cache.append(token[2], token[2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
