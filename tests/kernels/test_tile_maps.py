"""Masks as maps of tiles say what the masks say, pair by pair, whatever the strips in which they are compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.backends.native import lower_mask as lowering

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
    return lowering._lower(mask, AT, AT.heads, (queries, 128))


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


def test_a_tile_that_is_all_hidden_or_all_visible_has_no_bits() -> None:
    """Where cannot say so of a tile: its pairs do."""
    found = tile_map(MASKS["near"], 64)
    assert found["tiles"].tolist() == [[[-1, 0, 1], [-1, 2, 3], [-1, -1, 4]]]
    assert len(found["bits"]) == 5
    assert len(tile_map(MASKS["nothing"], 64)["bits"]) == 1
    assert (tile_map(MASKS["constant"], 64)["tiles"] == -2).all()
