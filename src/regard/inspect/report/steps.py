"""Steps: calls of one layer that continue each other, as those of `generate` do, and the one layer that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.core.region import Frame
from regard.inspect.kinds import Kind
from regard.inspect.report.axis import Axis
from regard.inspect.report.columns import Joining
from regard.inspect.report.element import Looked
from regard.inspect.report.layer import COLUMNS, Layer


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
    def kind(self) -> Kind:
        return self.calls[0].kind

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

    @property
    def assumed(self) -> bool:
        """Whether queries fewer than the keys count as the last tokens of one sequence, for want of anything said.

        Positions that a mask compares were given with the call; and keys that grow with each step are those of a cache.
        """
        first, last = self.calls[0].view, self.calls[-1].view
        grows = last.frame.nk > first.frame.nk
        return not (first.mask.compares_positions() or grows) and last_by_default(first.frame)

    def continued_by(self, call: Looked) -> bool:
        """Whether a call's queries follow: at the next position, or alone before keys of which a cache dropped some."""
        frame = call.view.frame
        start, last = int(frame.positions.q[..., 0].amin()), self.calls[-1].view.frame
        if (frame.batch, frame.heads) != (last.batch, last.heads):
            return False
        return start == self.end + 1 or (frame.nq == 1 < frame.nk <= last.nk and start <= self.end)


def in_steps(calls: Iterable[Looked], crosses: Callable[[Looked], bool], texts: int = 0) -> list[Steps]:
    """The calls of a model, those together that are steps of one layer, in the order of their first calls.

    A layer whose weights several places share is called once for each: these do not follow each other, and stay apart.
    Cross-attention continues where the self-attention of its queries does: its keys are the same each time, and say
    nothing of where a query stands. That self-attention is the last one before it, or, where the first call of a layer
    finds none with as many queries, the next one behind it, before the layer is called again. Where there is neither,
    it continues until it has had as many queries as there are texts.

    crosses  whether a call is cross-attention
    """
    steps = _StepsOfLayers(texts)
    waiting: dict[str, tuple[int, Looked]] = {}  # cross-attention whose queries have not been seen, by layer
    waits = dict[str, bool]()  # by layer, whether its self-attention comes behind it
    for n, call in enumerate(calls):
        nq = call.view.frame.nq
        if not crosses(call):
            steps.add(n, call)
            for name in [name for name, (_, one) in waiting.items() if one.view.frame.nq == nq]:
                waits[name] = True
                steps.add_cross(*waiting.pop(name))
            continue
        if call.name in waiting:
            waits[call.name] = False
            steps.add_cross(*waiting.pop(call.name), alone=True)
        if waits.setdefault(call.name, nq != steps.queries):
            waiting[call.name] = n, call
        else:
            steps.add_cross(n, call)
    for n, call in waiting.values():
        steps.add_cross(n, call, alone=True)
    return [one for _, one in sorted(steps.found, key=lambda found: found[0])]


class _StepsOfLayers:
    """Takes calls one by one. texts: how many a cross-attention has at most, if nothing else says where it ends.

    found     the steps, with the place of their first call among all
    queries, begin, continuing  of the last self-attention: how many it has, where they begin, whether they continue
    """

    def __init__(self, texts: int) -> None:
        self.texts, self.found = texts, list[tuple[int, Steps]]()
        self.queries, self.begin, self.continuing = 0, 0, False
        self._of_layer = dict[tuple[str, bool], list[Steps]]()

    def add(self, n: int, call: Looked) -> None:
        """Takes a call of self-attention, the n-th of all."""
        steps = self._last(call, False)
        self.continuing = steps is not None and steps.continued_by(call)
        self.queries = call.view.frame.nq
        self.begin = steps.end + 1 if steps is not None and self.continuing else _first_position(call)
        self._put(n, call, False, self.continuing, self.begin)

    def add_cross(self, n: int, call: Looked, alone: bool = False) -> None:
        """Takes a call of cross-attention. alone: no self-attention of its queries was seen."""
        frame, steps = call.view.frame, self._last(call, True)
        if not alone and frame.nq == self.queries:
            return self._put(n, call, True, self.continuing, self.begin)
        continuing = steps is not None and steps.sizes[0] + frame.nq <= self.texts
        start = _first_position(call)
        if last_by_default(frame):
            start = steps.end + 1 if steps is not None and continuing else 0
        self._put(n, call, True, continuing, start)

    def _last(self, call: Looked, cross: bool) -> Steps | None:
        return min(self._of_layer.get((call.name, cross), ()), key=lambda one: len(one.calls), default=None)

    def _put(self, n: int, call: Looked, cross: bool, continuing: bool, start: int) -> None:
        earlier, steps = self._of_layer.setdefault((call.name, cross), []), self._last(call, cross)
        if steps is None or not continuing:
            if any(len(one.calls) > 1 for one in earlier):
                earlier.clear()  # another text begins
            steps = Steps(cross=cross)
            self.found.append((n, steps))
            earlier.append(steps)
        steps.add(call, start)


def _first_position(call: Looked) -> int:
    frame = call.view.frame
    return int(frame.positions.q[..., :1].amin()) if frame.nq else 0


def last_by_default(frame: Frame) -> bool:
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
    joining = Joining(layers, places, len(queries), len(keys))
    nq, nk = steps.sizes
    begin = steps.start if len(tokens) == nq or cross else int(keys[0])  # where the first of the texts stands
    texts = tuple(tokens) if len(tokens) == nq or (len(tokens) == nk and not cross) else ()
    return replace(
        first,
        queries=Axis(queries, _named(queries - begin, texts)),
        keys=first.keys if cross else Axis(keys, _named(keys - begin, texts)),
        **{name: joining.join(name, column) for name, column in COLUMNS.items()},
        kept=sum(layer.kept for layer in layers),
        calls=tuple(
            replace(call, places=place) for layer, place in zip(layers, places, strict=True) for call in layer.calls
        ),
    )


def _named(index: Tensor, texts: tuple[str, ...]) -> tuple[str, ...]:
    """The texts with these numbers; none where one of them has no text."""
    there = bool(((index >= 0) & (index < len(texts))).all())
    return tuple(texts[n] for n in index.tolist()) if there else ()
