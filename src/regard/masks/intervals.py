"""What a mask can say that is shorter than a matrix: an interval of keys for each query, or the rule that gives it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Interval(NamedTuple):
    """The keys that each row may see, as indices start ≤ j < stop: integers, broadcastable to (*batch, heads, nq).

    start ≤ stop: both are equal for a row that sees no key.

    >>> import torch
    >>> Interval(torch.tensor([0, 0]), torch.tensor([1, 2])).stop
    tensor([1, 2])
    """

    start: Tensor
    stop: Tensor


# The fields of IntervalRule that are numbers of keys, or of queries, one for each sequence.
OF_KEYS, OF_QUERIES = ("keys", "first"), ("queries",)


class IntervalRule(NamedTuple):
    """Intervals of keys as a rule, which need not be written out: a pair is visible where all of these hold.

    before, after  -after ≤ i - j ≤ before, of the positions i of the query and j of the key; None is unbounded
    keys           the key's index is below this length of its sequence, (*batch,)
    queries        the query's index is below this length
    first          the key's index is not below this number of its sequence, (*batch,)
    q_ids, k_ids   the query (.., nq) and the key (.., nk) have the same number: intervals where k_ids never decrease
    None: no such condition.

    >>> IntervalRule(before=3, after=0).both(IntervalRule(after=2))
    IntervalRule(before=3, after=0, keys=None, queries=None, first=None, q_ids=None, k_ids=None)
    """

    before: int | None = None
    after: int | None = None
    keys: Tensor | None = None
    queries: Tensor | None = None
    first: Tensor | None = None
    q_ids: Tensor | None = None
    k_ids: Tensor | None = None

    def by_sequence(self) -> dict[str, Tensor]:
        """The numbers that are one a sequence, (*batch,), by name: those that it has, of OF_KEYS and OF_QUERIES."""
        found = ((name, getattr(self, name)) for name in (*OF_KEYS, *OF_QUERIES))
        return {name: numbers for name, numbers in found if numbers is not None}

    def both(self, other: IntervalRule) -> IntervalRule | None:
        """What both let through; None where both give lengths, or both documents."""
        merged: list[int | Tensor | None] = []  # list[...]() is nothing that torch.compile traces
        for a, b in zip(self, other, strict=True):
            if a is None or b is None:
                merged.append(b if a is None else a)
            elif isinstance(a, int) and isinstance(b, int):
                merged.append(min(a, b))
            else:
                return None
        return IntervalRule(*merged)  # pyright: ignore[reportArgumentType]

    def compares_positions(self) -> bool:  # no property: graphs of torch 2.10 read none of a named tuple
        return self.before is not None or self.after is not None

    @property
    def of_distances(self) -> bool:
        """Whether it says nothing but how far apart queries and keys may be."""
        return self[2:] == (None,) * 5
