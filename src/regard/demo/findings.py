"""What the byte model's heads do: rules with their numbers, no interpretation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CONTEXT = 8  # bytes that must repeat before an earlier copy counts as one

PREVIOUS, INDUCTION = 0.5, 0.25  # shares of rows from which a head is named


@dataclass(frozen=True)
class Head:
    """One head, and the share of rows (or of mass) by which it was found."""

    layer: int
    head: int
    share: float

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head} ({self.share:.0%})"


def previous_token(top: Tensor) -> Tensor:
    """The share of rows whose heaviest key is the byte just before: top (..., n) keys -> (...). Row 0 has none."""
    before = torch.arange(top.shape[-1]) - 1
    return (top == before)[..., 1:].float().mean(-1) if top.shape[-1] > 1 else top.new_zeros(top.shape[:-1]).float()


def followers(tokens: Tensor, reach: int) -> list[list[int]]:
    """For each byte i of (n,), the keys j ≥ i - reach that follow the same CONTEXT bytes as end at i."""
    text, seen, found = bytes(tokens.tolist()), dict[bytes, list[int]](), list[list[int]]()
    for i in range(len(text)):
        context = text[max(i - CONTEXT + 1, 0) : i + 1]
        known = seen.setdefault(context, []) if len(context) == CONTEXT else []
        found.append([j for j in known if j >= i - reach])
        known.append(i + 1)
    return found


def induction(top: Tensor, tokens: Tensor, reach: int) -> tuple[Tensor, int]:
    """The share of rows with an earlier copy in reach whose heaviest key is a byte that followed it; how many rows."""
    expected = followers(tokens, reach)
    rows = [i for i, keys in enumerate(expected) if keys]
    if not rows:
        return torch.zeros(top.shape[:-1]), 0
    hits = torch.zeros(*top.shape[:-1], len(rows))
    for n, i in enumerate(rows):
        hits[..., n] = torch.isin(top[..., i], torch.tensor(expected[i])).float()
    return hits.mean(-1), len(rows)


def heads_above(shares: Tensor, least: float) -> list[Head]:
    """The heads of (layers, heads) whose share is at least that, largest first."""
    found = [
        Head(layer, head, float(share))
        for layer, row in enumerate(shares.tolist())
        for head, share in enumerate(row)
        if share >= least
    ]
    return sorted(found, key=lambda one: -one.share)


def largest(values: Tensor) -> Head:
    """The head of (layers, heads) with the largest value."""
    index = int(values.argmax())
    return Head(index // values.shape[1], index % values.shape[1], float(values.flatten()[index]))
