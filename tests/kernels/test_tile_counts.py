"""Which tiles of masks the native kernels skip: counts, against the dense masks and, for many tokens, a bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.native.ffi import library
from regard.backends.native.tile_counts import TileCounts, count_tiles
from regard.call.problem import Problem

pytestmark = needs_kernels


def neighbours(columns: int, reach: int) -> Callable[..., Tensor]:
    """Tokens of an image of so many columns see those at most `reach` rows and columns away."""

    def fn(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        rows, across = i // columns - j // columns, i % columns - j % columns
        return (rows.abs() <= reach) & (across.abs() <= reach)

    return fn


IDS = torch.arange(700) // 90
MASKS: dict[str, rg.Mask] = {
    "neighbours": rg.Where(neighbours(26, 2)),
    "causal": rg.Where(lambda b, h, i, j: i >= j),
    "documents": rg.Where(lambda b, h, i, j: (IDS[i] == IDS[j]) & (i >= j)),
    "by head": rg.Where(lambda b, h, i, j: (i - j).abs() <= 40 * (h + b)),
    "beside intervals": rg.Window(200, 3) & rg.Where(lambda b, h, i, j: (i - j) % 3 != 1),
    "a map": rg.Causal() & rg.Dilated(70),
    "intervals": rg.Causal(),
    "nothing": rg.Where(lambda b, h, i, j: i < j - 1000),
    "everything": rg.Where(lambda b, h, i, j: i > j - 1000),
}


def problem_of(mask: rg.Mask, n: int, heads: int = 2, batch: int = 2) -> Problem:
    at = testing.frame(nq=n, nk=n, batch=(batch,), heads=heads)
    return testing.draw(at, dk=8, dv=8, mask=mask).leaves(torch.float32).problem


@pytest.mark.parametrize("name", MASKS)
def test_counts_are_those_of_the_dense_mask(isa: str, name: str) -> None:
    problem, (queries, keys) = problem_of(MASKS[name], 650), library().tile
    seen = problem.mask.visible(problem.frame.region()).expand(problem.frame.shape)
    tiles = [t for block in seen.split(queries, -2) for t in block.split(keys, -1)]
    some = sum(int(t.flatten(-2).any(-1).sum()) for t in tiles)
    every = sum(int(t.flatten(-2).all(-1).sum()) for t in tiles)
    found = count_tiles(problem)
    assert sum(found) == len(tiles) * 4
    assert found.whole + found.mixed == some
    assert found.whole == every
    if name in ("causal", "by head", "a map", "intervals", "nothing", "everything"):
        assert found.hidden == 0


def test_neighbours_in_an_image_of_65536_tokens() -> None:
    """Each block of queries looks at tiles in 7 of 256 rows: as many as with a quarter of the tokens."""
    (queries, keys), counts = library().tile, dict[int, TileCounts]()
    rows = 7 if 256 % queries == 0 else 8  # a block may have queries of two rows
    for n in (1 << 14, 1 << 16):
        counts[n] = count_tiles(problem_of(rg.Where(neighbours(256, 3)), n, heads=1, batch=1))
        blocks = -(-n // queries)
        assert sum(counts[n]) == blocks * (n // keys)
        assert counts[n].visited <= blocks * rows * (256 // keys)
    few, many = (counts[n].visited / n for n in counts)
    assert few <= many <= 1.1 * few
    assert counts[1 << 16].skipped > 0.97 * sum(counts[1 << 16])
