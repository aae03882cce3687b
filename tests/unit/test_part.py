"""A mask of a whole call, restricted to some of its queries and keys, hides what the whole hides there."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.backends.native.lower_mask import lower_intervals
from regard.call.part import Indices, QueriesAndKeys, mask_of_part, select
from regard.core.positions import Positions
from regard.core.region import Frame

NQ, NK = 23, 37
PARTS: dict[str, tuple[Indices | None, Indices]] = {
    "contiguous": (range(5, 16), range(11, 30)),
    "striped": (range(1, NQ, 3), range(2, NK, 4)),
    "zigzag": (torch.tensor([2, 3, 4, 17, 18]), torch.tensor([6, 7, 8, 9, 29, 30, 31])),
    "in any order": (torch.tensor([9, 0, 22, 4]), torch.tensor([30, 5, 12, 36, 0])),
    "all queries": (None, range(9, 24)),
    "no keys": (range(4, 9), range(0)),
}
LENGTHS = rg.Lengths(keys=torch.tensor([8, 31]), queries=torch.tensor([23, 12]))
SORTED = rg.Documents(torch.arange(NQ) // 5, torch.arange(NK) // 7)
MIXED = rg.Documents(torch.arange(NQ) % 3, torch.arange(NK) % 3)
MASKS = {
    "documents": SORTED,
    "mixed documents": MIXED,
    "lengths": LENGTHS,
    "causal documents": rg.Causal() & SORTED,
    "window, lengths": rg.Window(before=9, after=2) & LENGTHS,
    "all three": rg.Causal() & SORTED & LENGTHS,
    "not one interval": ~SORTED | LENGTHS,
    "dense": rg.Dense(torch.rand(2, 1, NQ, NK, generator=torch.Generator().manual_seed(0)) < 0.6),
}


def of_part(name: str) -> tuple[QueriesAndKeys, Frame]:
    """A part, and the frame of a call with it, at the positions that its tokens have in the whole."""
    part = QueriesAndKeys(*PARTS[name], NQ, NK)
    at = Positions(part.of_queries(torch.arange(NK - NQ, NK)), part.of_keys(torch.arange(NK)))
    return part, Frame((2,), 3, at.q.shape[-1], at.k.shape[-1], at)


def expected(mask: rg.Mask, part: QueriesAndKeys) -> torch.Tensor:
    whole = mask.on(NQ, NK, positions=rg.tail(NQ, NK), batch=(2,), heads=3).dense().expand(2, 3, NQ, NK)
    return select(part.of_queries(whole, -2), part.cols)


@pytest.mark.parametrize("name", list(PARTS))
@pytest.mark.parametrize("mask", list(MASKS))
def test_pairs_tiles_and_rows_agree_with_the_whole(mask: str, name: str) -> None:
    part, frame = of_part(name)
    restricted, dense = mask_of_part(MASKS[mask], part), expected(MASKS[mask], part)
    assert torch.equal(restricted.visible(frame.region()).expand(frame.shape), dense)
    tiling = frame.tiling(3, 4)
    cover = restricted.cover(tiling).expand(2, 3, *tiling.shape)
    for n, rows in enumerate(tiling.row_blocks):
        for m, cols in enumerate(tiling.col_blocks):
            tile = dense[..., rows, cols].flatten(-2)
            assert not tile.any(-1)[cover[..., n, m] == rg.Cover.NONE].any()
            assert tile.all(-1)[cover[..., n, m] == rg.Cover.ALL].all()
    interval = restricted.rows(frame)
    if interval is not None:
        col = torch.arange(frame.nk)
        inside = (col >= interval.start[..., None]) & (col < interval.stop[..., None])
        assert torch.equal(inside.expand(frame.shape), dense)


@pytest.mark.parametrize("name", ["contiguous", "striped", "zigzag", "all queries"])
@pytest.mark.parametrize(
    "mask", ["documents", "mixed documents", "lengths", "causal documents", "window, lengths", "all three"]
)
def test_the_kernels_read_intervals_or_documents_of_a_part(mask: str, name: str) -> None:
    """And so no map of its tiles is written out."""
    part, frame = of_part(name)
    assert lower_intervals(mask_of_part(MASKS[mask], part), frame) is not None


@pytest.mark.parametrize("name", list(PARTS))
@pytest.mark.parametrize("mask", list(MASKS))
def test_native_attends_as_the_whole_does(mask: str, name: str) -> None:
    part, frame = of_part(name)
    q, k, v = torch.randn(2, 3, frame.nq, 8), torch.randn(2, 3, frame.nk, 8), torch.randn(2, 3, frame.nk, 5)
    own = rg.attention(q, k, v, mask=mask_of_part(MASKS[mask], part), positions=frame.positions, backend=rg.Native())
    dense = rg.attention(q, k, v, mask=rg.Dense(expected(MASKS[mask], part)), backend=rg.Reference())
    torch.testing.assert_close(own, dense)
