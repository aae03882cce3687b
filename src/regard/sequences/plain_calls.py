"""A call on nested tensors as calls on plain ones: which calls, and how their outputs become nested.

Where q, k and v are nested: one call on the values, under Documents. Where q alone is nested (the new tokens of a batch
with a cache), and nothing but lengths and positions differs between the sequences: one call for each number of new
tokens, on the sequences that have as many. Else one call on padded queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.core.deferred import DeferredRows, kept_alike
from regard.core.dropout import Dropout
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.shapes import count_of
from regard.masks.algebra import Mask
from regard.masks.intervals import IntervalRule
from regard.masks.of_rule import mask_of_rule
from regard.masks.ragged import Documents, Lengths
from regard.scores.algebra import Score
from regard.sequences.jagged import nest_like, numbered, values_and_lengths
from regard.sequences.nested_queries import NestedQueries, may_divide
from regard.sequences.ragged_call import PlainCall, rows_of_sequences


@dataclass(frozen=True, eq=False)
class PlainCalls:
    """Calls on plain tensors for one on nested tensors, and the way back.

    parts  the calls, the one with most rows last
    rows   where each query of the nested q stands in the outputs of the parts, one behind another: (total,). None where
           the output of the only part is in order
    note   what `explain` says
    padded  whether there are rows that no query has
    """

    parts: tuple[PlainCall, ...]
    rows: Tensor | None
    note: str
    padded: bool = False

    def nest(self, outputs: list[Tensor], q: Any) -> Tensor:
        """The outputs of the parts as a nested tensor with the sequences of the nested q."""
        if self.rows is None:
            return nest_like(outputs[0], q)
        headed = q.dim() == 4
        across = [(out.transpose(0, 1) if headed else out[None]).flatten(1, 2) for out in outputs]  # (heads, rows, dv)
        taken = (across[0] if len(across) == 1 else torch.cat(across, 1)).index_select(1, self.rows)
        return nest_like(taken[None] if headed else taken[0], q)


def flattened_call(
    q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Mask, positions: Positions | None
) -> PlainCalls:
    """The call on nested q, k and v, (batch, heads, n*, d) or (batch, n*, d), as one on their values."""
    values, lengths = zip(*(values_and_lengths(t, name) for t, name in ((q, "q"), (k, "k"), (v, "v"))), strict=True)
    if not torch.equal(lengths[1], lengths[2]):
        raise ShapeError(f"v has lengths {lengths[2].tolist()}, k {lengths[1].tolist()}; expected one value a key.")
    if len(lengths[0]) != len(lengths[1]):
        raise ShapeError(f"k has {count_of(len(lengths[1]), 'sequence')}, q {len(lengths[0])}; expected as many.")
    same = torch.equal(lengths[0], lengths[1])
    numbers = torch.arange(len(lengths[0]), device=lengths[0].device, dtype=torch.int64)
    ids = [numbers.repeat_interleave(n) for n in lengths[:2]]
    if positions is None and (mask.compares_positions() or score.compares_positions()):
        if not same:
            raise ShapeError(
                f"q has lengths {lengths[0].tolist()}, k {lengths[1].tolist()} under a mask or a score that compares "
                "positions, and these are not given. Pass positions=Positions(q, k), a number for each token of the "
                "concatenated sequences."
            )
        # distances are the same wherever a sequence begins; what else compares positions counts from there
        if mask.rule() is None or score.compares_positions():
            starts = (lengths[0].cumsum(0) - lengths[0]).repeat_interleave(lengths[0])
            at = torch.arange(len(starts), device=starts.device, dtype=torch.int64) - starts
            positions = Positions(at, at)
    own = Documents(ids[0]) if same else Documents(*ids)
    flat = PlainCall(values[0], values[1], values[2], mask & own, positions)
    return PlainCalls((flat,), None, "one call on the concatenated sequences, each of which sees its own keys")


def plain_calls(
    queries: NestedQueries,
    k: Tensor,
    v: Tensor,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Any,
    dropout: Dropout | None,
) -> PlainCalls:
    """The calls on plain tensors that a call on nested queries is made of."""
    counts, lengths, taken = queries.counts, queries.lengths, queries.padded()
    positions = queries.padded_positions(positions, taken)
    if len(set(counts)) > 1 and may_divide(score, mask, len(counts), sink, dropout):
        return _by_count(queries, k, v, taken, mask, positions)
    padded = queries.rows(taken)
    if len(set(counts)) > 1:
        mask = mask & Lengths(queries=lengths)
    starts = torch.arange(len(counts), dtype=torch.int64, device="cpu") * max(counts, default=0)
    note = (
        f"{count_of(sum(counts), 'query')} of {count_of(len(counts), 'sequence')} in one call, padded to "
        f"{taken.numel()}"
    )
    rows = numbered(counts, starts)[1].to(lengths.device)
    return PlainCalls((PlainCall(padded, k, v, mask, positions),), rows, note, padded=len(set(counts)) > 1)


def _by_count(
    queries: NestedQueries, k: Tensor, v: Tensor, taken: Tensor, mask: Mask, positions: Positions | None
) -> PlainCalls:
    """A call for each number of queries, on the sequences that have as many; for each sequence without pages.

    To choose some of the keys of a batch is to copy them, unless pages hold them.
    """
    paged, rule = isinstance(k, DeferredRows) and k.in_pages and kept_alike(k, v), mask.rule()
    counts = queries.counts
    assert rule is not None
    groups: dict[tuple[int, int], list[int]] = {}
    for b, n in enumerate(counts):
        if n:
            groups.setdefault((n, 0 if paged else b), []).append(b)
    parts, starts, rows = list[PlainCall](), torch.zeros(len(counts), dtype=torch.int64, device="cpu"), 0
    for (n, _), chosen in sorted(groups.items()):
        nk = k.shape[-2]
        if rule.keys is not None:
            nk = min(max(int(rule.keys.expand(len(counts))[chosen].max()), 0), nk)
        at = None
        if positions is not None:
            of_all = (p if p.dim() < 2 else p.expand(len(counts), -1) for p in (positions.q, positions.k))
            q_at, k_at = (p if p.dim() < 2 else p[chosen] for p in of_all)
            # one sequence has positions without a batch axis: they may count up by one, which has a shorter way
            q_at, k_at = (p[0] if p.dim() > 1 and len(chosen) == 1 else p for p in (q_at, k_at))
            at = Positions(q_at[..., :n], k_at[..., :nk])
        keys = rows_of_sequences(k, v, chosen, nk)
        sizes = {"keys": (nk, k.shape[-2]), "first": (nk, k.shape[-2]), "queries": (n, max(counts))}
        seen = mask_of_rule(_rule_of(rule, chosen, len(counts), sizes))
        parts.append(PlainCall(queries.rows(taken[chosen, :n]), *keys, seen, at))
        starts[chosen] = rows + n * torch.arange(len(chosen), dtype=torch.int64, device="cpu")
        rows += n * len(chosen)
    how = "a number of queries" if paged else "a sequence"
    note = (
        f"{count_of(rows, 'query')} of {count_of(sum(map(bool, counts)), 'sequence')} in "
        f"{count_of(len(parts), 'call')}, one {how}; above, the last"
    )
    return PlainCalls(tuple(parts), numbered(counts, starts)[1].to(queries.values.device), note)


def _rule_of(rule: IntervalRule, chosen: list[int], batch: int, sizes: Mapping[str, tuple[int, int]]) -> IntervalRule:
    """A rule without documents, for some of the sequences.

    sizes: what a length may be in their call, and in that of all; one that is too large for that stays, and is refused.
    """
    cut = dict[str, Tensor]()
    for name, lengths in rule.by_sequence().items():
        part, whole = sizes[name]
        some = lengths.expand(batch)[chosen]
        cut[name] = torch.where(some <= whole, some.clamp(max=part), some)
    return rule._replace(**cut)
