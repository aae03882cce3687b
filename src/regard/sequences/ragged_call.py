"""RaggedCall: a call on sequences with any numbers of queries, which the native kernels run as one list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.dropout import Dropout
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged, share_pages
from regard.core.positions import Positions
from regard.core.shapes import count_of
from regard.masks.algebra import Everything, Mask
from regard.masks.intervals import IntervalRule
from regard.masks.of_rule import mask_of_rule, rule_and_rest
from regard.scores.algebra import Score
from regard.sequences.jagged import numbered
from regard.sequences.nested_queries import NestedQueries, has_own_modifier, may_divide


class PlainCall(NamedTuple):
    """The arguments of one call on plain tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    positions: Positions | None


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """A call on sequences with any numbers of queries.

    queries    (1, heads, total, dk), one sequence behind another
    k, v       (batch, key heads, nk, d), which may lie in pages
    offsets    int64 (batch + 1): the queries of sequence b are [offsets[b], offsets[b + 1])
    rule       the mask's, of lengths of keys and bounds of positions
    positions  of the queries (total,), and of the keys (nk,), where something compares them
    padded     None: the sequences differ by these numbers alone. Else the call on the padded batch, its mask without
               the rule, from whose operands each sequence takes its part; one element stands for all of its queries
    mask       all of it
    """

    queries: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    rule: IntervalRule
    positions: Positions | None
    padded: PlainCall | None
    mask: Mask

    def example(self) -> PlainCall:
        """The arguments of a plain call that stands for this one."""
        return self.longest() if self.padded is None else self.padded

    def shown(self) -> PlainCall:
        """Those of the call that `explain` describes."""
        return self.longest() if self.padded is None else self.padded._replace(mask=self.mask)

    def longest(self) -> PlainCall:
        """The arguments of the sequence with most pairs, as a call of its own: it stands for all of them."""
        counts, nk, rule, at = self.offsets.diff().tolist(), self.k.shape[-2], self.rule, self.positions
        lengths = [nk] * len(counts) if rule.keys is None else rule.keys.expand(len(counts)).tolist()
        keys = [min(max(n, 0), nk) for n in lengths]
        b = max(range(len(counts)), key=lambda b: counts[b] * keys[b])
        rows = slice(int(self.offsets[b]), int(self.offsets[b + 1]))
        mask = mask_of_rule(IntervalRule(rule.before, rule.after))
        own = None if at is None else Positions(at.q[rows], at.k[: keys[b]])
        return PlainCall(self.queries[:, :, rows], *rows_of_sequences(self.k, self.v, [b], keys[b]), mask, own)

    def consecutive(self) -> bool:
        """Whether positions of keys, and of the queries of each sequence, count up by one."""
        at, starts = self.positions, self.offsets[:-1].clamp(max=max(self.queries.shape[-2] - 1, 0))
        if at is None:
            return True
        counting = numbered(self.offsets.diff().tolist(), at.q[starts])[1]
        return torch.equal(at.q.long(), counting) and bool((at.k.long().diff() == 1).all())

    def note(self) -> str:
        """What `explain` says."""
        sequences = int((self.offsets.diff() > 0).sum())
        said = f"{count_of(self.queries.shape[-2], 'query')} of {count_of(sequences, 'sequence')} in one call"
        return f"{said}; above, {'the longest' if self.padded is None else 'as if all were as long as the longest'}"


def ragged_call(
    queries: NestedQueries,
    k: Tensor,
    v: Tensor,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Any,
    dropout: Dropout | None,
) -> RaggedCall | str:
    """The call on nested queries as one list; or why it is none, as a clause."""
    counts = queries.counts
    rule, rest = rule_and_rest(mask)
    why = _why_not(counts, k, v, rule, dropout)
    if why is not None:
        return why
    padded = None
    if type(rest) is not Everything or not may_divide(score, mask, len(counts), sink, dropout):
        rows = queries.padded()
        one = queries.values.new_zeros(()).expand(*rows.shape, queries.values.shape[-1])
        one = one[:, None].expand(-1, queries.values.shape[1], -1, -1) if queries.headed else one
        padded = PlainCall(one, k, v, rest, queries.padded_positions(positions, rows))
    by_steps = score.compares_positions() and not has_own_modifier(score)
    alike = positions is not None and positions.k.dim() == 1
    if (rule.compares_positions() or by_steps) and not alike:
        return "the keys of each sequence have positions of their own"
    if not (rule.compares_positions() or by_steps or rest.compares_positions()) or not alike:
        positions = None
    values = queries.values
    lifted = (values, k, v) if queries.headed else (values[None, None], k[:, None], v[:, None])
    return RaggedCall(*lifted, queries.offsets, rule, positions, padded, mask)


def _why_not(counts: list[int], k: Tensor, v: Tensor, rule: IntervalRule, dropout: Dropout | None) -> str | None:
    """Why a call is no list for any score and any rest of its mask, as a clause; None if there is no such reason."""
    if len(set(counts)) < 2:
        return "all sequences have as many queries"
    lengths = [tuple(n.shape) for n in rule.by_sequence().values()]
    if k.shape[-2] != v.shape[-2] or any(shape not in ((), (len(counts),)) for shape in lengths):
        return "its shapes do not fit"
    return "dropout is drawn for a padded batch" if dropout is not None and dropout.p else None


def rows_of_sequences(k: Tensor, v: Tensor, sequences: list[int], nk: int) -> tuple[Tensor, Tensor]:
    """The first nk keys and values of some sequences: pages stay where they are, else there is one sequence."""
    if isinstance(k, Int8Rows) and isinstance(v, Int8Rows) and k.lies_like(v):
        table = k.numbers.block_table[sequences] if isinstance(k.numbers, Paged) else None

        def rows(t: Tensor) -> Tensor:
            if isinstance(t, Paged) and table is not None:
                return Paged(t.pages, table, nk)
            return t[sequences[0] : sequences[0] + 1].narrow(-2, 0, nk)

        return Int8Rows(rows(k.numbers), rows(k.scales), k.dtype), Int8Rows(rows(v.numbers), rows(v.scales), v.dtype)
    if isinstance(k, Paged) and isinstance(v, Paged) and share_pages(k, v):
        table = k.block_table[sequences]
        return Paged(k.pages, table, nk), Paged(v.pages, table, nk)
    (b,) = sequences
    return k[b : b + 1].narrow(-2, 0, nk), v[b : b + 1].narrow(-2, 0, nk)
