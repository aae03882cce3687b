"""Element: the answers of one call for one batch element, from which a Layer is made, padding left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.core.wrong_calls import kind_of
from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.keys import Readers
from regard.inspect.facts.pooled import Cells, Map
from regard.inspect.facts.quantised import Quantised
from regard.inspect.facts.rows import Top, Visible
from regard.inspect.kinds import Kind
from regard.inspect.report.reach import Reach, visible
from regard.inspect.results import FactResults
from regard.masks.algebra import View

CELLS = 128
TOP, MAP, WEIGHTS = Top(4), Map(CELLS, CELLS), Quantised(512)
HIDDEN = 255  # in place of a weight, where a query may not see a key


@runtime_checkable
class Looked(Protocol):
    """One call that was looked at: the layer's name, the answers to FACTS, its mask on its frame, and its kind."""

    @property
    def name(self) -> str: ...
    @property
    def seen(self) -> FactResults: ...
    @property
    def view(self) -> View: ...
    @property
    def kind(self) -> Kind: ...


def checked_calls(calls: Iterable[Looked]) -> list[Looked]:
    """The calls; TypeError for what is none."""
    expected = (
        "expected those of a recording: with rg.record(model, facts=rg.Report.FACTS) as tape: model(x), then "
        "Report.of(tape.calls, ...)."
    )
    if not isinstance(calls, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"calls is {kind_of(calls)}; {expected}")
    found = list(calls)
    for call in found:
        if not isinstance(call, Looked):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"calls holds {kind_of(call)}; {expected}")
    return found


class Element:
    """The answers of a call for one batch element, on the CPU, each as a tuple of tensors (h, ...).

    A sequence shorter than its batch is padded at either end: tokens that neither see nor are seen, which are left out.

    rows, cols  the queries and the keys that are no padding
    cells       those of them in the rows and the columns of the map
    own         (nq,), the key at each query's own position, -1 where there is none; padding left out
    """

    def __init__(self, call: Looked, element: int, cross: bool) -> None:
        self.call, self.element = call, element
        self.batch = tuple(call.seen.lse.shape[:-2])
        if not 0 <= element < math.prod(self.batch):
            raise IndexError(
                f"there is no batch element {element}; {call.name} was called with {math.prod(self.batch)}."
            )
        if 0 in call.view.frame.shape:
            raise ValueError(
                f"{call.name} was called with shape {call.view.frame.shape}; a report needs a pair to show."
            )
        frame = call.view.frame
        counts, readers, maps = (self[fact][0] for fact in (Visible(), Readers(), MAP))
        self.reach = Reach.of(call.view, element, maps.shape[-2], maps.shape[-1])
        self.map_size = maps.shape[-2], maps.shape[-1]
        self.rows, self.cols = _span(counts.sum(0)), _span(readers.sum(0))
        self.cells = _span(self.reach.cells.sum(1)), _span(self.reach.cells.sum(0))
        lead = frame.batch
        q, k = (self.pick(p.expand(*lead, -1), len(lead)) for p in (frame.positions.q, frame.positions.k))
        self.queries, self.keys = q[self.rows], k[self.cols]
        self.own = torch.full_like(self.queries, -1) if cross else _own(self.queries, self.keys)

    def __getitem__(self, fact: Fact[Any]) -> tuple[Tensor, ...]:
        return tuple(self.pick(t, len(self.batch)) for t in self._tensors(fact))

    def pick(self, t: Tensor, lead: int) -> Tensor:
        """The element of a tensor whose first `lead` axes are batch axes; without one it holds for every element."""
        return (t.flatten(0, lead - 1)[self.element] if lead else t).detach().cpu()

    def size(self, facts: Sequence[Fact[Any]]) -> int:
        """Bytes that the answers take, the log-sum-exp included."""
        kept = [self.call.seen.lse, *(t for fact in facts for t in self._tensors(fact))]
        return sum(t.numel() * t.element_size() for t in kept) // math.prod(self.batch)

    def weights(self) -> Tensor:
        """Every weight, quantised, HIDDEN where the key may not be seen; (h, 0, 0) of large calls."""
        levels = self[WEIGHTS][0]
        return levels.masked_fill(~visible(self.call.view, self.element), HIDDEN) if levels.numel() else levels

    def row_edges(self) -> Tensor:
        """Where each row of the map begins, and the end, in tokens counted from the first that is no padding."""
        return _edges(self.call.view.frame.nq, self.map_size[0], self.cells[0], self.rows)

    def col_edges(self) -> Tensor:
        """The same of its columns."""
        return _edges(self.call.view.frame.nk, self.map_size[1], self.cells[1], self.cols)

    def _tensors(self, fact: Fact[Any]) -> tuple[Tensor, ...]:
        try:
            answer = self.call.seen[fact]
        except KeyError:
            raise ValueError(
                f"{self.call.name} was not recorded with {fact!r}; a report needs facts=regard.Report.FACTS."
            ) from None
        return (answer,) if isinstance(answer, Tensor) else tuple(answer)


def _span(count: Tensor) -> slice:
    """From the first to the last that is not 0; all, where all are."""
    found = count.nonzero().flatten().tolist()
    return slice(found[0], found[-1] + 1) if found else slice(0, len(count))


def _own(q: Tensor, k: Tensor) -> Tensor:
    """The key at each query's position, -1 where there is none, or where the two are not of one sequence.

    They are taken for one sequence when both end at the same position: q and k of self-attention do, and the last
    tokens of a decoded sequence among all of its keys.
    """
    none = torch.full_like(q, -1)
    if torch.equal(q, k):  # also packed sequences, whose positions begin anew
        return torch.arange(len(q), dtype=torch.int64, device=q.device)
    if not len(q) or not len(k) or int(q[-1]) != int(k[-1]):
        return none
    order = k.argsort()
    index = torch.searchsorted(k[order], q).clamp(max=len(k) - 1)
    return torch.where(k[order][index] == q, order[index], none)


def _edges(n: int, count: int, kept: slice, span: slice) -> Tensor:
    """Where each of the kept cells begins, and the end, in tokens counted from the first of the span."""
    cells = Cells(n, count)
    starts = [cells.tokens(cell).start for cell in range(kept.start, kept.stop + 1)]
    return torch.tensor(starts, dtype=torch.int64, device="cpu").clamp(span.start, span.stop) - span.start
