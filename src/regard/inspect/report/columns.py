"""Column: a number that a Layer has for each head, query or key: how it is read, joined, written and shown.

The report's files, its page and the layers of several steps go through the columns of Layer: one that is added there
needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_type_hints

import torch
from torch import Tensor

from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.pooled import Cells
from regard.inspect.report.element import CELLS, HIDDEN, WEIGHTS, Element


@dataclass(frozen=True, eq=False)
class Column:
    """One tensor of a Layer.

    axes     of head, query, key, rank (of the heaviest keys), row and column (of the map)
    unit     what it counts in, in the report's files; None: it is not written
    fact     whose answer it is, and which of its tensors (`item`)
    read     how it is read else; `cut` says whether padding is to be left out of what that gives
    indices  its numbers are indices of keys, -1 for none
    joined   how those of several steps become one, where the axes do not say it: rows of queries follow each other, the
             numbers of keys are added up
    on_page  whether the page has it, in 65,535 steps from 0 to its largest number
    """

    axes: str
    unit: str | None = None
    fact: Fact[Any] | None = None
    item: int = 0
    read: Callable[[Element], Tensor] | None = None
    cut: bool = True
    indices: bool = False
    joined: Callable[[Joining], Tensor] | None = None
    on_page: bool = False

    def of(self, element: Element) -> Tensor:
        """The column of a call's batch element."""
        if self.read is None:
            assert self.fact is not None
            values = element[self.fact][self.item]
        else:
            values = self.read(element)
        if not self.cut:
            return values
        if self.indices:
            values = (values - element.cols.start).clamp(min=-1)
        (row, column), whole = element.cells, slice(None)
        spans = {"query": element.rows, "key": element.cols, "row": row, "column": column}
        return values[tuple(spans.get(axis, whole) for axis in self.axes.split(", "))]


def columns_of(kind: type) -> dict[str, Column]:
    """The columns of a class of layers, by their names."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: c for name, hint in hints for c in getattr(hint, "__metadata__", ()) if isinstance(c, Column)}


@dataclass(frozen=True, eq=False)
class Joining:
    """Layers of the steps of one layer, first to last, that become one of nq queries and nk keys.

    places  of each step, which of all keys its keys are
    """

    layers: Sequence[Any]
    places: Sequence[Tensor]
    nq: int
    nk: int

    def join(self, name: str, column: Column) -> Tensor:
        """A column of all steps."""
        if column.joined is not None:
            return column.joined(self)
        values: list[Tensor] = [getattr(layer, name) for layer in self.layers]
        if column.indices:
            values = [_at(keys, place) for keys, place in zip(values, self.places, strict=True)]
        axes = column.axes.split(", ")
        return torch.cat(values, axes.index("query")) if "query" in axes else _summed(values, self.places, self.nk)

    @cached_property
    def maps(self) -> tuple[Tensor, Tensor]:
        """The pooled weights, and the cells with a visible pair."""
        return _joined_maps(self.layers, self.places, self.nq, self.nk)


def joined_weights(steps: Joining) -> Tensor:
    """Every weight of all steps, where each has its own and together they are no more than those of one call."""
    layers, places, nq, nk = steps.layers, steps.places, steps.nq, steps.nk
    heads, whole = layers[0].heads, all(layer.weights.numel() for layer in layers)
    if not whole or max(nq, nk) > WEIGHTS.limit:
        return layers[0].weights.new_zeros(heads, 0, 0)
    rows = list[Tensor]()
    for layer, place in zip(layers, places, strict=True):
        hidden = layer.weights.new_full((heads, layer.weights.shape[1], nk), HIDDEN)
        rows.append(hidden.index_copy_(2, place, layer.weights))
    return torch.cat(rows, 1)


def cell_edges(n: int) -> Tensor:
    """Where each of the cells of a map of n tokens begins, and the end."""
    cells = Cells.of(n, CELLS)
    return torch.tensor(
        [cells.tokens(cell).start for cell in range(cells.count)] + [n], dtype=torch.int64, device="cpu"
    )


def _at(keys: Tensor, place: Tensor) -> Tensor:
    """Indices among a step's keys as indices among all; what is none of them (-1, or their number) stays apart."""
    real = (keys >= 0) & (keys < len(place))
    return torch.where(real, place[keys.clamp(0, len(place) - 1)], keys.clamp(max=-1))


def _summed(values: Sequence[Tensor], places: Sequence[Tensor], keys: int) -> Tensor:
    """(h, nk) of each step, added up over all keys."""
    total = values[0].new_zeros(len(values[0]), keys)
    for of_step, place in zip(values, places, strict=True):
        total.index_add_(1, place, of_step)
    return total


def _joined_maps(layers: Sequence[Any], places: Sequence[Tensor], nq: int, nk: int) -> tuple[Tensor, Tensor]:
    """The pooled weights and the cells with a visible pair of all steps, in CELLS × CELLS cells at most."""
    rows, cols = min(nq, CELLS), min(nk, CELLS)
    total = layers[0].maps.new_zeros(layers[0].heads, rows, cols)
    size, some = total.new_zeros(*total.shape[:2], 1), torch.zeros(rows, cols, dtype=torch.int64, device="cpu")
    start = 0
    for layer, place in zip(layers, places, strict=True):
        row_of, cell_of = cell_of_each(layer.row_edges), cell_of_each(layer.col_edges)
        column, width = place * cols // nk, layer.col_edges.diff()[cell_of]
        spread = total.new_zeros(*layer.maps.shape[:2], cols).index_add_(2, column, layer.maps[..., cell_of] / width)
        seen = some.new_zeros(len(layer.cells), cols).index_add_(1, column, layer.cells[:, cell_of].long())
        row = (start + torch.arange(len(row_of), dtype=torch.int64, device="cpu")) * rows // nq
        sees = (layer.counts > 0)[..., None].to(total.dtype)
        total.index_add_(1, row, spread[:, row_of] * sees)
        size.index_add_(1, row, sees)
        some.index_add_(0, row, seen[row_of])
        start += len(row_of)
    return total / size.clamp(min=1), some > 0


def cell_of_each(edges: Tensor) -> Tensor:
    """The number of the cell that each token lies in."""
    return torch.arange(len(edges) - 1, dtype=torch.int64, device="cpu").repeat_interleave(edges.diff())
