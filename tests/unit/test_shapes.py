"""The few questions that every room asks about tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.core.dtypes import FLOATING, accumulator, widen
from regard.core.shapes import blocks, listed, repeat_heads, sum_groups
from regard.core.tracing import data_unavailable, finite


def test_sums_are_kept_in_float32_and_float64() -> None:
    kept = {dtype: accumulator(dtype) for dtype in FLOATING}
    assert kept == {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
    }
    x = torch.ones(2)
    assert widen(x) is x and widen(x.half()).dtype == torch.float32


def test_query_head_i_reads_key_head_i_over_the_group() -> None:
    x = torch.randn(2, 3, 5, 7)
    wide = repeat_heads(x, 6)
    assert all(torch.equal(wide[:, i], x[:, i // 2]) for i in range(6))
    assert repeat_heads(x, 3) is x and sum_groups(x, 3) is x


def test_summing_groups_is_the_adjoint_of_repeating() -> None:
    x, y = torch.randn(2, 3, 5, 7, dtype=torch.float64), torch.randn(2, 6, 5, 7, dtype=torch.float64)
    torch.testing.assert_close((repeat_heads(x, 6) * y).sum(), (x * sum_groups(y, 3)).sum())


@given(st.integers(0, 40), st.integers(1, 50))
def test_blocks_cut_a_range_without_gaps(n: int, size: int) -> None:
    cut = blocks(n, size)
    assert [i for s in cut for i in range(s.start, s.stop)] == list(range(n))
    assert all(s.stop - s.start == size for s in cut[:-1]) and all(0 < s.stop - s.start <= size for s in cut)


def test_nobody_looks_at_values_where_there_are_none() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(data_unavailable(x) and not finite(x))
        return x

    torch.vmap(look)(torch.zeros(3))
    torch.func.grad(lambda x: look(x).sum())(torch.zeros(3))
    look(torch.zeros(3, device="meta"))
    assert seen == [True, True, True]
    assert not data_unavailable(torch.zeros(3))


def test_finite() -> None:
    x = torch.zeros(3)
    assert finite(x, x) and finite(torch.zeros(0))
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not finite(x, torch.tensor([0.0, bad]))


def test_shapes_are_listed_as_tuples() -> None:
    assert listed(torch.zeros(2, 3).shape) == "(2, 3)" and listed(()) == "()"
