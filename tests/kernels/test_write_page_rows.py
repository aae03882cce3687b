"""write_page_rows, write_rounded_page_rows: what they write lies where the block table says, and what they leave to
others stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.testing._internal.logging_tensor import LoggingTensorMode

import regard as rg
from needed import needs_kernels
from regard.backends.native.direct import write_page_rows, write_rounded_page_rows
from regard.core.int8_rows import rounded
from regard.nn import PagedCache

pytestmark = needs_kernels

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8)
HEADS, PAGES = 3, 17


def laid_out(t: Tensor, order: list[int], step: int) -> Tensor:
    """The same numbers, the axes in another order in memory, `step` numbers apart."""
    memory = t.permute(order).repeat_interleave(step, -1)[..., ::step]
    return memory.permute([order.index(axis) for axis in range(t.dim())])


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=4),
    n=st.integers(0, 4),
    size=st.integers(1, 5),
    widths=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_each_row_lies_where_the_block_table_says(
    lengths: list[int], n: int, size: int, widths: tuple[int, int], dtype: torch.dtype, data: st.DataObject
) -> None:
    batch, room = len(lengths), -(-13 // size)
    table = torch.stack([torch.randperm(PAGES * 4)[:room] for _ in range(batch)]) if batch else torch.zeros(0, room)
    table = table.int()
    held, new, expected = [], [], []
    for width in widths:
        held.append(torch.randint(-9, 9, (PAGES * 4, HEADS, size, width)).to(dtype))
        order = data.draw(st.permutations(range(4)))
        rows = torch.randint(-9, 9, (batch, HEADS, n, width)).to(dtype)
        new.append(laid_out(rows, order, data.draw(st.integers(1, 2))))
        expected.append(held[-1].clone())
        for b, length in enumerate(lengths):
            for i in range(n):
                page, row = table[b, (length + i) // size], (length + i) % size
                expected[-1][page, :, row] = rows[b, :, i]
    assert write_page_rows(4, lengths, table, new[0], held[0], new[1], held[1]) == n
    assert torch.equal(held[0], expected[0]) and torch.equal(held[1], expected[1])


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    n=st.integers(1, 4),
    size=st.integers(1, 5),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_each_rounded_row_lies_where_the_block_table_says(
    lengths: list[int], n: int, size: int, widths: tuple[int, int], dtype: torch.dtype, data: st.DataObject
) -> None:
    """In pools that lie as they like, but for the numbers of a row, which are neighbors."""
    batch, room = len(lengths), -(-13 // size)
    table = torch.randperm(PAGES * 4)[: batch * room].view(batch, room).int()
    new, held, expected = [], [], []
    for width in widths:
        t = torch.randn(batch, HEADS, n, width).to(dtype)
        t.view(-1)[data.draw(st.integers(0, t.numel() - 1))] = data.draw(st.sampled_from([0.0, 3e30, torch.inf]))
        new.append(laid_out(t, [*data.draw(st.permutations(range(3))), 3], 1))
        order = data.draw(st.permutations(range(3)))
        pools = torch.ones(PAGES * 4, HEADS, size, width, dtype=torch.int8), torch.ones(PAGES * 4, HEADS, size, 1)
        held.append(tuple(laid_out(pool, [*order, 3], 1) for pool in pools))
        expected.append(tuple(pool.clone() for pool in pools))
        for pool, rows in zip(expected[-1], rounded(t), strict=True):
            for b, length in enumerate(lengths):
                for i in range(n):
                    pool[table[b, (length + i) // size], :, (length + i) % size] = rows[b, :, i]
    assert write_rounded_page_rows(4, lengths, table, new[0], held[0], new[1], held[1]) == n
    for mine, right in zip(held, expected, strict=True):
        assert torch.equal(mine[0], right[0]) and torch.equal(mine[1].nan_to_num(7), right[1].nan_to_num(7))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


class Given(NamedTuple):
    """Two sequences of 3 and 6 rows, in pages of 4; one new row each."""

    most: int = 2
    lengths: list[int] = [3, 6]  # noqa: RUF012 - read only
    table: Tensor = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
    k: Tensor = ones(2, HEADS, 1, 5)
    v: Tensor = ones(2, HEADS, 1, 4)


def two_rows() -> Given:
    return Given(k=ones(2, HEADS, 2, 5), v=ones(2, HEADS, 2, 4))


LEFT: dict[str, Callable[[], Given]] = {
    "more rows than there is room for": lambda: two_rows()._replace(most=1),
    "a table that is too short": lambda: Given(lengths=[8, 6]),
    "a second row that is too far": lambda: two_rows()._replace(lengths=[7, 6]),
    "a row before the first": lambda: Given(lengths=[3, -1]),
    "a page after the last": lambda: Given(table=torch.tensor([[1, 0], [3, 4]], dtype=torch.int32)),
    "a page before the first": lambda: Given(table=torch.tensor([[1, 0], [3, -1]], dtype=torch.int32)),
    "a table of other numbers": lambda: Given(table=torch.tensor([[1, 0], [3, 2]])),
    "more sequences than lengths": lambda: Given(lengths=[3]),
    "fewer sequences in k": lambda: Given(k=ones(1, HEADS, 1, 5)),
    "fewer sequences in v": lambda: Given(v=ones(1, HEADS, 1, 4)),
    "another width": lambda: Given(v=ones(2, HEADS, 1, 5)),
    "other heads": lambda: Given(v=ones(2, HEADS - 1, 1, 4)),
    "fewer axes": lambda: Given(k=ones(HEADS, 1, 5)),
    "more values than keys": lambda: Given(v=ones(2, HEADS, 2, 4)),
    "another dtype": lambda: Given(v=ones(2, HEADS, 1, 4, dtype=torch.int32)),
    "a parameter": lambda: Given(k=nn.Parameter(ones(2, HEADS, 1, 5))),
    "a gradient": lambda: Given(v=ones(2, HEADS, 1, 4).requires_grad_()),
    "another device": lambda: Given(k=ones(2, HEADS, 1, 5).to("meta")),
}


@pytest.mark.parametrize("case", [None, *LEFT])
def test_what_does_not_fit_is_left(case: str | None) -> None:
    most, lengths, table, k, v = Given() if case is None else LEFT[case]()
    keys, values = torch.zeros(4, HEADS, 4, 5), torch.zeros(4, HEADS, 4, 4)
    wrote = write_page_rows(most, lengths, table, k, keys, v, values)
    assert wrote == (1 if case is None else None)
    assert bool(keys.any()) == bool(values.any()) == (case is None)


@pytest.mark.parametrize("case", [None, *LEFT])
def test_what_does_not_fit_is_not_rounded(case: str | None) -> None:
    most, lengths, table, k, v = Given() if case is None else LEFT[case]()
    held = [(torch.zeros(4, HEADS, 4, d, dtype=torch.int8), torch.zeros(4, HEADS, 4, 1)) for d in (5, 4)]
    wrote = write_rounded_page_rows(most, lengths, table, k, held[0], v, held[1])
    assert wrote == (1 if case is None else None)
    assert all(bool(t.any()) == (case is None) for part in held for t in part)


def test_few_scales_are_left() -> None:
    most, lengths, table, k, v = Given()
    for short in ((3, HEADS, 4, 1), (4, HEADS - 1, 4, 1), (4, HEADS, 3, 1), (4, HEADS, 4, 2)):
        held = [(torch.zeros(4, HEADS, 4, d, dtype=torch.int8), torch.zeros(4, HEADS, 4, 1)) for d in (5, 4)]
        held[1] = held[1][0], torch.zeros(short)
        assert write_rounded_page_rows(most, lengths, table, k, held[0], v, held[1]) is None
        assert not any(t.any() for part in held for t in part)


def test_pools_of_unequal_pages_are_left() -> None:
    most, lengths, table, k, v = Given()
    for shape in ((3, HEADS, 4, 4), (4, HEADS, 5, 4)):
        keys, values = torch.zeros(4, HEADS, 4, 5), torch.zeros(shape)
        assert write_page_rows(most, lengths, table, k, keys, v, values) is None
        assert not keys.any() and not values.any()


def test_a_watched_copy_is_left() -> None:
    most, lengths, table, k, v = Given()
    keys, values = torch.zeros(4, HEADS, 4, 5), torch.zeros(4, HEADS, 4, 4)
    with LoggingTensorMode():
        assert write_page_rows(most, lengths, table, k, keys, v, values) is None
    assert not keys.any() and not values.any()


def step(cache: PagedCache, n: int = 1) -> None:
    one = torch.randn(cache.lengths.numel(), 2, n, 8)
    cache.append(one, one)


def test_a_step_writes_its_rows_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as every sequence has a page with room for it, that no other sequence reads."""
    cache, looked = PagedCache(3, 2, 40, 4, 8, 8), list[int]()
    reserve = cache._tables.reserve
    monkeypatch.setattr(cache._tables, "reserve", lambda new: (looked.append(cache.length), reserve(new))[1])
    for _ in range(9):
        step(cache)
    assert looked == [0, 4, 8]  # a new page each
    cache.reorder(torch.tensor([0, 0, 2]))
    for _ in range(4):
        step(cache)
    assert looked == [0, 4, 8, 9, 12]  # a page that two sequences read becomes two
    cache.crop(torch.tensor([10, 5, 9]))
    for _ in range(4):
        step(cache)
    assert looked == [0, 4, 8, 9, 12, 10, 12, 13]  # one sequence or another has a page that is full


def test_gradients_through_what_was_read_before_a_crop() -> None:
    """They are those of the keys that were read: gathered, in memory of their own."""
    cache, (a, b) = PagedCache(1, 2, 4, 4, 8, 8), torch.randn(2, 1, 2, 3, 8)
    q = torch.randn(1, 2, 1, 8, requires_grad=True)
    out = rg.attention(q, *cache.append(a, a))
    cache.crop(0)
    cache.append(b, b)
    (found,) = torch.autograd.grad(out.sum(), q)
    (expected,) = torch.autograd.grad(rg.attention(q, a, a).sum(), q)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("forget", ["crop", "reset", "reorder"])
def test_gradients_through_pages_that_may_be_overwritten_are_refused(forget: str) -> None:
    cache, w = PagedCache(1, 2, 4, 4, 8, 8), torch.randn(8, requires_grad=True)
    step(cache, 3)
    out = (cache.key_pages[0] * w).sum()
    if forget == "reorder":
        cache.reorder(torch.tensor([0]))
    elif forget == "crop":
        cache.crop(1)
    else:
        cache.reset()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
