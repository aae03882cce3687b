"""Findings: sentences about a model's heads, each with its rule and its number, and no interpretation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import regard.core.html as html
import regard.inspect.report.heads as heads
from regard.inspect.report.induction import EVIDENCE, induction, wilson_interval
from regard.inspect.report.layer import Layer
from regard.inspect.report.notebook import findings_table

# Shares of rows from which a head is named.
NEIGHBOUR, INDUCTION = 0.5, 0.25
NAMED = 6  # heads that a sentence names at most


@dataclass(frozen=True)
class Head:
    """One head, the number by which it was found (a share, or a score), and the interval in which that share lies.

    layer   of all layers of the report, from 0
    place   what that layer is called where it is not its number: "decoder cross L2"
    """

    layer: int
    head: int
    value: float
    interval: tuple[float, float] | None = None
    place: str = ""

    @property
    def name(self) -> str:
        return f"{self.place or f'L{self.layer}'}H{self.head}"

    def __str__(self) -> str:
        within = "" if self.interval is None else ", {:.0f} to {:.0f}%".format(*(100 * x for x in self.interval))
        return f"{self.name} ({percent(self.value)}{within})"


def percent(share: float) -> str:
    """A share as sentences show it, two digits at least.

    >>> percent(1.0), percent(0.97), percent(0.021), percent(0.00017), percent(math.nan)
    ('100%', '97%', '2.1%', '0.017%', '–')
    """
    if math.isnan(share):
        return "–"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{100 * share:.2g}%"


@dataclass(frozen=True)
class Finding:
    """A sentence, the rule by which it was found, and the heads that it names, the most striking first."""

    said: str
    rule: str
    heads: tuple[Head, ...] = ()

    def __repr__(self) -> str:
        return f"Finding({self.said!r})"


class Findings(tuple[Finding, ...]):
    """Findings as a tuple that prints: a sentence a line; in a notebook, a table with their rules."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(finding.said for finding in self) or "no findings"

    def _repr_html_(self) -> str:
        return html.panel("Findings", findings_table((finding.said, finding.rule) for finding in self))


def largest(layers: Sequence[Layer], values: Sequence[Tensor]) -> Head:
    """The head with the largest value, of equal ones the first; NaN is least. Raises ValueError without heads."""
    return max(_each(layers, values), key=lambda head: -math.inf if math.isnan(head.value) else head.value)


def _each(layers: Sequence[Layer], values: Sequence[Tensor]) -> list[Head]:
    return [
        Head(number, head, value, place=layer.place)
        for number, (layer, of_heads) in enumerate(zip(layers, values, strict=True))
        for head, value in enumerate(of_heads.tolist())
    ]


@dataclass(frozen=True, eq=False)
class Shares:
    """The share of rows of each head of each layer (h,), that which chance gives, and the interval of each share."""

    share: list[Tensor]
    chance: list[Tensor]
    low: list[Tensor]
    high: list[Tensor]
    layers: Sequence[Layer]

    @staticmethod
    def of(layers: Sequence[Layer], counted: Sequence[tuple[Tensor, Tensor, int]]) -> Shares:
        """From each layer's (share, chance, number of observations). The intervals hold for all heads together."""
        heads = sum(layer.heads for layer in layers)
        ends = [wilson_interval(share, n, heads) for share, _, n in counted]
        share, chance = [share for share, _, _ in counted], [chance for _, chance, _ in counted]
        return Shares(share, chance, [low for low, _ in ends], [high for _, high in ends], layers)

    def above(self, least: float) -> tuple[Head, ...]:
        """The heads whose share is at least that, and whose interval lies above chance, largest first."""
        found = [
            replace(head, interval=(float(self.low[head.layer][head.head]), float(self.high[head.layer][head.head])))
            for head in _each(self.layers, self.share)
            if head.value >= least and self.low[head.layer][head.head] > self.chance[head.layer][head.head]
        ]
        return tuple(sorted(found, key=lambda head: -head.value))


def findings(layers: Sequence[Layer], context: int, unit: str) -> tuple[Finding, ...]:
    """All that can be said of these layers; `unit` is what a token is called, `context` how many make a copy."""
    every = (
        without_numbers(layers),
        _neighbours(layers, -1, f"previous-{unit} heads", f"the {unit} before"),
        _neighbours(layers, 1, f"next-{unit} heads", f"the {unit} after"),
        _induction(layers, context, unit),
        most_received(layers),
        first_key(layers, f"the first {unit}"),
        peak(layers),
    )
    return tuple(found for found in every if found is not None)


def without_numbers(layers: Sequence[Layer]) -> Finding | None:
    """The heads that computed NaN; None where there is none."""
    entropy = _each(layers, [heads.mean_entropy(layer) for layer in layers])
    found = tuple(head for head in entropy if math.isnan(head.value))
    if not found:
        return None
    names = ", ".join(head.name for head in found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    rule = "the entropy of some row is NaN: a query, a key or a score is not finite; means over heads leave them out"
    return Finding(f"NaN in the weights of {names}{more}", rule, found)


def named(title: str, shares: Shares, least: float, rule: str) -> Finding:
    """The heads whose share is at least `least`, or the nearest one."""
    found = shares.above(least)
    names = (
        ", ".join(map(str, found[:NAMED])) if found else f"none; the nearest is {largest(shares.layers, shares.share)}"
    )
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return Finding(f"{title}: {names}{more}", f"in ≥ {least:.0%} of {rule}; above chance by its 95% interval", found)


def _neighbours(layers: Sequence[Layer], offset: int, title: str, which: str) -> Finding | None:
    counted = [heads.looks_by(layer, offset) for layer in layers]
    # A causal model has no next-token heads, and a model of cross-attention neither kind.
    if not any(bool(share.any()) for share, _, _ in counted):
        return None
    return named(title, Shares.of(layers, counted), NEIGHBOUR, f"rows, the heaviest key is {which}")


def _induction(layers: Sequence[Layer], context: int, unit: str) -> Finding | None:
    found = [induction(layer, context) for layer in layers]
    rows, many = max(one.rows for one in found), f"{context} {unit}s" if context > 1 else f"a {unit}"
    if rows >= EVIDENCE:
        rule = f"the {rows:,} rows that repeat {many}, the heaviest key is one that followed a copy"
        return named("induction heads", _induction_shares(layers, context), INDUCTION, rule)
    if not any(layer.keys.tokens and layer.looks_at_itself for layer in layers):
        return None
    few = "1 row repeats" if rows == 1 else f"{rows or 'no'} rows repeat"
    said = f"induction heads: {few} {many}, too few in this text for a finding"
    return Finding(said, f"in ≥ {INDUCTION:.0%} of the rows that repeat {many}")


def _induction_shares(layers: Sequence[Layer], context: int) -> Shares:
    found = [induction(layer, context) for layer in layers]
    return Shares.of(layers, [(one.share, one.chance, one.contexts) for one in found])


def most_received(layers: Sequence[Layer]) -> Finding | None:
    """The key with the largest share of all mass; None for cross-attention alone."""
    mass = received(layers)
    if not len(mass):
        return None
    key = int(mass.argmax())
    of_key = [
        shares[:, key] if len(shares) else torch.zeros(layer.heads, dtype=torch.float32, device="cpu")
        for layer, shares in _received_by(layers)
    ]
    name, most = (
        next(layer for layer, shares in _received_by(layers) if len(shares)).keys.name(key),
        largest(layers, of_key),
    )
    said = f"{quoted(name)} (key {key:,}) receives {percent(float(mass[key]))} of all mass, most from {most}"
    return Finding(said, "the key with the largest mean weight over all rows and heads", (most,))


def received(layers: Sequence[Layer]) -> Tensor:
    """The share of all mass that each key receives, mean over the heads of the layers of self-attention: (nk,).

    Heads that computed NaN are left out. Where these layers have unlike numbers of keys, those with the most are meant;
    without any, it is empty.
    """
    shares = [share for _, share in _received_by(layers) if len(share)]
    return torch.cat(shares).nanmean(0) if shares else torch.zeros(0, dtype=torch.float32, device="cpu")


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


def first_key(layers: Sequence[Layer], name: str) -> Finding | None:
    """The mass on the first key, which the sentence calls by that name; None where another finding says it."""
    own = [layer for layer in layers if layer.looks_at_itself and len(layer.keys)]
    readers = max((int(layer.readers[:, 0].max()) for layer in own), default=0)
    # Where every row sees the first key and it receives the most, the finding before has said it.
    if not own or (readers == max(len(layer.queries) for layer in own) and not int(received(layers).argmax())):
        return None
    shares = [heads.first_key_mass(layer) * layer.looks_at_itself for layer in layers]
    mean, most = torch.cat([heads.first_key_mass(layer) for layer in own]).nanmean(), largest(layers, shares)
    rows = "1 row that sees it" if readers == 1 else f"{readers:,} rows that see it"
    share = f"{percent(float(mean))} of the mass of the {rows}"
    said = f"{name} receives {share}, most from {most}"
    return Finding(said, "the mean weight on the first key, over these rows and all heads", (most,))


def peak(layers: Sequence[Layer]) -> Finding:
    """The largest score, its head, and the next head's."""
    peaks = [heads.largest_score(layer) for layer in layers]
    most = largest(layers, peaks)
    rest = sorted((head.value for head in _each(layers, peaks) if not math.isnan(head.value)), reverse=True)
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
    copies = _induction_shares(layers, context).above(INDUCTION)
    if copies:
        return copies[0], f"induction head, {copies[0].value:.0%} of the rows with an earlier copy"
    rules = {f"one {unit} back": -1, f"one {unit} ahead": 1}
    shares = {where: Shares.of(layers, [heads.looks_by(layer, by) for layer in layers]) for where, by in rules.items()}
    found = [(head, where) for where, share in shares.items() for head in share.above(NEIGHBOUR)[:1]]
    if found:
        head, where = max(found, key=lambda pair: pair[0].value)
        return head, f"looks {where} in {head.value:.0%} of rows"
    decided = largest(layers, [-heads.mean_entropy(layer) for layer in layers])
    return decided, f"lowest mean entropy, {-decided.value:.2f} nats"
