"""NestedQueries: a nested q over the keys of a batch, checked: the new tokens of a batch with a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.core.dropout import Dropout
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.shapes import count_of, listed
from regard.core.value import is_regards_own
from regard.masks.algebra import Mask
from regard.scores.algebra import Modifier, Score, as_pipeline
from regard.scores.modifiers import Bias
from regard.scores.similarity import Custom
from regard.sequences.jagged import offsets_of, values_and_lengths


@dataclass(frozen=True, eq=False)
class NestedQueries:
    """The queries of a nested q, one sequence behind another.

    values   (1, heads, total, dk); without a head axis (total, dk)
    headed   whether there is a head axis
    lengths  (batch,), how many queries each sequence has; `counts` are the same numbers
    offsets  int64 (batch + 1,): the queries of sequence b are [offsets[b], offsets[b + 1])
    """

    values: Tensor
    headed: bool
    lengths: Tensor
    counts: list[int]
    offsets: Tensor

    def padded(self) -> Tensor:
        """Which query stands in each row of the padded batch: (batch, most). Behind a sequence's last, it again."""
        device, ends = self.lengths.device, self.lengths.cumsum(0)[:, None]
        rows = torch.arange(max(self.counts, default=0), device=device, dtype=torch.int64)
        return torch.minimum(ends - self.lengths[:, None] + rows, ends - 1).clamp(min=0)

    def padded_positions(self, positions: Positions | None, padded: Tensor) -> Positions | None:
        """The positions of a call on the padded batch, from those of the call on the nested queries."""
        counts = self.counts
        if positions is None or len(counts) < 2 or tuple(positions.q.shape) != (sum(counts),):
            return positions
        return Positions(positions.q[padded.to(positions.q.device)], positions.k)

    def rows(self, chosen: Tensor) -> Tensor:
        """The queries with these numbers (batch, n), as (batch, heads, n, dk); without heads (batch, n, dk)."""
        found = self.values.index_select(-2, chosen.flatten()).unflatten(-2, chosen.shape)
        return found[0].transpose(0, 1) if self.headed else found


def nested_queries(
    q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Mask, positions: Positions | None
) -> NestedQueries:
    """Those of a call. Raises ShapeError where the keys, or the positions, do not fit to them."""
    values, lengths = values_and_lengths(q, "q")
    counts: list[int] = lengths.tolist()
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
    if positions is not None and positions.k.shape[-1] != k.shape[-2]:
        raise ShapeError(
            f"positions.k has shape {listed(positions.k.shape)}; expected a number for each key, ({k.shape[-2]},) or "
            f"({len(counts)}, {k.shape[-2]})."
        )
    if len(set(counts)) > 1 and positions is not None and tuple(positions.q.shape) != (total,):
        raise ShapeError(
            f"positions.q has shape {listed(positions.q.shape)}, q is nested with lengths {counts}; expected "
            f"a number for each query of the concatenated sequences, ({total},)."
        )
    return NestedQueries(values, q.dim() == 4, lengths, counts, offsets_of(q).long())


def may_divide(score: Score, mask: Mask, batch: int, sink: Any, dropout: Dropout | None) -> bool:
    """Whether a call on some sequences gives them what the call on all does: nothing but lengths and positions belongs
    to a sequence, and nothing asks which batch element it is.
    """
    rule = mask.rule()
    if rule is None or rule.q_ids is not None or (dropout is not None and dropout.p):
        return False
    if any(tuple(n.shape) not in ((), (batch,)) for n in rule.by_sequence().values()):
        return False  # where the call is refused
    own = all(_regards_own(part) and type(part) not in (Custom, Bias) for part in as_pipeline(score).parts)
    tensors = (*score.tensors(), *((sink,) if isinstance(sink, Tensor) else ()))
    return own and all(t.dim() < 2 for t in tensors)


def has_own_modifier(score: Score) -> bool:
    """Whether one of its modifiers is not regard's own: then all of them reach the kernels as a program."""
    return not all(map(_regards_own, as_pipeline(score).parts[1:]))


def _regards_own(part: Score) -> bool:
    """Whether a stage is one of regard's, and no function of a person's."""
    pair = part.of_pair() if isinstance(part, Modifier) else None
    return is_regards_own(type(part)) and pair is None
