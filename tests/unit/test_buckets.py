"""Buckets against the official constructions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import regard as rg


def t5(distance: int, bidirectional: bool, size: int, reach: int) -> int:
    """T5's _relative_position_bucket for one memory position - query position, in plain Python."""
    bucket = 0
    if bidirectional:
        size //= 2
        bucket = size if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = size // 2
    if distance < exact:
        return bucket + distance
    far = exact + int(math.log(distance / exact) / math.log(reach / exact) * (size - exact))
    return bucket + min(far, size - 1)


@pytest.mark.parametrize(("size", "reach"), [(32, 128), (8, 16), (64, 1000), (4, 20)])
def test_t5(size: int, reach: int) -> None:
    i, j = torch.arange(0, 300, 7)[:, None], torch.arange(311)
    for buckets, bidirectional in ((rg.T5Buckets(size, reach), True), (rg.T5CausalBuckets(size, reach), False)):
        got = buckets.index(i, j)
        expected = [[t5(n - m, bidirectional, size, reach) for n in j.tolist()] for m in i.flatten().tolist()]
        assert got.tolist() == expected
        assert buckets.count == size and got.min() >= 0 and got.max() < size


def test_t5_by_hand() -> None:
    """mesh-tensorflow's table for 32 buckets within 128: eight exact distances, then wider and wider ones."""
    behind = torch.tensor([0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 127, 128, 5000])
    expected = [0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15, 15]
    assert rg.T5Buckets().index(behind, torch.tensor(0)).tolist() == expected
    ahead = rg.T5Buckets().index(torch.tensor(0), behind[1:])
    assert ahead.tolist() == [n + 16 for n in expected[1:]]


@pytest.mark.parametrize(("height", "width"), [(7, 7), (2, 5), (3, 1)])
def test_swin(height: int, width: int) -> None:
    """The relative_position_index of the official Swin transformer."""
    coords = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")).flatten(1)
    relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += height - 1
    relative[:, :, 1] += width - 1
    relative[:, :, 0] *= 2 * width - 1
    cells = torch.arange(height * width)
    buckets = rg.GridBuckets(height, width)
    assert torch.equal(buckets.index(cells[:, None], cells), relative.sum(-1))
    assert buckets.count == (2 * height - 1) * (2 * width - 1)


def test_clipped() -> None:
    buckets = rg.ClippedBuckets(before=2, after=1)
    assert buckets.count == 4
    assert buckets.index(torch.tensor([[5], [0]]), torch.tensor([0, 3, 4, 5, 6, 9])).tolist() == [
        [0, 0, 1, 2, 3, 3],
        [2, 3, 3, 3, 3, 3],
    ]


def test_a_grid_has_its_cells_and_no_more() -> None:
    table, x = torch.randn(rg.GridBuckets(2, 3).count, 1), torch.randn(6, 5)
    score = rg.Dot() >> rg.RelativeBias(table, rg.GridBuckets(2, 3))
    assert rg.attention(x, x, x, score=score).shape == (6, 5)
    for q, k, said in ((0, 1, "the keys stand at 1 to 6"), (-1, 0, "the queries stand at -1 to 4")):
        at = rg.Positions(torch.arange(6) + q, torch.arange(6) + k)
        with pytest.raises(rg.ShapeError, match=said):
            rg.attention(x, x, x, score=score, positions=at)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rg.T5Buckets(3, 16), "expected an even size of 4 or more, and a reach above size / 4"),
        (lambda: rg.T5Buckets(2, 16), "expected an even size of 4 or more"),
        (lambda: rg.T5Buckets(32, 8), "a reach above size / 4"),
        (lambda: rg.T5CausalBuckets(1, 16), "expected a size of 2 or more, and a reach above size / 2"),
        (lambda: rg.T5CausalBuckets(32, 16), "a reach above size / 2"),
        (lambda: rg.ClippedBuckets(before=-1, after=2), "expected distances of 0 or more"),
        (lambda: rg.GridBuckets(0, 3), "expected a grid of 1 × 1 or more"),
    ],
)
def test_refusals(make: Callable[[], rg.Buckets], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_buckets_of_ones_own_say_what_is_missing() -> None:
    for ask in (lambda: rg.Buckets().count, lambda: rg.Buckets().index(torch.tensor(0), torch.tensor(0))):
        with pytest.raises(NotImplementedError):
            ask()
