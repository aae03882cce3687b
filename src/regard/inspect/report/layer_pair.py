"""LayerPair: a layer before and after, on rows and columns that correspond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.inspect.facts.pooled import Cells
from regard.inspect.report.alignment import Alignment
from regard.inspect.report.layer import Layer


@dataclass(frozen=True, eq=False)
class LayerPair:
    """The weights of two layers, with the alignment of their queries and of their keys.

    p, q        (h, nq, nk), the weights before and after, of tokens or of cells; 0 where a key may not be seen
    rows, cols  which query of one is which of the other, and which key
    """

    p: Tensor
    q: Tensor
    rows: Alignment
    cols: Alignment

    def moved(self, head: int, other: int) -> Tensor:
        """The weight after less the weight before, (rows, cols): of one head before and `other` after.

        A key that one text lacks has no weight there. NaN where a query has no counterpart.
        """
        p, q = self.aligned
        return (q[other] - p[head]).masked_fill(~self.rows.both[:, None], torch.nan)

    @cached_property
    def aligned(self) -> tuple[Tensor, Tensor]:
        """The weights before and after on the rows and columns of the alignment, both (h, rows, cols)."""
        # A last row and column of zeros stand for what has no counterpart: index -1.
        p, q = (pad(weights.float(), (0, 1, 0, 1)) for weights in (self.p, self.q))
        return p[:, self.rows.before][..., self.cols.before], q[:, self.rows.after][..., self.cols.after]

    def change(self, head: int, other: int) -> float:
        """The mean over rows of ½ Σ_c |q_rc - p_rc|: the share of the mass of a head before that `other` has elsewhere.

        Rows count that have a counterpart and see a key; NaN where weights of one are that.
        """
        p, q = self.aligned[0][head], self.aligned[1][other]
        seen = ((p + q).sum(-1) != 0) & self.rows.both
        return float((p - q)[seen].abs().sum() / 2 / seen.sum().clamp(min=1))


def of_tokens(before: Layer, after: Layer) -> LayerPair:
    """Two layers token by token; both have every weight (see `has_every_weight`)."""
    return LayerPair(_every(before), _every(after), *by_token(before, after))


def by_token(before: Layer, after: Layer) -> tuple[Alignment, Alignment]:
    """Which query of one layer is which of the other, and which key."""
    return Alignment.of(before.queries, after.queries), Alignment.of(before.keys, after.keys)


def by_cell(before: Layer, after: Layer) -> tuple[Alignment, Alignment]:
    """The same of the cells of two maps of one size (see `in_cells`)."""
    rows, cols = before.maps.shape[-2:]
    assert after.maps.shape[-2:] == (rows, cols)
    return Alignment.of_cells(rows), Alignment.of_cells(cols)


def has_every_weight(layer: Layer) -> bool:
    """Whether each weight of a layer is known, up to 512 queries and keys."""
    return layer.weights.numel() > 0


def _every(layer: Layer) -> Tensor:
    """Every weight, (h, nq, nk), as exact as the layer has it."""
    single = layer.maps.shape[-2:] == (len(layer.queries), len(layer.keys))
    return layer.maps if single else layer.every_weight()


def in_cells(before: Sequence[Layer], after: Sequence[Layer]) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """The layers without single weights, each with a map of as many cells as its counterpart's: the fewer of both."""
    sizes = [
        tuple(min(a.maps.shape[axis], b.maps.shape[axis]) for axis in (-2, -1))
        for a, b in zip(before, after, strict=True)
    ]
    first, second = (
        tuple(_pooled(layer, rows, cols) for layer, (rows, cols) in zip(layers, sizes, strict=True))
        for layers in (before, after)
    )
    return first, second


def _pooled(layer: Layer, rows: int, cols: int) -> Layer:
    """A layer whose map has fewer cells: the mass on the keys of each, mean of its queries."""
    count, width = layer.maps.shape[-2:]
    of_row, of_col = Cells(count, rows), Cells(width, cols)
    down, across = of_row.members(slice(0, count), layer.maps), of_col.members(slice(0, width), layer.maps)
    return replace(
        layer,
        maps=(down / down.sum(0)).mT @ layer.maps @ across,
        cells=(down.mT @ layer.cells.to(down.dtype) @ across) > 0,
        weights=layer.weights[:, :0, :0],
        row_edges=_edges(layer.row_edges, of_row),
        col_edges=_edges(layer.col_edges, of_col),
    )


def _edges(edges: Tensor, cells: Cells) -> Tensor:
    """Where each of fewer cells begins, and the end, in tokens."""
    starts = [cells.tokens(cell).start for cell in range(cells.count)]
    return edges[[*starts, cells.n]]
