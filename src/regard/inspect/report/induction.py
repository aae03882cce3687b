"""Induction: how often a head looks at what followed an earlier copy, and how often it would by chance."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from regard.inspect.report.layer import Layer

EVIDENCE = 8  # rows that have to repeat something before a share of them is worth naming
DRAWS = 16  # keys of other rows that are tried for each row: what chance gives
CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class Induction:
    """The heads of a layer (h,) and the rows that count: those whose last tokens stood earlier in the text.

    share     of these rows, how many have as their heaviest key a token that followed an earlier copy
    chance    the share that would have one, if the keys that the head chooses had nothing to do with copies
    rows      how many rows count
    contexts  how many different contexts they end in: rows of one context are one observation

    Where fewer than EVIDENCE rows count, both shares are 0.
    """

    share: Tensor
    chance: Tensor
    rows: int
    contexts: int


def induction(layer: Layer, context: int) -> Induction:
    """Of each head, the rows whose heaviest key is a token that followed an earlier copy of their context.

    A row counts where its last `context` tokens, its own included, stood earlier in the text, it may see the token that
    followed their last copy, and that token is neither its own nor the one before, nor part of a periodic run (spaces,
    a ruled line), where to look at a copy and to look back by a fixed distance are the same. Chance: each row is given
    the heaviest key of another row, one that repeats nothing if there are enough of these, once at that key's place in
    the text and once at its distance; the larger share counts, so that neither a head that always looks at some place
    nor one that always looks back by some distance is taken for one that looks for copies. The choice of other rows is
    the same every time. The rule is that of Olsson et al. 2022 (arXiv 2209.11895), on the text as it is.
    """
    none = torch.zeros(layer.heads, dtype=torch.float32, device="cpu")
    if not (layer.keys.tokens and layer.looks_at_itself):
        return Induction(none, none, 0, 0)
    ids, copies, in_a_run = _copies(layer.keys.tokens, context)
    own = layer.own.clamp(min=0)
    copy = copies[own]
    counts = (layer.own >= 0) & (copy >= 0) & (copy + 1 >= layer.earliest) & (copy + 1 < own - 1) & ~in_a_run[own]
    rows = counts.nonzero()[:, 0]
    if len(rows) < EVIDENCE:
        return Induction(none, none, len(rows), 0)
    heaviest, at = layer.top_keys[..., 0], own[rows]

    def follow_copies(keys: Tensor) -> Tensor:
        """The share of (h, ..., rows) keys that a copy of their row's context precedes."""
        before = keys - 1
        found = (before >= 0) & (before < at) & (ids[before.clamp(0, len(ids) - 1)] == ids[at])
        return found.float().flatten(1).mean(1)

    others = _others(layer, copy < 0, len(rows))
    at_place = heaviest[:, others]
    at_distance = at - (own[others] - at_place).masked_fill(at_place < 0, len(ids))
    chance = torch.maximum(follow_copies(at_place), follow_copies(at_distance))
    return Induction(follow_copies(heaviest[:, rows]), chance, len(rows), len(ids[at].unique()))


def _others(layer: Layer, new: Tensor, count: int) -> Tensor:
    """Rows (DRAWS, count), drawn from those that repeat nothing, or from all where these are few."""
    seeing = (layer.own >= 0) & layer.visible()
    drawn_from = (seeing & new).nonzero()[:, 0]
    if len(drawn_from) < EVIDENCE:
        drawn_from = seeing.nonzero()[:, 0]
    random = torch.Generator().manual_seed(0)
    return drawn_from[torch.randint(len(drawn_from), (DRAWS, count), generator=random, dtype=torch.int64, device="cpu")]


@lru_cache(maxsize=2)  # all layers have one text
def _copies(tokens: tuple[Hashable, ...], context: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = context_ids(tokens, context)
    copies = last_copies(ids)
    return ids, copies, periodic(tokens, copies)


def context_ids(tokens: Sequence[Hashable], context: int) -> Tensor:
    """A number for the last `context` tokens up to each one, equal where these are equal; -1 where there are fewer.

    >>> context_ids("abcabd", 2).tolist()
    [-1, 0, 1, 2, 0, 3]
    """
    known: dict[tuple[Hashable, ...], int] = {}
    text = tuple(tokens)
    ids = [known.setdefault(text[i - context + 1 : i + 1], len(known)) for i in range(context - 1, len(text))]
    return torch.tensor([-1] * min(context - 1, len(text)) + ids, dtype=torch.int64, device="cpu")


def last_copies(ids: Tensor) -> Tensor:
    """For each token, the last earlier one with the same id; -1 where there is none, or the id is -1."""
    last: dict[int, int] = {}
    found: list[int] = []
    for index, one in enumerate(ids.tolist()):
        found.append(last.get(one, -1) if one >= 0 else -1)
        last[one] = index
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def periodic(tokens: Sequence[Hashable], copies: Tensor) -> Tensor:
    """For each token, whether the passage up to it repeats at a distance shorter than itself: boolean (n,).

    >>> periodic("abcabcabc", last_copies(context_ids("abcabcabc", 1))).tolist()
    [False, False, False, False, False, False, True, True, True]
    """
    found: list[bool] = []
    distance = length = 0  # of the longest passage that repeats up to the token before, and that repeats still
    for index, copy in enumerate(copies.tolist()):
        goes_on = distance > 0 and tokens[index] == tokens[index - distance]
        length = length + 1 if goes_on else 0
        if copy >= 0 and index - copy != distance:
            own = 0
            while own <= min(index - copy, copy) and tokens[index - own] == tokens[copy - own]:
                own += 1
            if own > length or own > index - copy:
                distance, length = index - copy, own
        found.append(0 < distance < length)
    return torch.tensor(found, dtype=torch.bool, device="cpu")


def deviations(heads: int) -> float:
    """How many standard deviations to either side hold 95 % for so many heads together: Bonferroni's correction.

    >>> round(deviations(1), 2), round(deviations(16), 2)
    (1.96, 2.96)
    """
    return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / (2 * max(heads, 1)))


def wilson_interval(share: Tensor, n: int, heads: int = 1) -> tuple[Tensor, Tensor]:
    """Between which shares those of n observations lie, with a confidence of 95 % for so many heads together.

    Source: Wilson 1927 (doi 10.1080/01621459.1927.10502953), with Bonferroni's correction.

    >>> [round(float(x), 3) for x in wilson_interval(torch.tensor(0.5), 10)]
    [0.237, 0.763]
    """
    z = deviations(heads)
    if n == 0:
        return torch.zeros_like(share), torch.ones_like(share)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * torch.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return (middle - half).clamp(min=0), (middle + half).clamp(max=1)
