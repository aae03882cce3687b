"""Frame, Region and Tiling answer by broadcasting; a tiling's extremes bound every block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.core.positions import Positions, tail
from regard.core.region import Frame, extremes

BATCH, HEADS, NQ, NK = (2, 3), 5, 7, 11
FRAME = Frame.of(NQ, NK, batch=BATCH, heads=HEADS, positions=tail(NQ, NK))
ROWS, COLS = slice(2, 5), slice(3, 10)


def test_a_region_names_each_axis() -> None:
    at = FRAME.region(ROWS, COLS)
    assert at.b.shape == (2, 3, 1, 1, 1) and at.b.flatten().tolist() == list(range(6))
    assert at.h.shape == (5, 1, 1) and at.h.flatten().tolist() == list(range(5))
    assert at.row.shape == (1, 3, 1) and at.row.flatten().tolist() == [2, 3, 4]
    assert at.col.shape == (1, 1, 7) and at.col.flatten().tolist() == list(range(3, 10))
    assert at.i.flatten().tolist() == [6, 7, 8] and at.j.flatten().tolist() == list(range(3, 10))


def test_positions_by_batch_element() -> None:
    q = torch.randint(0, 100, (*BATCH, NQ))
    at = replace(FRAME, positions=Positions(q, torch.arange(NK))).region(ROWS, COLS)
    assert torch.equal(at.i, q[:, :, None, 2:5, None])


def test_rows_may_be_a_list_of_indices() -> None:
    chosen = torch.tensor([4, 0, 4])
    at = FRAME.region(chosen)
    assert at.row.flatten().tolist() == [4, 0, 4] and at.col.shape == (1, 1, NK)
    assert torch.equal(at.pairs(torch.arange(NQ * NK).reshape(NQ, NK)), torch.arange(NQ * NK).reshape(NQ, NK)[chosen])


@pytest.mark.parametrize(("rank", "headed"), [*((n, True) for n in range(6)), *((n, False) for n in range(5))])
def test_pairs_cuts_every_broadcast_rank(rank: int, headed: bool) -> None:
    frame = replace(FRAME, headed=headed, heads=HEADS if headed else 1)
    full = frame.shape if headed else (*BATCH, NQ, NK)
    shape = full[len(full) - rank :] if rank else ()
    for ones in range(2**rank):
        size = tuple(1 if ones >> n & 1 else s for n, s in enumerate(shape))
        t = torch.arange(torch.Size(size).numel()).reshape(size)
        cut = frame.region(ROWS, COLS).pairs(t)
        expected = frame.lift(t.expand(full))[..., ROWS, COLS]
        assert torch.equal(cut.expand(expected.shape), expected)
        assert cut.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()


def test_a_frame_without_heads_lifts_what_has_three_axes() -> None:
    frame = replace(FRAME, headed=False, heads=1)
    assert frame.lift(torch.zeros(7, 11)).shape == (7, 11)
    assert frame.lift(torch.zeros(3, 7, 11)).shape == (3, 1, 7, 11)
    assert FRAME.lift(torch.zeros(5, 7, 11)).shape == (5, 7, 11)


def test_one_number_a_sequence_or_a_head() -> None:
    at = FRAME.region(ROWS, COLS)
    assert at.sequences(torch.zeros(BATCH)).shape == (2, 3, 1, 1, 1)
    assert at.sequences(torch.tensor(3)).shape == (1, 1, 1)
    assert at.heads(torch.zeros(5)).shape == (5, 1, 1) and at.heads(torch.tensor(0.0)).shape == ()


def test_keys_sorted_looks_at_every_batch_element() -> None:
    k = torch.arange(NK).expand(3, NK).clone()
    frame = Frame.of(NQ, NK, batch=(3,), positions=Positions(torch.arange(NQ), k))
    assert frame.keys_sorted
    k[2, 5] = 0
    frame = Frame.of(NQ, NK, batch=(3,), positions=Positions(torch.arange(NQ), k))
    assert not frame.keys_sorted
    assert Frame.of(3, 3, positions=Positions(torch.zeros(3).long(), torch.zeros(3).long())).keys_sorted


@given(st.integers(0, 13), st.integers(1, 15), st.integers(0, 2**20))
def test_extremes_of_blocks(n: int, size: int, seed: int) -> None:
    t = torch.randint(-50, 50, (2, n), generator=torch.Generator().manual_seed(seed))
    least, largest = extremes(t, size)
    parts = t.split(size, -1) if n else ()
    assert least.shape == largest.shape == (2, len(parts))
    for m, part in enumerate(parts):
        assert torch.equal(least[:, m], part.amin(-1)) and torch.equal(largest[:, m], part.amax(-1))


@given(st.integers(1, 9), st.integers(1, 13), st.integers(0, 63))
def test_a_tiling_bounds_pairs_of_every_broadcast_shape(r: int, c: int, ones: int) -> None:
    full = FRAME.shape
    size = tuple(1 if ones >> n & 1 else s for n, s in enumerate(full))
    t = torch.randint(-9, 9, size)
    tiling = FRAME.tiling(r, c)
    least, largest = (x.expand(*BATCH, HEADS, *tiling.shape) for x in tiling.pairs(t))
    for m, rows in enumerate(tiling.row_blocks):
        for n, cols in enumerate(tiling.col_blocks):
            block = t.expand(full)[..., rows, cols]
            assert torch.equal(least[..., m, n], block.amin((-2, -1)))
            assert torch.equal(largest[..., m, n], block.amax((-2, -1)))


def test_a_tiling_knows_indices_and_positions() -> None:
    tiling = FRAME.tiling(3, 4)
    assert tiling.shape == (3, 3)
    assert [x.flatten().tolist() for x in tiling.row] == [[0, 3, 6], [2, 5, 6]]
    assert [x.flatten().tolist() for x in tiling.i] == [[4, 7, 10], [6, 9, 10]]
    assert (
        [x.flatten().tolist() for x in tiling.col]
        == [x.flatten().tolist() for x in tiling.j]
        == [[0, 4, 8], [3, 7, 10]]
    )
    assert Frame.of(0, 0).tiling(3, 4).shape == (0, 0)
