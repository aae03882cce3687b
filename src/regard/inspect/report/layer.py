"""Layer: what one attention call did on one sequence, as plain numbers with their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from regard.core.shapes import count_of
from regard.core.wrong_calls import kind_of
from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.inputs import Inputs
from regard.inspect.facts.keys import Readers, Received
from regard.inspect.facts.quantised import dequantise
from regard.inspect.facts.rows import Entropy, MaxScore, Visible
from regard.inspect.report.axis import Axis
from regard.inspect.report.columns import Column, Joining, cell_edges, columns_of, joined_weights
from regard.inspect.report.element import HIDDEN, MAP, TOP, WEIGHTS, Element, Looked
from regard.inspect.report.kept_call import KeptCall

SAVED = 2048  # queries and keys up to which every weight can be saved
_OF_CELL = "weight on the column's keys, mean of the row's queries"
_SEEN = "whether the cell holds a pair that may attend"
_ROWS, _COLS = "first query of each row, and the end", "first key of each column, and the end"


def _row_edges(steps: Joining) -> Tensor:
    return cell_edges(steps.nq)


def _col_edges(steps: Joining) -> Tensor:
    return cell_edges(steps.nk)


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
    entropy: Annotated[Tensor, Column("head, query", "nats", Entropy(), on_page=True)]
    max_score: Annotated[Tensor, Column("head, query", "score, natural logarithm", MaxScore())]
    top_keys: Annotated[Tensor, Column("head, query, rank", "key index, -1 for none", TOP, indices=True)]
    top_weights: Annotated[Tensor, Column("head, query, rank", "weight", TOP, item=1)]
    received: Annotated[Tensor, Column("head, key", "sum of weights over the queries", Received(), on_page=True)]
    readers: Annotated[Tensor, Column("head, key", "queries that may see the key", Readers())]
    counts: Annotated[Tensor, Column("head, query", "keys that the query may see", Visible())]
    earliest: Annotated[Tensor, Column("query", read=lambda e: e.reach.earliest, indices=True)]
    latest: Annotated[Tensor, Column("query", read=lambda e: e.reach.latest, indices=True)]
    own: Annotated[Tensor, Column("query", read=lambda e: e.own, cut=False, indices=True)]
    maps: Annotated[Tensor, Column("head, row, column", _OF_CELL, MAP, joined=lambda steps: steps.maps[0])]
    cells: Annotated[
        Tensor, Column("row, column", _SEEN, read=lambda e: e.reach.cells, joined=lambda steps: steps.maps[1])
    ]
    weights: Annotated[
        Tensor, Column("head, query, key", fact=WEIGHTS, read=lambda e: e.weights(), joined=joined_weights)
    ]
    row_edges: Annotated[Tensor, Column("row", _ROWS, read=Element.row_edges, cut=False, joined=_row_edges)]
    col_edges: Annotated[Tensor, Column("column", _COLS, read=Element.col_edges, cut=False, joined=_col_edges)]
    kept: int
    place: str = ""
    calls: tuple[KeptCall, ...] = ()

    def __repr__(self) -> str:
        counts = {"head": self.heads, "query": len(self.queries), "key": len(self.keys)}
        return f"Layer({self.name}, {', '.join(count_of(n, noun, ',') for noun, n in counts.items())})"

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
        if not isinstance(query, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"query is {kind_of(query)}; expected an integer.")
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
        at, frame = Element(call, element, cross), call.view.frame
        within = bool((at.own >= 0).any())
        lengths = (frame.nq, frame.nk) if within else (frame.nq,)
        columns: dict[str, Any] = {name: column.of(at) for name, column in COLUMNS.items()}
        return Layer(
            name=call.name,
            queries=Axis(at.queries, _texts(tokens, at.rows, frame.nq, lengths)),
            keys=Axis(at.keys, _texts(tokens if within else key_tokens, at.cols, frame.nk, (frame.nk,))),
            kept=at.size(FACTS),
            calls=_kept_calls(call, element, at.rows, at.cols),
            **columns,
        )


COLUMNS = columns_of(Layer)
# The facts of each call that a Layer is made from.
FACTS: tuple[Fact[Any], ...] = tuple(dict.fromkeys(c.fact for c in COLUMNS.values() if c.fact is not None))


def _kept_calls(call: Looked, element: int, rows: slice, cols: slice) -> tuple[KeptCall, ...]:
    if Inputs() not in call.seen.facts:
        return ()
    places = torch.arange(cols.stop - cols.start, dtype=torch.int64, device="cpu")
    return (KeptCall(call.seen[Inputs()], call.view, element, rows, cols, places),)


def _texts(tokens: Sequence[str], span: slice, n: int, lengths: tuple[int, ...]) -> tuple[str, ...]:
    """The texts of n tokens, cut to a span: the last n of a sequence of one of these lengths, if so many are given."""
    return tuple(tokens[len(tokens) - n :][span]) if len(tokens) in lengths else ()
