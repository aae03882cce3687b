"""How facts look on paper: the pooled map of one head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from regard.masks.algebra import View


def possible(view: View, rows: int, cols: int) -> Tensor:
    """Which cells of a rows × cols Map hold a visible pair, of any batch element and head: boolean (rows, cols)."""
    frame = view.frame
    row_of = torch.arange(frame.nq) * rows // max(frame.nq, 1)
    col_of = torch.arange(frame.nk) * cols // max(frame.nk, 1)
    found = torch.zeros(rows, cols, dtype=torch.int64)
    for strip in frame.tiling(256, 256).row_blocks:
        seen = view.mask.visible(frame.region(strip)).expand(
            *frame.batch, frame.heads, strip.stop - strip.start, frame.nk
        )
        any_seen = seen.flatten(0, -3).any(0).long()
        found.index_add_(
            0, row_of[strip], torch.zeros(len(any_seen), cols, dtype=torch.int64).index_add_(1, col_of, any_seen)
        )
    return found > 0


def save_map(path: Path, pooled: Tensor, reachable: Tensor, title: str, queries: int, keys: int) -> None:
    """Writes a pooled map (rows, cols) as a picture, its format by suffix: logarithmic colours, grey where no pair can
    be.

    Axes count the queries and keys of the sequence; the bar says what the numbers are.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    FigureCanvasAgg(figure)  # no display and no global state: pyplot would bring both
    axes = figure.add_subplot()
    shown = pooled.clamp(min=1e-6).masked_fill(~reachable, torch.nan)
    axes.set_facecolor("0.85")
    image = axes.imshow(
        shown.tolist(), norm=LogNorm(1e-4, 1), cmap="viridis", extent=(0, keys, queries, 0), interpolation="nearest"
    )
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    figure.colorbar(image, label="weight on the cell's keys, mean of its queries", extend="min")
    figure.savefig(path, dpi=150)
