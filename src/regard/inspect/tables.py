"""What a notebook shows of facts: a table of numbers with small pictures, and grids of layers × heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import regard.core.html as html
from regard.core.shapes import blocks, listed
from regard.inspect.facts.algebra import Fact

CELLS = 64  # of a small picture at most, each way
WIDTH, CELL, THIN = 192, 12, 6  # pixels at most: of a picture, of one cell of layers × heads, of a table's rows
FAINT = 1e-4  # the weight that has the least ink
EVEN = 1e-5  # of the largest number: a spread below is rounding
NONE = html.Markup("")


class Seen(Protocol):
    """The answers of one look: FactResults."""

    @property
    def lse(self) -> Tensor: ...
    @property
    def facts(self) -> tuple[Fact[Any], ...]: ...
    @property
    def headed(self) -> bool: ...
    def __getitem__(self, fact: Fact[Any], /) -> Any: ...


def facts_table(seen: Seen) -> html.Markup:
    """A row for the log-sum-exp and for each answer: its shape, its range, and a picture.

    Drawn is the first sequence: heads down and tokens across; of an answer with more axes, the mean over its heads, on
    a logarithmic scale where its numbers can be weights. Indices of keys are left out.
    """
    rows = [("lse", *_summary(seen, seen.lse)), *((name, *_summary(seen, part)) for name, part in _parts(seen))]
    return html.table(rows, ("fact", "shape", "least", "mean", "largest", "picture"))


def head_grids(layers: Mapping[str, Sequence[Seen]]) -> html.Markup:
    """The mean of each answer (*batch, heads, n) over all calls of a layer: a grid of layers × heads each."""
    grids: dict[str, list[list[float]]] = {}
    for number, calls in enumerate(layers.values()):
        for name, values in _head_means(calls).items():
            rows = grids.setdefault(name, [[]] * len(layers))
            rows[number] = values
    return html.side_by_side(*(head_grid(f"{name}, mean", rows) for name, rows in grids.items()))


def _head_means(calls: Sequence[Seen]) -> dict[str, list[float]]:
    found: dict[str, list[Tensor]] = {}
    for seen in calls:
        for name, part in _parts(seen):
            if part.dim() == seen.lse.dim() and part.dtype.is_floating_point:
                found.setdefault(name, []).append(part.double().movedim(-2, 0).flatten(1))
    return {name: _finite(torch.cat(parts, -1)).nanmean(-1).tolist() for name, parts in found.items()}


def _parts(seen: Seen) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the answers, by the fact and its name there; without integers beside others, which are indices."""
    for fact in seen.facts:
        answer = seen[fact]
        if isinstance(answer, Tensor):
            yield repr(fact), answer
        elif isinstance(answer, tuple):
            fields: Any = answer
            for name, part in fields._asdict().items():
                if part.dtype.is_floating_point:
                    yield f"{fact!r}.{name}", part


def _finite(values: Tensor) -> Tensor:
    """NaN for what is not finite, which no mean counts."""
    return values.masked_fill(~values.isfinite(), math.nan)


def _summary(seen: Seen, values: Tensor) -> tuple[str, ...]:
    rank, batch = seen.lse.dim(), seen.lse.dim() - (2 if seen.headed else 1)
    wide = _finite(values.detach().double())
    finite = wide[wide.isfinite()]
    if not len(finite):
        return listed(values.shape), "–", "–", "–", NONE
    least, most = (text_of(float(bound)) for bound in finite.aminmax())
    first = wide.flatten(0, batch - 1)[0] if batch else wide
    while first.dim() > 2:
        first = first.nanmean(0)
    cells = _pooled(first[None] if first.dim() == 1 else first)
    if values.dim() > rank and values.dtype.is_floating_point and finite.min() >= 0 and finite.max() <= 1:
        cells = cells.clamp(min=FAINT).log()
    drawn = heat(cells.tolist(), "the first sequence, heads down", THIN)
    return listed(values.shape), least, text_of(float(finite.mean())), most, drawn


def text_of(value: float) -> str:
    """As tables show it: four digits, – for what is not finite."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def _pooled(values: Tensor) -> Tensor:
    """(rows, columns) as CELLS × CELLS at most: means of what is finite."""
    for _ in range(2):
        n = values.shape[-1]
        pooled = [values[:, cell].nanmean(-1) for cell in blocks(n, max(math.ceil(n / CELLS), 1))]
        values = torch.stack(pooled) if pooled else values.mT
    return values


def heat(cells: Sequence[Sequence[float]], label: str, cell: int) -> html.Markup:
    """A picture of numbers, a cell's pixels at most: more ink is more, what is not finite has none."""
    low, high = _ends(cells)

    def ink(value: float) -> float:
        if not math.isfinite(value):
            return math.nan
        return 0.5 if low == high else (1 + (html.SHADES - 1) * (value - low) / (high - low)) / html.SHADES

    columns = max(map(len, cells), default=0)
    width, height = (n * min(max(WIDTH // max(n, 1), 1), cell) for n in (columns, len(cells)))
    return html.picture([[ink(value) for value in row] for row in cells], label, width, height)


def _ends(cells: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The ends of a scale: equal where the numbers differ by rounding alone."""
    finite = [value for row in cells for value in row if math.isfinite(value)]
    low, high = min(finite, default=math.nan), max(finite, default=math.nan)
    return (high, high) if high - low <= EVEN * max(abs(low), abs(high)) else (low, high)


def head_grid(title: str, cells: Sequence[Sequence[float]]) -> html.Markup:
    """A number a head: layers down, heads across; with the ends of its scale."""
    low, high = _ends(cells)
    scale = f"{text_of(low)} (faint) to {text_of(high)} (strong)" if low < high else f"{text_of(low)} throughout"
    return html.figure(title, heat(cells, f"{title}: layers down, heads across", CELL), scale)
