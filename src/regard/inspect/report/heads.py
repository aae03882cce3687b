"""What each head of a layer is like: one number a head, (h,), rows that see nothing left out.

A rule that looks at the heaviest key of each row gives a share of the rows to which it can apply.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.inspect.report.layer import Layer


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


def looks_by(layer: Layer, offset: int) -> tuple[Tensor, Tensor, int]:
    """The share of rows whose heaviest key stands `offset` keys after their own (-1: the previous token), that of a
    head that chooses among the visible keys by chance, and how many rows there are.

    Rows without such a key do not count; of cross-attention, where no key is a row's own, the share is 0.
    """
    wanted = layer.own + offset
    there = (layer.own >= 0) & (wanted >= 0) & (wanted < len(layer.keys)) & layer.visible()
    counted = there.expand(layer.heads, -1)
    share = _mean((layer.top_keys[..., 0] == wanted).float(), counted)
    return share, _mean(1 / layer.counts.clamp(min=1), counted), int(there.sum())


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """The mean over the last axis of what is counted; 0 where nothing is."""
    return (values * counted).sum(-1) / counted.sum(-1).clamp(min=1)
