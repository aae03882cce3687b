"""Findings: sentences about a model's heads, each with its rule and its number, and no interpretation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import regard.inspect.report.heads as heads
from regard.inspect.report.layer import Layer

# Shares of rows from which a head is named.
NEIGHBOUR, INDUCTION = 0.5, 0.25
NAMED = 6  # heads that a sentence names at most


@dataclass(frozen=True)
class Head:
    """One head, and the number by which it was found: a share, or a score."""

    layer: int
    head: int
    value: float

    @property
    def name(self) -> str:
        return f"L{self.layer}H{self.head}"

    def __str__(self) -> str:
        return f"{self.name} ({percent(self.value)})"


def percent(share: float) -> str:
    """A share as sentences show it, two digits at least.

    >>> percent(1.0), percent(0.97), percent(0.021), percent(0.00017)
    ('100%', '97%', '2.1%', '0.017%')
    """
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{100 * share:.2g}%"


@dataclass(frozen=True)
class Finding:
    """A sentence, the rule by which it was found, and the heads that it names, the most striking first."""

    said: str
    rule: str
    heads: tuple[Head, ...] = ()


def above(shares: Sequence[Tensor], least: float) -> tuple[Head, ...]:
    """The heads whose share is at least that, largest first; a tensor (h,) a layer."""
    found = [head for head in _each(shares) if head.value >= least]
    return tuple(sorted(found, key=lambda head: -head.value))


def largest(values: Sequence[Tensor]) -> Head:
    """The head with the largest value, of equal ones the first. Raises ValueError where there is no head."""
    return max(_each(values), key=lambda head: head.value)


def _each(values: Sequence[Tensor]) -> list[Head]:
    return [
        Head(layer, head, value)
        for layer, of_heads in enumerate(values)
        for head, value in enumerate(of_heads.tolist())
    ]


def findings(layers: Sequence[Layer], context: int, unit: str) -> tuple[Finding, ...]:
    """All that can be said of these layers; `unit` is what a token is called, `context` how many make a copy."""
    every = (
        _neighbours(layers, -1, f"previous-{unit} heads", f"the {unit} before"),
        _neighbours(layers, 1, f"next-{unit} heads", f"the {unit} after"),
        _induction(layers, context, unit),
        _most_received(layers),
        _first(layers, unit),
        _peak(layers),
    )
    return tuple(found for found in every if found is not None)


def _named(title: str, shares: Sequence[Tensor], least: float, rule: str) -> Finding:
    found = above(shares, least)
    named = ", ".join(map(str, found[:NAMED])) if found else f"none; the nearest is {largest(shares)}"
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return Finding(f"{title}: {named}{more}", f"in ≥ {least:.0%} of {rule}", found)


def _neighbours(layers: Sequence[Layer], offset: int, title: str, which: str) -> Finding | None:
    shares = [heads.looks_by(layer, offset) for layer in layers]
    # A causal model has no next-token heads, and a model of cross-attention neither kind.
    if not any(bool(share.any()) for share in shares):
        return None
    return _named(title, shares, NEIGHBOUR, f"rows, the heaviest key is {which}")


def _induction(layers: Sequence[Layer], context: int, unit: str) -> Finding | None:
    found = [heads.induction(layer, context) for layer in layers]
    rows, many = max(rows for _, rows in found), f"{context} {unit}s" if context > 1 else f"a {unit}"
    if rows >= heads.EVIDENCE:
        rule = f"the {rows:,} rows that repeat {many}, the heaviest key is one that followed a copy"
        return _named("induction heads", [share for share, _ in found], INDUCTION, rule)
    if not any(layer.keys.tokens and layer.looks_at_itself for layer in layers):
        return None
    few = "1 row repeats" if rows == 1 else f"{rows or 'no'} rows repeat"
    said = f"induction heads: {few} {many}, too few of this text to tell"
    return Finding(said, f"in ≥ {INDUCTION:.0%} of the rows that repeat {many}")


def _most_received(layers: Sequence[Layer]) -> Finding | None:
    mass = received(layers)
    if not len(mass):
        return None
    key = int(mass.argmax())
    of_key = [shares[:, key] if len(shares) else torch.zeros(layer.heads) for layer, shares in _received_by(layers)]
    name, most = next(layer for layer, shares in _received_by(layers) if len(shares)).keys.name(key), largest(of_key)
    said = f"{quoted(name)} (key {key:,}) receives {percent(float(mass[key]))} of all mass, most from {most}"
    return Finding(said, "of all keys the most: the mean weight on it, over all rows and heads", (most,))


def received(layers: Sequence[Layer]) -> Tensor:
    """The share of all mass that each key receives, mean over the heads of the layers of self-attention: (nk,).

    Where these layers have unlike numbers of keys, those with the most are meant; without any, it is empty.
    """
    shares = [share for _, share in _received_by(layers) if len(share)]
    return torch.cat(shares).mean(0) if shares else torch.zeros(0)


def _received_by(layers: Sequence[Layer]) -> list[tuple[Layer, Tensor]]:
    """Each layer with the shares (h, nk) that its keys receive; with none (0, nk) where `received` leaves it out."""
    longest = max((len(layer.keys) for layer in layers if layer.looks_at_itself), default=0)
    shares = [(layer, layer.received / _rows(layer)) for layer in layers]
    return [
        (layer, share if layer.looks_at_itself and len(layer.keys) == longest else share[:0]) for layer, share in shares
    ]


def _rows(layer: Layer) -> Tensor:
    """How many rows of each head see something, (h, 1)."""
    return (layer.counts > 0).sum(-1, keepdim=True).clamp(min=1)


def _first(layers: Sequence[Layer], unit: str) -> Finding | None:
    own = [layer for layer in layers if layer.looks_at_itself and len(layer.keys)]
    readers = max((int(layer.readers[:, 0].max()) for layer in own), default=0)
    # Where every row sees the first key and it receives the most, the finding before has said it.
    if not own or (readers == max(len(layer.queries) for layer in own) and not int(received(layers).argmax())):
        return None
    shares = [heads.first_key_mass(layer) * layer.looks_at_itself for layer in layers]
    mean, most = torch.cat([heads.first_key_mass(layer) for layer in own]).mean(), largest(shares)
    share = f"{percent(float(mean))} of the mass of the {readers:,} rows that see it"
    said = f"the first {unit} receives {share}, most from {most}"
    return Finding(said, "the mean weight on the first key, over these rows and all heads", (most,))


def _peak(layers: Sequence[Layer]) -> Finding:
    peaks = [heads.largest_score(layer) for layer in layers]
    most, rest = largest(peaks), sorted((head.value for head in _each(peaks)), reverse=True)
    nearest = f" (next head {_score(rest[1])})" if len(rest) > 1 else ""
    return Finding(f"max score {_score(most.value)} at {most.name}{nearest}", "the largest of all scores", (most,))


def _score(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.2g}"


def quoted(token: str) -> str:
    """A token as sentences show it: on one line, spaces and control characters visible, not too long.

    >>> quoted("the"), quoted(" a\\n"), quoted("[CLS]")
    ('‘the’', '‘␣a↵’', '‘[CLS]’')
    """
    return f"‘{shown(token)}’"


def shown(token: str, longest: int = 18) -> str:
    """The same without quotation marks, shortened in the middle to at most `longest` characters."""
    visible = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
    text = "".join(visible.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in token) or "␀"
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - half]}…{text[-half:]}"


def striking(layers: Sequence[Layer], context: int, unit: str) -> tuple[Head, str]:
    """The head worth a picture and why: an induction head, or one that looks at a neighbour, or the least entropy."""
    copies = largest([heads.induction(layer, context)[0] for layer in layers])
    if copies.value >= INDUCTION:
        return copies, f"induction head, {copies.value:.0%} of the rows with an earlier copy"
    rules = {f"one {unit} back": -1, f"one {unit} ahead": 1}
    found = {where: largest([heads.looks_by(layer, offset) for layer in layers]) for where, offset in rules.items()}
    where = max(found, key=lambda name: found[name].value)
    if found[where].value >= NEIGHBOUR:
        return found[where], f"looks {where} in {found[where].value:.0%} of rows"
    decided = largest([-heads.mean_entropy(layer) for layer in layers])
    return decided, f"lowest mean entropy, {-decided.value:.2f} nats"
