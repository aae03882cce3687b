"""Steps: calls of one layer that continue each other, as those of `generate` do, and the one layer that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.core.region import Frame
from regard.inspect.facts.pooled import Cells
from regard.inspect.report.axis import Axis
from regard.inspect.report.layer import CELLS, HIDDEN, WEIGHTS, Layer, Looked
from regard.inspect.stacks import reads_another


@dataclass(eq=False)
class Steps:
    """Calls of one layer, first to last.

    shifts  what is to be added to the positions of each call: where a cache drops keys, they count from those it has
    start   the position of the first query
    end     the position of the last
    cross   whether the keys are those of another sequence
    """

    calls: list[Looked] = field(default_factory=list[Looked])
    shifts: list[int] = field(default_factory=list[int])
    start: int = 0
    end: int = -1
    cross: bool = False

    @property
    def name(self) -> str:
        return self.calls[0].name

    @property
    def sizes(self) -> tuple[int, int]:
        """How many queries and keys there are in all."""
        frames = [call.view.frame for call in self.calls]
        return sum(frame.nq for frame in frames), max(frame.nk for frame in frames)

    def add(self, call: Looked, first: int) -> None:
        """Takes one more call, whose first query stands at that position."""
        q = call.view.frame.positions.q
        if not self.calls:
            self.start = first
        if q.numel():
            self.shifts.append(first - int(q[..., 0].amin()))
            self.end = int(q[..., -1].amax()) + self.shifts[-1]
        self.calls.append(call)

    def continued_by(self, call: Looked) -> bool:
        """Whether a call's queries follow: at the next position, or alone before keys of which a cache dropped some."""
        frame = call.view.frame
        start, last = int(frame.positions.q[..., 0].amin()), self.calls[-1].view.frame
        if (frame.batch, frame.heads) != (last.batch, last.heads):
            return False
        return start == self.end + 1 or (frame.nq == 1 < frame.nk <= last.nk and start <= self.end)


def _by_name(call: Looked) -> bool:
    return reads_another(call.name)


def in_steps(calls: Iterable[Looked], crosses: Callable[[Looked], bool] = _by_name, texts: int = 0) -> list[Steps]:
    """The calls of a model, those together that are steps of one layer, in the order of their first calls.

    A layer whose weights several places share is called once for each: these do not follow each other, and stay apart.
    Cross-attention continues where the self-attention before it does, and its queries are those: its keys are the same
    each time, and say nothing of where a query stands. Where no such self-attention is seen, it continues until it has
    had as many queries as there are texts.

    crosses  whether a call is cross-attention
    """
    found, of_layer = list[Steps](), dict[tuple[str, bool], list[Steps]]()
    queries, begin, continuing = 0, 0, False  # of the last self-attention
    for call in calls:
        cross, frame = crosses(call), call.view.frame
        earlier = of_layer.setdefault((call.name, cross), [])
        start = int(frame.positions.q[..., :1].amin()) if frame.nq else 0
        steps = min(earlier, key=lambda one: len(one.calls), default=None)
        if not cross:
            continuing = steps is not None and steps.continued_by(call)
            queries, begin = frame.nq, steps.end + 1 if steps is not None and continuing else start
        elif frame.nq != queries:  # no self-attention of these queries was seen
            continuing = steps is not None and steps.sizes[0] + frame.nq <= texts
            if _last_by_default(frame):
                start = steps.end + 1 if steps is not None and continuing else 0
        if steps is None or not continuing:
            if any(len(one.calls) > 1 for one in earlier):
                earlier.clear()  # another text begins
            steps = Steps(cross=cross)
            found.append(steps)
            earlier.append(steps)
        steps.add(call, begin if frame.nq == queries else start)
    return found


def _last_by_default(frame: Frame) -> bool:
    """Whether queries stand at the end of the keys, which is assumed where no positions are given."""
    q, k = frame.positions.q, frame.positions.k
    return 0 < frame.nq < frame.nk and bool((q[..., -1] == k[..., -1]).all())


def merged(layers: Sequence[Layer], steps: Steps, tokens: Sequence[str]) -> Layer:
    """One layer from those of its steps: the queries of all, on all keys that they had; `tokens` are these queries'.

    A map of more than CELLS queries or keys is coarser than that of one call: the weight of a step's cell counts as
    spread evenly over its queries and keys, where the cells of the whole divide them otherwise.
    """
    first, shifts = layers[0], steps.shifts
    if len(layers) == 1:
        return replace(first, queries=replace(first.queries, positions=first.queries.positions + shifts[0]))
    cross = steps.cross
    stands = [layer.keys.positions + (0 if cross else shift) for layer, shift in zip(layers, shifts, strict=True)]
    keys = torch.cat(stands).unique()
    places = [torch.searchsorted(keys, each) for each in stands]
    queries = torch.cat([layer.queries.positions + shift for layer, shift in zip(layers, shifts, strict=True)])
    maps, cells = _joined_maps(layers, places, len(queries), len(keys))
    nq, nk = steps.sizes
    begin = steps.start if len(tokens) == nq or cross else int(keys[0])  # where the first of the texts stands
    texts = tuple(tokens) if len(tokens) == nq or (len(tokens) == nk and not cross) else ()
    return replace(
        first,
        queries=Axis(queries, _named(queries - begin, texts)),
        keys=first.keys if cross else Axis(keys, _named(keys - begin, texts)),
        entropy=torch.cat([layer.entropy for layer in layers], -1),
        max_score=torch.cat([layer.max_score for layer in layers], -1),
        top_keys=torch.cat([_at(one.top_keys, place) for one, place in zip(layers, places, strict=True)], 1),
        top_weights=torch.cat([layer.top_weights for layer in layers], 1),
        received=_summed([layer.received for layer in layers], places, len(keys)),
        readers=_summed([layer.readers for layer in layers], places, len(keys)),
        counts=torch.cat([layer.counts for layer in layers], -1),
        earliest=torch.cat([_at(one.earliest, place) for one, place in zip(layers, places, strict=True)]),
        latest=torch.cat([_at(one.latest, place) for one, place in zip(layers, places, strict=True)]),
        own=torch.cat([_at(one.own, place) for one, place in zip(layers, places, strict=True)]),
        maps=maps,
        cells=cells,
        weights=_joined_weights(layers, places, len(queries), len(keys)),
        row_edges=_edges(len(queries)),
        col_edges=_edges(len(keys)),
        kept=sum(layer.kept for layer in layers),
        calls=tuple(
            replace(call, places=place) for layer, place in zip(layers, places, strict=True) for call in layer.calls
        ),
    )


def _named(index: Tensor, texts: tuple[str, ...]) -> tuple[str, ...]:
    """The texts with these numbers; none where one of them has no text."""
    there = bool(((index >= 0) & (index < len(texts))).all())
    return tuple(texts[n] for n in index.tolist()) if there else ()


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


def _joined_maps(layers: Sequence[Layer], places: Sequence[Tensor], nq: int, nk: int) -> tuple[Tensor, Tensor]:
    """The pooled weights and the cells with a visible pair of all steps, in CELLS × CELLS cells at most."""
    rows, cols = min(nq, CELLS), min(nk, CELLS)
    total = layers[0].maps.new_zeros(layers[0].heads, rows, cols)
    size, some = total.new_zeros(*total.shape[:2], 1), torch.zeros(rows, cols, dtype=torch.int64, device="cpu")
    start = 0
    for layer, place in zip(layers, places, strict=True):
        row_of, cell_of = _cell_of(layer.row_edges), _cell_of(layer.col_edges)
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


def _joined_weights(layers: Sequence[Layer], places: Sequence[Tensor], nq: int, nk: int) -> Tensor:
    """Every weight of all steps, where each has its own and together they are no more than those of one call."""
    heads, whole = layers[0].heads, all(layer.weights.numel() for layer in layers)
    if not whole or max(nq, nk) > WEIGHTS.limit:
        return layers[0].weights.new_zeros(heads, 0, 0)
    rows = list[Tensor]()
    for layer, place in zip(layers, places, strict=True):
        hidden = layer.weights.new_full((heads, layer.weights.shape[1], nk), HIDDEN)
        rows.append(hidden.index_copy_(2, place, layer.weights))
    return torch.cat(rows, 1)


def _cell_of(edges: Tensor) -> Tensor:
    """The cell of each token."""
    return torch.arange(len(edges) - 1, dtype=torch.int64, device="cpu").repeat_interleave(edges.diff())


def _edges(n: int) -> Tensor:
    cells = Cells.of(n, CELLS)
    return torch.tensor(
        [cells.tokens(cell).start for cell in range(cells.count)] + [n], dtype=torch.int64, device="cpu"
    )
