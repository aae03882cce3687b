"""What each head of a layer is like: one number a head, (h,), rows that see nothing left out.

A rule that looks at the heaviest key of each row gives a share of the rows to which it can apply.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from regard.inspect.report.layer import Layer

EVIDENCE = 8  # rows that have to repeat something before a share of them is worth naming


def mean_entropy(layer: Layer) -> Tensor:
    """Nats, mean over the rows."""
    return _mean(layer.entropy, layer.counts > 0)


def largest_score(layer: Layer) -> Tensor:
    """max_ij s_ij over the visible pairs; -inf where there is none."""
    scores = layer.max_score
    return scores.amax(-1) if scores.shape[-1] else scores.new_full((layer.heads,), -torch.inf)


def first_key_mass(layer: Layer) -> Tensor:
    """The mean weight on the first key, over the rows that may see it."""
    return layer.received[:, 0] / layer.readers[:, 0].clamp(min=1)


def looks_by(layer: Layer, offset: int) -> Tensor:
    """The share of rows whose heaviest key stands `offset` keys after their own: -1 is the previous token.

    Rows without such a key do not count; of cross-attention, where no key is a row's own, the share is 0.
    """
    wanted = layer.own + offset
    there = (layer.own >= 0) & (wanted >= 0) & (wanted < len(layer.keys)) & layer.visible()
    return _mean((layer.top_keys[..., 0] == wanted).float(), there.expand(layer.heads, -1))


def context_ids(tokens: Sequence[Hashable], context: int) -> Tensor:
    """A number for the last `context` tokens up to each one, equal where these are equal; -1 where there are fewer.

    >>> context_ids("abcabd", 2).tolist()
    [-1, 0, 1, 2, 0, 3]
    """
    known: dict[tuple[Hashable, ...], int] = {}
    text = tuple(tokens)
    ids = [known.setdefault(text[i - context + 1 : i + 1], len(known)) for i in range(context - 1, len(text))]
    return torch.tensor([-1] * min(context - 1, len(text)) + ids, dtype=torch.int64)


def last_copies(ids: Tensor) -> Tensor:
    """For each token, the last earlier one with the same id; -1 where there is none, or the id is -1."""
    last: dict[int, int] = {}
    found: list[int] = []
    for index, one in enumerate(ids.tolist()):
        found.append(last.get(one, -1) if one >= 0 else -1)
        last[one] = index
    return torch.tensor(found, dtype=torch.int64)


def induction(layer: Layer, context: int) -> tuple[Tensor, int]:
    """The share of rows whose heaviest key is a token that followed an earlier copy of their context; of how many rows.

    A row counts where its last `context` tokens, its own included, stood earlier in the text and it may see the token
    that followed their last copy; where fewer than EVIDENCE rows count, every share is 0. The rule is that of Olsson et
    al. 2022 (arXiv 2209.11895), on the text as it is.
    """
    if not (layer.keys.tokens and layer.looks_at_itself):
        return torch.zeros(layer.heads), 0
    ids = context_ids(layer.keys.tokens, context)
    own = layer.own.clamp(min=0)
    copy = last_copies(ids)[own]
    repeats = (layer.own >= 0) & (copy >= 0) & (copy + 1 >= layer.earliest)
    heaviest = layer.top_keys[..., 0]
    follows = (heaviest > 0) & (heaviest <= own) & (ids[(heaviest - 1).clamp(min=0)] == ids[own])
    rows = int(repeats.sum())
    return _mean(follows.float(), repeats.expand(layer.heads, -1)) * (rows >= EVIDENCE), rows


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """The mean over the last axis of what is counted; 0 where nothing is."""
    return (values * counted).sum(-1) / counted.sum(-1).clamp(min=1)
