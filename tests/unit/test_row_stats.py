"""RowStats.of_rows: the weights of whole rows in place, as the definition has them; and `finite`, which it asks."""

from __future__ import annotations

import math

import pytest
import torch

from regard.core.state import RowStats
from regard.core.tracing import finite


def scores(dtype: torch.dtype) -> torch.Tensor:
    """Rows with hidden keys, with none visible, with a large common offset, and with scores far below the largest."""
    s = 3 * torch.randn(2, 3, 7, 11, dtype=dtype)
    s[..., 1, 4:] = -math.inf
    s[..., 2, :] = -math.inf
    s[..., 3, :] += 1e4
    s[..., 4, 5] -= 1e5
    s[..., 5, 6] = torch.finfo(dtype).min
    return s


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("sunk", [None, -2.0, 90.0, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_in_place_are_the_softmax_with_the_sink(dtype: torch.dtype, sunk: float | None, apart: bool) -> None:
    s = scores(dtype)
    sink = None if sunk is None else torch.full((2, 3), sunk, dtype=dtype)
    p = torch.empty(2, 3, 13, 11, dtype=dtype)[..., 3:10, :] if apart else s.clone()
    stats = RowStats.of_rows(s if apart else p, p, sink)
    assert stats is not None

    column = torch.full((2, 3, 7, 1), -math.inf if sunk is None else sunk).double()
    joined = torch.cat((s.double(), column), -1)
    want = joined.softmax(-1).nan_to_num(0)  # NaN where nothing is visible, not even a sink
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(p.double(), want[..., :-1], rtol=32 * eps, atol=8 * torch.finfo(dtype).tiny)
    torch.testing.assert_close(stats.lse.double(), joined.logsumexp(-1), rtol=8 * eps, atol=8 * eps)
    assert (p[s == -math.inf] == 0).all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_refused_and_left_as_they_were(wrong: float) -> None:
    s = scores(torch.float32)
    s[1, 2, 3, 5] = wrong
    before = s.clone()
    assert RowStats.of_rows(s, s) is None
    assert torch.equal(s.nan_to_num(), before.nan_to_num())
    assert RowStats.of_rows(s[..., :0], s[..., :0]) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_finds_each_number_that_is_not(dtype: torch.dtype) -> None:
    largest = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    largest[1] *= -1
    assert finite(largest, largest[:0], largest[0, 0], torch.tensor([True]), torch.tensor(7))
    for wrong in (math.nan, math.inf, -math.inf):
        for place in ((0, 0), (1, 3), (2, 4)):
            x = largest.clone()
            x[place] = wrong
            assert not finite(x) and not finite(x.mT) and not finite(x[place])
