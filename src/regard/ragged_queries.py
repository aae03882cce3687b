"""A call on nested tensors as a list of sequences, or as calls on plain ones: how many, and how rows are put together.

Where q, k and v are nested: one call on the values (see nested). Where q alone is nested (the new tokens of a batch
with a cache), and nothing but lengths and positions differs between the sequences: a RaggedCall, which the native
kernels run as one list; where they cannot, one plain call for each number of new tokens, on the sequences that have as
many. Else one plain call on padded queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.call.arguments import check_kinds
from regard.core.deferred import DeferredRows, kept_alike
from regard.core.dropout import Dropout
from regard.core.errors import ShapeError
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged, share_pages
from regard.core.positions import Positions
from regard.core.shapes import count_of, listed
from regard.masks.algebra import Everything, Mask
from regard.masks.intervals import IntervalRule
from regard.masks.positional import Window
from regard.masks.ragged import Lengths
from regard.nested import any_nested, flatten_call, nest_like, numbered, offsets_of, sequences
from regard.scores.algebra import Score, as_pipeline
from regard.scores.modifiers import Bias
from regard.scores.similarity import Custom


class Part(NamedTuple):
    """The arguments of one call on plain tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    positions: Positions | None


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """A call on sequences that differ by numbers alone.

    queries    (1, heads, total, dk), one sequence behind another
    k, v       (batch, key heads, nk, d), which may lie in pages
    offsets    int64 (batch + 1): the queries of sequence b are [offsets[b], offsets[b + 1])
    rule       the mask's, of lengths of keys and bounds of positions
    positions  of the queries (total,), and of the keys (nk,), where anything compares them
    """

    queries: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    rule: IntervalRule
    positions: Positions | None

    def longest(self) -> Part:
        """The arguments of the sequence with most pairs, as a call of its own: it stands for all of them."""
        counts, nk, rule, at = self.offsets.diff().tolist(), self.k.shape[-2], self.rule, self.positions
        lengths = [nk] * len(counts) if rule.keys is None else rule.keys.expand(len(counts)).tolist()
        keys = [min(max(n, 0), nk) for n in lengths]
        b = max(range(len(counts)), key=lambda b: counts[b] * keys[b])
        rows = slice(int(self.offsets[b]), int(self.offsets[b + 1]))
        mask = Window(rule.before, rule.after) if rule.compares_positions() else Everything()
        own = None if at is None else Positions(at.q[rows], at.k[: keys[b]])
        return Part(self.queries[:, :, rows], *_chosen(self.k, self.v, [b], keys[b]), mask, own)

    def consecutive(self) -> bool:
        """Whether positions of keys, and of the queries of each sequence, count up by one."""
        at, starts = self.positions, self.offsets[:-1].clamp(max=max(self.queries.shape[-2] - 1, 0))
        if at is None:
            return True
        counting = numbered(self.offsets.diff().tolist(), at.q[starts])[1]
        return torch.equal(at.q.long(), counting) and bool((at.k.diff() == 1).all())

    def note(self) -> str:
        """What `explain` says."""
        sequences = int((self.offsets.diff() > 0).sum())
        return (
            f"{count_of(self.queries.shape[-2], 'query')} of {count_of(sequences, 'sequence')} in one "
            "call; above, the longest"
        )


@dataclass(frozen=True, eq=False)
class PlainCalls:
    """Calls on plain tensors for one on nested tensors, and the way back.

    parts  the calls, the one with most rows last
    rows   where each query of the nested q stands in the outputs of the parts, one behind another: (total,). None where
           the output of the only part is in order
    note   what `explain` says
    """

    parts: tuple[Part, ...]
    rows: Tensor | None
    note: str

    def nest(self, outputs: list[Tensor], q: Any) -> Tensor:
        """The outputs of the parts as a nested tensor with the sequences of the nested q."""
        if self.rows is None:
            return nest_like(outputs[0], q)
        headed = q.dim() == 4
        across = [(out.transpose(0, 1) if headed else out[None]).flatten(1, 2) for out in outputs]  # (heads, rows, dv)
        taken = (across[0] if len(across) == 1 else torch.cat(across, 1)).index_select(1, self.rows)
        return nest_like(taken[None] if headed else taken[0], q)


def ragged_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Any,
    dropout: Dropout | None,
) -> RaggedCall | None:
    """The call on a nested q as one list; None where sequences differ by more than numbers, or not in their numbers."""
    if any_nested(k, v):
        return None
    check_kinds(score, mask, positions, dropout)
    values, lengths = sequences(q, "q")
    counts: list[int] = lengths.tolist()
    _check(q, k, v, counts, score, mask, positions)
    rule = mask.rule()
    if len(set(counts)) < 2 or rule is None or rule.queries is not None or k.shape[-2] != v.shape[-2]:
        return None
    if not _may_cut(score, mask, len(counts), sink, dropout):
        return None
    if not (mask.compares_positions() or score.compares_positions()):
        positions = None
    elif positions is None or positions.k.dim() != 1:
        return None
    lifted = (values, k, v) if q.dim() == 4 else (values[None, None], k[:, None], v[:, None])
    return RaggedCall(*lifted, offsets_of(q).long(), rule, positions)


def plain_calls(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Any,
    dropout: Dropout | None,
) -> PlainCalls:
    """The calls on plain tensors that a call on nested ones is made of."""
    if any_nested(k, v):
        flat = Part(*flatten_call(q, k, v, score, mask, positions))
        return PlainCalls((flat,), None, "one call on the concatenated sequences, each of which sees its own keys")
    check_kinds(score, mask, positions, dropout)
    values, lengths = sequences(q, "q")
    counts: list[int] = lengths.tolist()
    _check(q, k, v, counts, score, mask, positions)
    most, device = max(counts, default=0), values.device
    # which of the concatenated queries stands in each padded row; behind a sequence's last query, that one again
    ends = lengths.cumsum(0)[:, None]
    taken = torch.minimum(
        ends - lengths[:, None] + torch.arange(most, device=device, dtype=torch.int64), ends - 1
    ).clamp(min=0)
    if positions is not None and len(counts) > 1 and tuple(positions.q.shape) == (sum(counts),):
        positions = Positions(positions.q[taken.to(positions.q.device)], positions.k)
    if len(set(counts)) > 1 and _may_cut(score, mask, len(counts), sink, dropout):
        return _by_count(values, q.dim() == 4, k, v, counts, taken, mask, positions)
    padded = _rows(values, q.dim() == 4, taken)
    if len(set(counts)) > 1:
        mask = mask & Lengths(queries=lengths)
    starts = torch.arange(len(counts), dtype=torch.int64, device="cpu") * most
    note = (
        f"{count_of(sum(counts), 'query')} of {count_of(len(counts), 'sequence')} in one call, padded to "
        f"{taken.numel()}"
    )
    return PlainCalls((Part(padded, k, v, mask, positions),), numbered(counts, starts)[1].to(device), note)


def _check(
    q: Tensor, k: Tensor, v: Tensor, counts: list[int], score: Score, mask: Mask, positions: Positions | None
) -> None:
    for name, t in (("k", k), ("v", v)):
        if t.dim() != q.dim() or t.shape[0] != len(counts):
            raise ShapeError(
                f"q is nested with {count_of(len(counts), 'sequence')}, {name} has shape {listed(t.shape)}; expected "
                "the keys of as many batch elements, (batch, heads, nk, d), or nested keys and values with as many "
                "sequences."
            )
    total = sum(counts)
    if positions is None and (mask.compares_positions() or score.compares_positions()):
        raise ShapeError(
            f"q is nested with lengths {counts} over {count_of(k.shape[-2], 'key')} a batch element, under a mask or a "
            "score that compares positions, and these are not given. Pass positions=cache.positions, or "
            "Positions(q, k), q a number for each query of the concatenated sequences."
        )
    if len(set(counts)) > 1 and positions is not None and tuple(positions.q.shape) != (total,):
        raise ShapeError(
            f"positions.q has shape {listed(positions.q.shape)}, q is nested with lengths {counts}; expected "
            f"a number for each query of the concatenated sequences, ({total},)."
        )


def _may_cut(score: Score, mask: Mask, batch: int, sink: Any, dropout: Dropout | None) -> bool:
    """Whether a call on some sequences gives them what the call on all does: nothing but lengths and positions belongs
    to a sequence, and nothing asks which batch element it is.
    """
    rule = mask.rule()
    if rule is None or rule.q_ids is not None or (dropout is not None and dropout.p):
        return False
    if any(n is not None and tuple(n.shape) not in ((), (batch,)) for n in (rule.keys, rule.queries)):
        return False  # where the call is refused
    own = all(
        type(part).__module__.startswith("regard.") and type(part) not in (Custom, Bias)
        for part in as_pipeline(score).parts
    )
    tensors = (*score.tensors(), *((sink,) if isinstance(sink, Tensor) else ()))
    return own and all(t.dim() < 2 for t in tensors)


def _by_count(
    values: Tensor,
    headed: bool,
    k: Tensor,
    v: Tensor,
    counts: list[int],
    taken: Tensor,
    mask: Mask,
    positions: Positions | None,
) -> PlainCalls:
    """A call for each number of queries, on the sequences that have as many; for each sequence without pages.

    To choose some of the keys of a batch is to copy them, unless pages hold them.
    """
    paged, rule = isinstance(k, DeferredRows) and k.in_pages and kept_alike(k, v), mask.rule()
    assert rule is not None
    groups: dict[tuple[int, int], list[int]] = {}
    for b, n in enumerate(counts):
        if n:
            groups.setdefault((n, 0 if paged else b), []).append(b)
    parts, starts, rows = list[Part](), torch.zeros(len(counts), dtype=torch.int64, device="cpu"), 0
    for (n, _), chosen in sorted(groups.items()):
        nk = k.shape[-2]
        if rule.keys is not None:
            nk = min(max(int(rule.keys.expand(len(counts))[chosen].max()), 0), nk)
        at = None
        if positions is not None:
            q_at, k_at = (p if p.dim() < 2 else p[chosen] for p in (positions.q, positions.k))
            # one sequence has positions without a batch axis: they may count up by one, which has a shorter way
            q_at, k_at = (p[0] if p.dim() > 1 and len(chosen) == 1 else p for p in (q_at, k_at))
            at = Positions(q_at[..., :n], k_at[..., :nk])
        keys = _chosen(k, v, chosen, nk)
        parts.append(Part(_rows(values, headed, taken[chosen, :n]), *keys, _cut(rule, chosen, len(counts)), at))
        starts[chosen] = rows + n * torch.arange(len(chosen), dtype=torch.int64, device="cpu")
        rows += n * len(chosen)
    how = "a number of queries" if paged else "a sequence"
    note = (
        f"{count_of(rows, 'query')} of {count_of(sum(map(bool, counts)), 'sequence')} in "
        f"{count_of(len(parts), 'call')}, one {how}; above, the last"
    )
    return PlainCalls(tuple(parts), numbered(counts, starts)[1].to(values.device), note)


def _rows(values: Tensor, headed: bool, taken: Tensor) -> Tensor:
    """Some of the concatenated queries (1, heads, total, d) as (batch, heads, n, d); without heads (batch, n, d)."""
    found = values.index_select(-2, taken.flatten()).unflatten(-2, taken.shape)
    return found[0].transpose(0, 1) if headed else found


def _chosen(k: Tensor, v: Tensor, sequences: list[int], nk: int) -> tuple[Tensor, Tensor]:
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


def _cut(rule: IntervalRule, chosen: list[int], batch: int) -> Mask:
    """The mask of a rule without documents, for some of the sequences."""
    mask: Mask = Window(rule.before, rule.after) if rule.compares_positions() else Everything()
    if rule.keys is None and rule.queries is None:
        return mask
    keys, queries = (None if n is None else n.expand(batch)[chosen] for n in (rule.keys, rule.queries))
    return mask & Lengths(keys, queries)
