"""attention and explain of calls in which q, or q, k and v, are jagged nested tensors of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

import regard.core.arrays as arrays
import regard.sequences.one_list as one_list
from regard.backends.base import Backend
from regard.call.arguments import check_kinds
from regard.call.of_pairs import check_of_sequences
from regard.core.deferred import kept_alike
from regard.core.dropout import Dropout
from regard.core.positions import Positions
from regard.core.value import calls_functions_of_others
from regard.masks.algebra import Mask
from regard.runtime.binding import BoundCall
from regard.runtime.dispatch import Explanation
from regard.scores.algebra import Score
from regard.sequences.jagged import nest_like
from regard.sequences.nested_queries import NestedQueries, nested_queries
from regard.sequences.plain_calls import PlainCalls, flattened_call, plain_calls
from regard.sequences.ragged_call import RaggedCall, ragged_call


def attend(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Any,
    v: Any,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Tensor | float | None,
    dropout: Dropout | None,
    backend: Backend | None,
) -> Tensor:
    """The output, nested like q: the sequences run as one list where they can, else by `attention` of plain tensors."""
    queries, together, plain = _read(q, k, v, score, mask, positions, sink, dropout)
    if calls_functions_of_others((score, mask)):
        for queries_there, keys, values, both, at in plain().parts:
            check_of_sequences(BoundCall(queries_there, keys, values, score, both, at, sink, None).problem)
    out = None if isinstance(together, str) else one_list.attend(together, score, sink, backend)
    if out is not None:
        return nest_like(out if queries is None or queries.headed else out[0, 0], q)
    calls = plain()
    options: dict[str, Any] = {"score": score, "sink": sink, "dropout": dropout, "backend": backend}
    return calls.nest([attention(*qkv, mask=both, positions=at, **options) for *qkv, both, at in calls.parts], q)


def explain(
    q: Tensor,
    k: Any,
    v: Any,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Tensor | float | None,
    dropout: Dropout | None,
    backend: Backend | None,
) -> Explanation:
    """How `attend` would run the call."""
    _, together, plain = _read(q, k, v, score, mask, positions, sink, dropout)
    one = together if isinstance(together, str) else one_list.explain(together, score, sink, backend)
    if isinstance(one, Explanation):
        return one
    calls = plain()
    q, k, v, mask, positions = calls.parts[-1]
    found = BoundCall(q, k, v, score, mask, positions, sink, dropout).explain(backend)
    return replace(found, facts=(*found.facts, ("nested", calls.note + (f", since {one}" if calls.padded else ""))))


def _read(
    q: Tensor,
    k: Any,
    v: Any,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Tensor | float | None,
    dropout: Dropout | None,
) -> tuple[NestedQueries | None, RaggedCall | str, Callable[[], PlainCalls]]:
    """The queries, if they alone are nested; their call as one list, or why not; what makes plain calls instead."""
    check_kinds(score, mask, positions, dropout)
    if arrays.any_nested(k, v):
        return None, "all are nested", lambda: flattened_call(q, k, v, score, mask, positions)
    if not kept_alike(k, v):
        k, v = arrays.tensor(k, "k"), arrays.tensor(v, "v")
    queries = nested_queries(q, k, v, score, mask, positions)
    together = ragged_call(queries, k, v, score, mask, positions, sink, dropout)
    return queries, together, lambda: plain_calls(queries, k, v, score, mask, positions, sink, dropout)
