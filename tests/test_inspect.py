"""How facts are shown: text grids, and the picture of a pooled map."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard as rg
from regard.inspect.plot import possible, save_map
from regard.inspect.text import block, grid, side_by_side


def test_blocks_keep_to_their_ends() -> None:
    assert block(-3.0, 0, 1) == block(0.0, 0, 1) == "▁"
    assert block(9.0, 0, 1) == block(1.0, 0, 1) == "█"
    assert block(5.0, 2, 2) == "▁"


def test_grid_has_a_line_a_layer_and_a_block_a_head() -> None:
    lines = grid("x", [[0.0] * 11, [1.0] * 11, [0.5] * 11], 0, 1, "")
    assert lines[1].split() == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "0"]
    assert [line.split()[0] for line in lines[2:]] == ["L0", "L1", "L2"]
    assert lines[3].split()[1:] == ["█"] * 11


def test_pictures_of_unequal_height_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        side_by_side(["a", "b"], ["c"])


@pytest.mark.parametrize("mask", [rg.Causal(), rg.Window(before=3, after=1), rg.Lengths(keys=torch.tensor([5, 11]))])
def test_possible_cells_are_those_with_a_visible_pair(mask: rg.Mask) -> None:
    n, rows, cols = 23, 5, 7
    view = mask.on(n)
    dense = view.dense().expand(*view.frame.shape).flatten(0, -3).any(0)
    row_of, col_of = torch.arange(n) * rows // n, torch.arange(n) * cols // n
    expected = [[bool(dense[row_of == a][:, col_of == b].any()) for b in range(cols)] for a in range(rows)]
    assert possible(view, rows, cols).tolist() == expected


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_map_is_written_by_suffix(tmp_path: Path, suffix: str) -> None:
    pooled = torch.full((8, 8), 1 / 8).tril()
    path = tmp_path / f"map.{suffix}"
    save_map(path, pooled, possible(rg.Causal().on(80), 8, 8), "a head", 80, 80)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")


def test_hidden_cells_have_a_colour_of_their_own(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "map.png"
    save_map(path, torch.zeros(4, 4), possible(rg.Causal().on(16), 4, 4), "a head", 16, 16)
    image = torch.from_numpy(imread(path).copy())[..., :3]
    grey = (image - 0.85).abs().amax(-1) < 0.01
    darkest = (image - torch.tensor([0.267, 0.005, 0.329])).abs().amax(-1) < 0.01  # viridis at its low end: weight 0
    assert 0.5 < float(grey.sum() / darkest.sum()) < 0.7  # 6 of 16 cells are hidden, 10 are not
