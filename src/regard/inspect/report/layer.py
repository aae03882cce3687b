"""Layer: what one attention call did on one sequence, as plain numbers with their tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.inputs import Inputs
from regard.inspect.facts.keys import Readers, Received
from regard.inspect.facts.pooled import Cells, Map
from regard.inspect.facts.quantised import Quantised, dequantise
from regard.inspect.facts.rows import Entropy, MaxScore, Top, Visible
from regard.inspect.report.axis import Axis
from regard.inspect.report.kept_call import KeptCall
from regard.inspect.report.reach import Reach, visible
from regard.inspect.results import FactResults
from regard.masks.algebra import View

CELLS = 128
TOP, MAP, WEIGHTS = Top(4), Map(CELLS, CELLS), Quantised(512)
SAVED = 2048  # queries and keys up to which every weight can be saved
HIDDEN = 255  # in place of a weight, where a query may not see a key
# The facts of each call that a Layer is made from.
FACTS: tuple[Fact[Any], ...] = (Visible(), Entropy(), MaxScore(), TOP, Received(), Readers(), MAP, WEIGHTS)


class Looked(Protocol):
    """One call that was looked at: the layer's name, the answers to FACTS, and its mask on its frame."""

    @property
    def name(self) -> str: ...
    @property
    def seen(self) -> FactResults: ...
    @property
    def view(self) -> View: ...


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """One attention layer on one sequence, padding left out. Keys are numbered from 0, the first that is no padding.

    entropy, max_score      (h, nq), nats and score units; max_score is -inf for a row that sees nothing
    top_keys, top_weights   (h, nq, k), heaviest first; -1 and 0 where a row sees fewer keys
    received, readers       (h, nk), the mass that a key receives, and how many queries may see it
    counts                  (h, nq), how many keys a query may see
    earliest, latest        (nq,), the first and the last key that a query may see
    own                     (nq,), the key at its own position (-1: none)
    maps, cells             (h, rows, cols) and (rows, cols), the pooled weights, and which cells hold a visible pair
    weights                 (h, nq, nk), every weight as `quantise` has it, HIDDEN where the key may not be seen; of a
                            call with more than 512 queries or keys (h, 0, 0)
    row_edges, col_edges    (rows + 1,) and (cols + 1,), the first token of each cell, and the end
    kept                    bytes that the answers took
    place                   what the layer is called: "L3", or "decoder cross L3" (see regard.inspect.stacks)
    calls                   the queries and keys of each call, where they were recorded (facts.Inputs); else none
    """

    name: str
    queries: Axis
    keys: Axis
    entropy: Tensor
    max_score: Tensor
    top_keys: Tensor
    top_weights: Tensor
    received: Tensor
    readers: Tensor
    counts: Tensor
    earliest: Tensor
    latest: Tensor
    own: Tensor
    maps: Tensor
    cells: Tensor
    weights: Tensor
    row_edges: Tensor
    col_edges: Tensor
    kept: int
    place: str = ""
    calls: tuple[KeptCall, ...] = ()

    def __repr__(self) -> str:
        return f"Layer({self.name}, {self.heads} heads, {len(self.queries):,} queries, {len(self.keys):,} keys)"

    @property
    def heads(self) -> int:
        return len(self.entropy)

    @property
    def dense(self) -> int:
        """Bytes that the weights would take in float32."""
        return 4 * self.heads * len(self.queries) * len(self.keys)

    @property
    def looks_at_itself(self) -> bool:
        """Whether queries and keys are tokens of one sequence."""
        return bool((self.own >= 0).any())

    @property
    def inputs(self) -> int:
        """Bytes that the queries and keys take which were kept for `row`."""
        return sum(call.size for call in self.calls)

    def check_kept(self) -> None:
        """ValueError where queries and keys were not recorded."""
        if not self.calls:
            raise ValueError(
                f"the queries and keys of {self.name} were not kept, from which rows are computed; look with "
                "facts=(*rg.Report.FACTS, rg.facts.Inputs())."
            )

    def row(self, query: int) -> tuple[Tensor, Tensor]:
        """The exact weights of a query on all keys, and which keys it may see, both (h, nk); see KeptCall.row.

        Raises IndexError for a query that is not there, ValueError where queries and keys were not recorded.
        """
        self.check_kept()
        if not -len(self.queries) <= query < len(self.queries):
            raise IndexError(f"there is no query {query}; {self.name} has queries 0 to {len(self.queries) - 1}.")
        number = query % len(self.queries)
        for call in self.calls:
            if number < call.queries:
                return call.row(number, len(self.keys))
            number -= call.queries
        raise AssertionError("the queries of a layer are those of its calls")

    def every_weight(self) -> Tensor:
        """Every weight, (h, nq, nk): exact where queries and keys were kept, else as `weights` has them.

        float32, or float64 of a model in float64; 0 where the key may not be seen. Empty, (h, 0, 0), where neither was
        kept, and for more than SAVED queries or keys.
        """
        if max(len(self.queries), len(self.keys)) > SAVED:
            return self.entropy.new_zeros(self.heads, 0, 0)
        if self.calls:
            return torch.cat([call.weights(len(self.keys)) for call in self.calls], 1)
        return dequantise(self.weights.masked_fill(self.weights == HIDDEN, 0))

    @property
    def has_rows(self) -> bool:
        """Whether every weight can be had, a few rows at a time: of short texts, and where q and k were kept."""
        return bool(self.calls) or self.weights.numel() > 0

    def strips(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every weight, some queries at a time, (h, r, nk), and which keys any head may see, boolean (r, nk).

        Exact where queries and keys were kept, else as `weights` has them; nothing where neither was.
        """
        for call in self.calls:
            yield from call.strips(len(self.keys))
        if not self.calls and self.weights.numel():
            hidden = self.weights == HIDDEN
            yield dequantise(self.weights.masked_fill(hidden, 0)), ~hidden.all(0)

    def visible(self) -> Tensor:
        """The rows that may see something, with any head: boolean (nq,)."""
        return (self.counts > 0).any(0)

    @staticmethod
    def of(
        call: Looked, element: int, tokens: Sequence[str] = (), key_tokens: Sequence[str] = (), cross: bool = False
    ) -> Layer:
        """The layer of a call, for the batch element with that flat index.

        tokens are the texts of the sequence that the queries stand in, key_tokens those of another one that they look
        at, `cross`; each is used where its length fits. Raises ValueError where a fact was not recorded, and
        IndexError for an element that is not there.
        """
        answers, frame = _Element(call, element), call.view.frame
        counts, readers, maps = (answers[fact][0] for fact in (Visible(), Readers(), MAP))
        reach = Reach.of(call.view, element, maps.shape[-2], maps.shape[-1])
        # A sequence shorter than its batch is padded at either end: tokens that neither see nor are seen.
        rows, cols = _span(counts.sum(0)), _span(readers.sum(0))
        a, b = _span(reach.cells.sum(1)), _span(reach.cells.sum(0))
        q, k = (answers.pick(p, p.dim() - 1) for p in (frame.positions.q, frame.positions.k))
        own = torch.full_like(q[rows], -1) if cross else _own(q[rows], k[cols])
        within = bool((own >= 0).any())
        top_keys, top_weights, _ = answers[TOP]
        return Layer(
            name=call.name,
            queries=Axis(q[rows], _texts(tokens, rows, frame.nq, (frame.nq, frame.nk) if within else (frame.nq,))),
            keys=Axis(k[cols], _texts(tokens if within else key_tokens, cols, frame.nk, (frame.nk,))),
            entropy=answers[Entropy()][0][:, rows],
            max_score=answers[MaxScore()][0][:, rows],
            top_keys=torch.where(top_keys < 0, -1, top_keys - cols.start)[:, rows],
            top_weights=top_weights[:, rows],
            received=answers[Received()][0][:, cols],
            readers=readers[:, cols],
            counts=counts[:, rows],
            earliest=(reach.earliest[rows] - cols.start).clamp(min=0),
            latest=(reach.latest[rows] - cols.start).clamp(min=-1),
            own=own,
            maps=maps[:, a, b],
            cells=reach.cells[a, b],
            weights=_weights(answers[WEIGHTS][0], call.view, element)[:, rows, cols],
            row_edges=_edges(frame.nq, maps.shape[-2], a, rows),
            col_edges=_edges(frame.nk, maps.shape[-1], b, cols),
            kept=answers.size,
            calls=_kept_calls(call, element, rows, cols),
        )


class _Element:
    """The answers of a call for one batch element, on the CPU, each as a tuple of tensors (h, ...)."""

    def __init__(self, call: Looked, element: int) -> None:
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

    def __getitem__(self, fact: Fact[Any]) -> tuple[Tensor, ...]:
        return tuple(self.pick(t, len(self.batch)) for t in self._tensors(fact))

    def pick(self, t: Tensor, lead: int) -> Tensor:
        """The element of a tensor whose first `lead` axes are batch axes; without one it holds for every element."""
        return (t.flatten(0, lead - 1)[self.element] if lead else t).detach().cpu()

    @property
    def size(self) -> int:
        """Bytes that the answers take, the log-sum-exp included."""
        kept = [self.call.seen.lse, *(t for fact in FACTS for t in self._tensors(fact))]
        return sum(t.numel() * t.element_size() for t in kept) // math.prod(self.batch)

    def _tensors(self, fact: Fact[Any]) -> tuple[Tensor, ...]:
        try:
            answer = self.call.seen[fact]
        except KeyError:
            raise ValueError(
                f"{self.call.name} was not recorded with {fact!r}; a report needs facts=regard.Report.FACTS."
            ) from None
        return (answer,) if isinstance(answer, Tensor) else tuple(answer)


def _kept_calls(call: Looked, element: int, rows: slice, cols: slice) -> tuple[KeptCall, ...]:
    if Inputs() not in call.seen.facts:
        return ()
    places = torch.arange(cols.stop - cols.start, dtype=torch.int64, device="cpu")
    return (KeptCall(call.seen[Inputs()], call.view, element, rows, cols, places),)


def _weights(levels: Tensor, view: View, element: int) -> Tensor:
    return levels.masked_fill(~visible(view, element), HIDDEN) if levels.numel() else levels


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
    if not len(q) or not len(k) or int(q[-1]) != int(k[-1]):
        return none
    order = k.argsort()
    index = torch.searchsorted(k[order], q).clamp(max=len(k) - 1)
    return torch.where(k[order][index] == q, order[index], none)


def _texts(tokens: Sequence[str], span: slice, n: int, lengths: tuple[int, ...]) -> tuple[str, ...]:
    """The texts of n tokens, cut to a span: the last n of a sequence of one of these lengths, if so many are given."""
    return tuple(tokens[len(tokens) - n :][span]) if len(tokens) in lengths else ()


def _edges(n: int, count: int, kept: slice, span: slice) -> Tensor:
    """Where each of the kept cells begins, and the end, in tokens counted from the first of the span."""
    cells = Cells(n, count)
    starts = [cells.tokens(cell).start for cell in range(kept.start, kept.stop + 1)]
    return torch.tensor(starts, dtype=torch.int64, device="cpu").clamp(span.start, span.stop) - span.start
