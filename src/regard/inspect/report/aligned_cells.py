"""Aligned cells: two long texts, cut at corresponding tokens, so that the cells of their maps can be compared."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.inspect.report.alignment import NONE, Alignment
from regard.inspect.report.axis import Axis
from regard.inspect.report.columns import cell_of_each
from regard.inspect.report.element import CELLS
from regard.inspect.report.layer import Layer


@dataclass(frozen=True)
class AlignedCells:
    """Where two texts are cut at corresponding tokens: cell n holds the tokens before[n] to before[n + 1] of one text.

    Of the other text it holds the tokens after[n] to after[n + 1]. Either part may be empty. Cells are equally long in
    the alignment of both texts, except that a cut is moved to the nearest place, within half a cell, where tokens that
    have a counterpart and tokens that have none meet.

    >>> def axis(text):
    ...     return Axis(torch.arange(len(text)), tuple(text))
    >>> cells = AlignedCells.of(axis("abcdefgh"), axis("XXXabcdefgh"), most=4)
    >>> cells.before, cells.after
    ((0, 0, 2, 5, 8), (0, 3, 5, 8, 11))
    """

    before: tuple[int, ...]
    after: tuple[int, ...]

    @staticmethod
    def of(before: Axis, after: Axis, most: int = CELLS) -> AlignedCells:
        """The cells of the tokens along one side of two maps, `most` of them at most."""
        alignment = Alignment.of(before, after)
        cuts = _cuts(alignment, most)
        found = (pad((of != NONE).cumsum(0), (1, 0))[cuts].tolist() for of in (alignment.before, alignment.after))
        first, second = map(tuple, found)
        return AlignedCells(first, second)

    @cached_property
    def alignment(self) -> Alignment:
        """Which cell of one map is which of the other; NONE where one text has no token in a cell."""
        return Alignment(_numbers(self.before), _numbers(self.after))

    def edges(self, side: str) -> Tensor:
        """Where each cell of a side, "before" or "after", begins, and the end; those without a token left out."""
        cuts = torch.tensor(self.before if side == "before" else self.after, dtype=torch.int64, device="cpu")
        return cuts.unique_consecutive()


def _cuts(alignment: Alignment, most: int) -> list[int]:
    """Where cells begin in the order of the alignment, and the end."""
    n = len(alignment)
    kind = torch.stack([alignment.before != NONE, alignment.after != NONE])
    meets = ((kind[:, 1:] != kind[:, :-1]).any(0).nonzero().flatten() + 1).tolist()
    count = min(n, most)
    even = [cell * n // count for cell in range(count + 1)]
    return sorted({even[0], *(_nearest(meets, cut, n / count / 2) for cut in even[1:-1]), n})


def _nearest(places: Sequence[int], wanted: int, within: float) -> int:
    """The nearest of sorted places, if one is that near; else the place that was wanted."""
    at = bisect_left(places, wanted)
    best = min(places[max(at - 1, 0) : at + 1], key=lambda place: abs(place - wanted), default=wanted)
    return best if abs(best - wanted) <= within else wanted


def _numbers(cuts: Sequence[int]) -> Tensor:
    """The number of each cell among those that hold a token; NONE for the others."""
    filled = torch.tensor(cuts, dtype=torch.int64, device="cpu").diff() > 0
    return (filled.cumsum(0) - 1).masked_fill(~filled, NONE)


def pooled(layer: Layer, row_edges: Tensor, col_edges: Tensor) -> Layer:
    """A layer without single weights, whose map has these cells: the mass on the keys of each, mean of its queries.

    Exact: from the weights of 256 queries at a time, so that memory is linear in the text.
    """
    rows, cols = len(row_edges) - 1, len(col_edges) - 1
    maps = torch.zeros(layer.heads, rows, cols, dtype=torch.float64, device="cpu")
    seen = torch.zeros(rows, cols, dtype=torch.float64, device="cpu")
    row, col = (cell_of_each(edges) for edges in (row_edges, col_edges))
    first = 0
    for weights, visible in layer.strips():
        here = row[first : first + weights.shape[1]]
        by_key = weights.new_zeros(*weights.shape[:2], cols, dtype=torch.float64).index_add_(2, col, weights.double())
        maps.index_add_(1, here, by_key)
        seen.index_add_(0, here, seen.new_zeros(len(here), cols).index_add_(1, col, visible.double()))
        first += len(here)
    return replace(
        layer,
        maps=(maps / row_edges.diff()[:, None]).float(),
        cells=seen > 0,
        weights=layer.weights[:, :0, :0],
        row_edges=row_edges,
        col_edges=col_edges,
    )


@dataclass(frozen=True, eq=False)
class AlignedLayers:
    """The layers of two reports on texts that differ, in cells of corresponding tokens.

    rows, cols     the cells of the queries and of the keys of each layer
    before, after  the layers, with maps of these cells
    """

    rows: tuple[AlignedCells, ...]
    cols: tuple[AlignedCells, ...]
    before: tuple[Layer, ...]
    after: tuple[Layer, ...]

    @staticmethod
    def of(before: Sequence[Layer], after: Sequence[Layer]) -> AlignedLayers | None:
        """None where texts are alike, share no token, or where their weights were not kept."""
        pairs = list(zip(before, after, strict=True))
        if all(a.queries.tokens == b.queries.tokens and a.keys.tokens == b.keys.tokens for a, b in pairs):
            return None
        if not all(layer.has_rows and layer.keys.tokens and layer.queries.tokens for layer in (*before, *after)):
            return None
        if not all(bool(Alignment.of(a.queries, b.queries).both.any()) for a, b in pairs):
            return None
        rows = tuple(AlignedCells.of(a.queries, b.queries) for a, b in pairs)
        cols = tuple(AlignedCells.of(a.keys, b.keys) for a, b in pairs)
        sides = (
            tuple(
                pooled(layer, row.edges(side), col.edges(side))
                for layer, row, col in zip(layers, rows, cols, strict=True)
            )
            for side, layers in (("before", before), ("after", after))
        )
        return AlignedLayers(rows, cols, *sides)
