"""Tokens that come as nested tensors: another number of them for each sequence."""

from __future__ import annotations

from torch import Tensor

from regard.core.errors import ShapeError
from regard.core.shapes import count_of
from regard.nn.cache.base import check_tokens
from regard.sequences.jagged import values_and_lengths

FLATTENED = "k, its sequences one behind another,", "v, its sequences one behind another,"  # what errors call them


def flattened(k: Tensor, v: Tensor, batch: int) -> tuple[Tensor, Tensor, list[int]]:
    """Nested keys and values (batch, heads, n*, d) as (heads, total, d), and how many tokens each sequence gets.

    Raises ShapeError for other axes, and unless k and v have the same lengths, as many as there are sequences.
    """
    (keys, lengths), (values, others) = values_and_lengths(k, "k"), values_and_lengths(v, "v")
    new: list[int] = lengths.tolist()
    if k.dim() != 4 or v.dim() != 4:
        raise ShapeError(f"k has {count_of(k.dim(), 'axis')}, v {v.dim()}; expected nested (batch, heads, n*, d).")
    if len(new) != batch or others.tolist() != new:
        raise ShapeError(
            f"k has lengths {new}, v {others.tolist()}; expected the same, one for each of "
            f"{count_of(batch, 'sequence')} (0 where a sequence gets no token)."
        )
    check_tokens(keys[0], values[0])
    return keys[0], values[0], new
