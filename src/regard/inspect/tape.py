"""Tape: what was recorded of a model, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import regard.core.html as html
from regard.call.hooks import AttentionCall
from regard.core.functions import with_bound
from regard.core.positions import Positions, head, tail
from regard.core.shapes import count_of
from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.inputs import CallFact
from regard.inspect.kinds import Kind
from regard.inspect.look_tensors import survey
from regard.inspect.results import FactResults
from regard.inspect.stacks import places
from regard.inspect.tables import facts_table, head_grids
from regard.masks.algebra import Mask, View
from regard.masks.picture import picture

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Recorded:
    """One attention call of a model.

    name             the path of its layer in the model, as named_modules gives it (the model itself: its class)
    number           0 for the first call of that name, 1 for the second, ...
    layer            the class of the layer
    q_shape, k_shape (*batch, h, nq, dk) and (*batch, hk, nk, dk), or without h where the model calls it so
    view             the mask, with positions, sizes, batch and heads of the call: view.dense(), view.counts(), ...
    seen             the facts, (*batch, h, ...), h = 1 where q has no head axis; call[fact] is short for seen[fact]
    kind             "self", "encoder" (self-attention in the encoder of a model whose decoder reads it), "cross", or
                     "unknown": by what the layer was called with; a module's name decides nothing
    """

    name: str
    number: int
    layer: str
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    view: View
    seen: FactResults
    kind: Kind

    def __getitem__(self, fact: Fact[T]) -> T:
        return self.seen[fact]

    def __repr__(self) -> str:
        return f"Recorded({self.name}, call {self.number}, {self.layer}, q {self.q_shape}, k {self.k_shape})"

    def _repr_html_(self) -> str:
        """Its facts and its mask for a notebook."""
        title = f"{self.name}, call {self.number} ({self.layer})"
        return html.panel(title, facts_table(self.seen), html.quiet(repr(self.view.mask)), picture(self.view))


class Tape:
    """The calls of one recording, in the order in which they were made: `calls`; `tape[name]` those of one layer.

    unseen  the names of modules called attention that ran and made no call that can be seen
    """

    def __init__(self, facts: tuple[Fact[Any], ...]) -> None:
        self.facts = facts
        self.unseen: tuple[str, ...] = ()
        self._calls = list[Recorded]()
        self._count = Counter[str]()
        self._masks = list[Tensor]()
        self._positions = head(0, 0)  # those of the last call that had tensors: of no call yet

    @property
    def calls(self) -> tuple[Recorded, ...]:
        """Every recorded call, first to last."""
        return tuple(self._calls)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers that were called, each once, in the order of their first calls."""
        return tuple(dict.fromkeys(call.name for call in self._calls))

    @property
    def places(self) -> dict[str, str]:
        """What reports call each layer, by its name: "L0"; "encoder L0", "decoder cross L0" where a model has both.

        "cross" stands where a call's kind is known to be that; "encoder" and "decoder" come from the layer's path.

        A layer whose weights several places of a model share counts once.
        """
        cross = {call.name for call in self._calls if call.kind == "cross"}
        return dict(zip(self.names, places(self.names, [name in cross for name in self.names]), strict=True))

    def __getitem__(self, name: str) -> tuple[Recorded, ...]:
        found = tuple(call for call in self._calls if call.name == name)
        if not found:
            raise KeyError(f"{name!r} is no layer that was called; these were: {', '.join(self.names)}.")
        return found

    def __iter__(self) -> Iterator[Recorded]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        return (
            f"Tape({count_of(len(self), 'call')} of {count_of(len(self.names), 'layer')}: "
            f"{', '.join(map(repr, self.facts))})"
        )

    def _repr_html_(self) -> str:
        """Its layers for a notebook: a row each, and a grid of layers × heads for each fact."""
        grids = head_grids({name: [call.seen for call in self[name]] for name in self.names})
        rows = [_row(place, self[name]) for name, place in self.places.items()]
        head = ("", "layer", "class", "calls", "first: queries × keys", "heads", "mask")
        return html.panel(
            f"Tape, {count_of(len(self), 'call')} of {count_of(len(self.names), 'layer')}",
            html.table(rows, head),
            grids,
        )

    def add(self, name: str, layer: str, call: AttentionCall, kind: Kind) -> None:
        """Looks at a call and keeps what is seen."""
        # functions as they are now: the model may assign the variables that they read before somebody asks
        score, mask = with_bound(call.score), self._shared(with_bound(call.mask))
        call = replace(call, score=score, mask=mask, positions=self._own_positions(_standing(call)))
        number = self._count[name]
        self._count[name] += 1
        asked = tuple(fact for fact in self.facts if not isinstance(fact, CallFact))
        seen, looked = survey(call.q, call.k, asked, call.score, call.mask, call.positions, call.sink)
        of_call = {fact: fact.of_call(call, name, number) for fact in self.facts if isinstance(fact, CallFact)}
        if of_call:
            seen = FactResults(seen.lse, {fact: seen[fact] for fact in asked} | of_call, seen.key_heads)
        view = View(call.mask, looked.problem.frame)
        self._calls.append(Recorded(name, number, layer, tuple(call.q.shape), tuple(call.k.shape), view, seen, kind))

    def _shared(self, mask: Mask) -> Mask:
        """The mask around tensors of our own, one for all calls that bring the same: most models have one for all."""
        return mask.with_tensors(iter([self._own(t) for t in mask.tensors()]))

    def _own_positions(self, positions: Positions) -> Positions:
        """Positions of our own, those of the last call where they are the same: the layers of a model share them."""
        if positions.span is not None:  # numbers, which nobody writes into
            return positions
        if positions != self._positions:
            self._positions = positions.with_tensors(iter([t.detach().clone() for t in positions.tensors()]))
        return self._positions

    def _own(self, t: Tensor) -> Tensor:
        for own in self._masks:
            if own.shape == t.shape and own.dtype == t.dtype and own.device == t.device and torch.equal(own, t):
                return own
        own = t.detach().clone()  # the model's own may be a buffer that it writes into for the next call
        self._masks.append(own)
        return own


def _standing(call: AttentionCall) -> Positions:
    """Where nothing says it: queries fewer than the keys are the last ones, as in decoding; or both count from 0."""
    nq, nk = call.q.shape[-2], call.k.shape[-2]
    if call.positions is not None:
        return call.positions
    return (tail if nq < nk else head)(nq, nk, call.q.device)


def _row(place: str, calls: tuple[Recorded, ...]) -> tuple[str, ...]:
    """Of the first of a layer's calls, and how many there are."""
    first, frame = calls[0], calls[0].view.frame
    size = f"{frame.nq:,} × {frame.nk:,}"
    return place, first.name, first.layer, f"{len(calls):,}", size, str(frame.heads), repr(first.view.mask)
