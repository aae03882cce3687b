"""Masks as maps of tiles say what the masks say, pair by pair, whatever the strips in which they are compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.backends.native import lower_mask as lowering
from regard.call.of_part import mask_of_part
from regard.call.part import QueriesAndKeys
from regard.core.region import Frame

AT = testing.frame(nq=151, nk=331, batch=(3,), heads=2)
BY_HEAD = rg.Where(lambda b, h, i, j: (i * 3 + j * 5 + h + b) % 7 < 4)
MASKS = {
    "where": BY_HEAD,
    "causal where": rg.Causal() & BY_HEAD,
    "near": rg.Where(lambda b, h, i, j: (i - j).abs() < 20),
    "shared by heads": rg.Where(lambda b, h, i, j: (i + b) % 5 != j % 5),
    "constant": rg.Where(lambda b, h, i, j: b * 0 == 0) | rg.Dilated(2),
    "dilated": rg.Causal() & rg.Window(90, 0) & rg.Dilated(4),
    "dense or prefix": rg.Prefix(torch.tensor([130, 0, 331])) | rg.Dense(torch.arange(331)[None] % 97 == 0),
    "not documents": ~rg.Documents(torch.arange(151) // 70, torch.arange(331) % 3),
    "nothing": rg.Where(lambda b, h, i, j: i < j - 1000) & rg.Dilated(3),
}


def tile_map(mask: rg.Mask, queries: int) -> dict[str, Tensor]:
    """What is made of a mask that is no program."""
    return lowering._lowered(None, mask, AT, AT.heads, (queries, 128))


def written_out(found: dict[str, Tensor], queries: int, keys: int) -> Tensor:
    """A map of tiles as booleans (batch, heads, nq, nk)."""
    tiles, bits = found["tiles"], found["bits"]
    shifted = (bits[:, None, :] >> torch.arange(queries)[:, None]) & 1
    all_ = shifted.new_ones(1, queries, keys)
    pairs = torch.cat([all_, 0 * all_, shifted])[tiles.long() + 2]  # (.., R, C, queries, keys)
    seen = pairs.movedim(-2, -3).flatten(-2).flatten(-3, -2)
    return seen[..., : AT.nq, : AT.nk].bool().expand(AT.shape)


@pytest.mark.parametrize("strip", [1, 20_000, 100_000, 1 << 20])
@pytest.mark.parametrize("queries", [12, 24, 64])
@pytest.mark.parametrize("name", MASKS)
def test_a_map_is_its_mask(name: str, queries: int, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_STRIP", strip)
    found = tile_map(MASKS[name], queries)
    assert found.keys() == {"tiles", "bits"}
    assert torch.equal(written_out(found, queries, 128), MASKS[name].visible(AT.region()).expand(AT.shape))


def test_booleans_beside_any_number_of_intervals_need_no_map() -> None:
    """Nor do those of a part of a whole call, or of one of its heads."""
    dense, window, at = rg.Dense(torch.rand(2, 151, 331) < 0.5), rg.Window(40, 3), AT.positions
    for mask in (dense & rg.Causal(), dense & rg.Causal() & window, rg.Causal() & dense & window):
        found = lowering._lowered(None, mask, AT, AT.heads, (64, 128))
        assert {"allowed", "last"} <= found.keys() and "tiles" not in found
        assert found["allowed"].data_ptr() == dense.allowed.data_ptr()
        part = QueriesAndKeys(range(10, 151), range(30, 331, 2), 151, 331)
        place = rg.Positions(at.q[10:], at.k[30::2])
        frame = Frame.of(141, 151, batch=(3,), heads=2, positions=place)
        found = lowering._lowered(None, mask_of_part(mask, part), frame, 2, (64, 128))
        assert "tiles" not in found and torch.equal(found["allowed"], dense.allowed[:, 10:, 30::2])
    assert "tiles" in lowering._lowered(None, dense & rg.Dense(dense.allowed[:1]), AT, AT.heads, (64, 128))


def test_a_tile_that_is_all_hidden_or_all_visible_has_no_bits() -> None:
    """Where cannot say so of a tile: its pairs do."""
    found = tile_map(MASKS["near"], 64)
    assert found["tiles"].tolist() == [[[-1, 0, 1], [-1, 2, 3], [-1, -1, 4]]]
    assert len(found["bits"]) == 5
    assert len(tile_map(MASKS["nothing"], 64)["bits"]) == 1
    assert (tile_map(MASKS["constant"], 64)["tiles"] == -2).all()
