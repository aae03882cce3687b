"""Compared: what differs between two reports, whatever it is written as."""

from __future__ import annotations

import math
import re
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import regard.inspect.report.layer_pair as layer_pair
from regard.core.shapes import count_of
from regard.core.wrong_calls import kind_of
from regard.inspect.report.aligned_cells import AlignedLayers
from regard.inspect.report.alignment import Alignment
from regard.inspect.report.axis import Axis
from regard.inspect.report.content import Content
from regard.inspect.report.findings import NAMED, Finding, Findings, Head, percent, quoted
from regard.inspect.report.grids import Grid
from regard.inspect.report.layer import Layer
from regard.inspect.report.layer_pair import LayerPair
from regard.inspect.report.payload import WEIGHTS

SPECIAL = re.compile(r"\[[A-Z]+\d*\]|</?[a-z_]+>|<\|.*\|>")  # [CLS], </s>, <|endoftext|>


@dataclass(frozen=True, eq=False, repr=False)
class Compared(ABC):
    """The two reports and what follows from them, for the modules that write it; made as a Comparison only."""

    before: Content
    after: Content

    def __post_init__(self) -> None:
        if not isinstance(self.after, Content):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"compare has {kind_of(self.after)}; expected another Report, as rg.look(model, text) gives it."
            )
        counts = [[layer.heads for layer in report.layers] for report in (self.before, self.after)]
        if counts[0] != counts[1]:
            said = [f"{count_of(len(one), 'layer')} of {sorted(set(one))} heads" for one in counts]
            raise ValueError(f"the reports have {said[0]} and {said[1]}; expected the same layers and heads.")

    @property
    def labels(self) -> tuple[str, str]:
        """What distinguishes the two: their titles, or where these are the same, how their texts begin."""
        titles = self.before.title, self.after.title
        texts = [beginning(report.layers[0].keys.tokens) for report in (self.before, self.after)]
        return titles if titles[0] != titles[1] or texts[0] == texts[1] else (f"‘{texts[0]}’", f"‘{texts[1]}’")

    @cached_property
    def by(self) -> str:
        """What is compared: "tokens" that correspond, or "cells" of the maps, each with the cell at the same place.

        Cells are compared if a layer has more than 512 queries or keys, if no query of a layer has a counterpart, or
        if both reports together have more weights than a page holds. See `aligned`.
        """
        pairs = list(zip(self.before.layers, self.after.layers, strict=True))
        layers = [layer for both in pairs for layer in both]
        whole = all(layer_pair.has_every_weight(layer) for layer in layers)
        if not whole or sum(layer.weights.numel() for layer in layers) > WEIGHTS:
            return "cells"
        return "tokens" if all(bool(layer_pair.by_token(a, b)[0].both.any()) for a, b in pairs) else "cells"

    @cached_property
    def aligned(self) -> AlignedLayers | None:
        """The layers in cells of corresponding tokens, for long texts that differ; None where cells are those of maps.

        They need the weights of all queries: queries and keys that were kept (look keeps them up to 2,048 tokens).
        """
        return None if self.by == "tokens" else AlignedLayers.of(self.before.layers, self.after.layers)

    @cached_property
    def layers(self) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
        """The layers of both reports; where cells are compared, without single weights, and with cells that fit."""
        if self.by == "tokens":
            return self.before.layers, self.after.layers
        if self.aligned is not None:
            return self.aligned.before, self.aligned.after
        return layer_pair.in_cells(self.before.layers, self.after.layers)

    def fits(self, layer: int, other: int) -> bool:
        """Whether a layer before can be compared with that one after: their maps have as many cells."""
        if self.aligned is not None:
            cells = self.aligned.rows, self.aligned.cols
            return all(side[layer] == side[other] for side in cells)
        sizes = [side[n].maps.shape[-2:] for side, n in zip(self.layers, (layer, other), strict=True)]
        return self.by == "tokens" or sizes[0] == sizes[1]

    def alignments(self, layer: int, other: int) -> tuple[Alignment, Alignment]:
        """Which query of a layer before is which of one after, and which key."""
        if self.by == "cells" and self.aligned is not None:
            return self.aligned.rows[layer].alignment, self.aligned.cols[layer].alignment
        of = layer_pair.by_token if self.by == "tokens" else layer_pair.by_cell
        return of(self.layers[0][layer], self.layers[1][other])

    def pair(self, layer: int, other: int) -> LayerPair:
        """A layer before and a layer after, on rows and columns that correspond."""
        before, after = self.layers[0][layer], self.layers[1][other]
        if self.by == "tokens":
            return layer_pair.of_tokens(before, after)
        return LayerPair(before.maps, after.maps, *self.alignments(layer, other))

    @cached_property
    def change(self) -> Grid:
        """The change of each head, in percent of the mass."""
        pairs = [(self.pair(n, n), layer.heads) for n, layer in enumerate(self.before.layers)]
        values = tuple(tuple(100 * pair.change(head, head) for head in range(heads)) for pair, heads in pairs)
        places = tuple(layer.place for layer in self.before.layers)
        most = max([1.0, *(value for row in values for value in row if math.isfinite(value))])
        return Grid("change", "% of mass", values, 0.0, most, places)

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """All heads, those that changed most first; the value of each is its change, from 0 to 1. NaN is last."""
        rows = zip(self.before.layers, self.change.values, strict=True)
        found = [
            Head(n, h, value / 100, place=layer.place)
            for n, (layer, row) in enumerate(rows)
            for h, value in enumerate(row)
        ]
        return tuple(sorted(found, key=lambda head: math.inf if math.isnan(head.value) else -head.value))

    def numbers(self, head: Head) -> tuple[str, ...]:
        """What the overview's numbers of a head were and are, as sentences."""
        both = zip(self.before.summary, self.after.summary, strict=False)
        return tuple(
            f"{a.label} {_number(a.values[head.layer][head.head])} → {_number(b.values[head.layer][head.head])}"
            for a, b in both
            if a.title == b.title
        )

    @cached_property
    def findings(self) -> Findings:
        """The heads that changed most, where the first of them moved its mass, and what has no counterpart."""
        named = tuple(head for head in self.heads[:NAMED] if head.value > 0)
        no_number = [head.name for head in self.heads if math.isnan(head.value)]
        said = ", ".join(map(str, named)) or ("none" if no_number else "none; all weights are the same")
        said += f"; NaN in {', '.join(no_number[:NAMED])}" if no_number else ""
        most = Finding(
            f"heads that changed most: {said}", "the share of a head's mass on other keys, mean over queries", named
        )
        return Findings(found for found in (most, self._moved_most(), *self._alone()) if found is not None)

    def _moved_most(self) -> Finding | None:
        head = self.heads[0]
        pair = self.pair(head.layer, head.layer)
        mean = pair.moved(head.head, head.head)[pair.rows.both].mean(0)
        if self.by == "cells" or not head.value > 0 or not len(mean):
            return None
        low, high = int(mean.argmin()), int(mean.argmax())
        names = [
            f"‘{pair.cols.names[n]}’ (key {pair.cols.number(n)}, " if pair.cols.names else f"key {n} ("
            for n in (low, high)
        ]
        fell, rose = percent(-float(mean[low])), percent(float(mean[high]))
        said = f"{head.name} moved mass from {names[0]}−{fell}) to {names[1]}+{rose})"
        return Finding(said, "the keys whose mean weight over all queries fell and rose most", (head,))

    def _alone(self) -> tuple[Finding, ...]:
        """What has no counterpart in the other text, of the layer that changed most."""
        if self.by == "cells":
            layer = self.layers[0][0]
            rows, cols = self.alignments(0, 0)
            cells = f"{len(rows)} × {len(cols)} cells"
            if self.aligned is not None:
                said = f"queries and keys are compared in {cells} of corresponding tokens"
                return (Finding(said, "beyond 512 tokens; tokens are aligned as difflib aligns lines"),)
            said = f"queries and keys are compared by their place in the text, in {cells}"
            rule = "beyond 512 tokens, where q and k were not kept, or no token of one text is in the other"
            return (Finding(said, rule),)
        layer = self.heads[0].layer
        sides = [
            _listed(side, what, axis, alignment.alone(side))
            for what, alignment in zip(("queries", "keys"), self.alignments(layer, layer), strict=True)
            for side, axes in zip(("before", "after"), self._axes(layer), strict=True)
            if (axis := axes.get(what)) is not None and alignment.alone(side)
        ]
        if not sides:
            return ()
        return (Finding(f"without a counterpart: {'; '.join(sides)}", "tokens are aligned as difflib aligns lines"),)

    def _axes(self, layer: int) -> list[dict[str, Axis]]:
        """The texts of a layer before and after; those of self-attention once, as its keys."""
        return [
            {"keys": one.keys} if one.looks_at_itself else {"queries": one.queries, "keys": one.keys}
            for one in (side[layer] for side in self.layers)
        ]


def joined(tokens: Sequence[str]) -> str:
    """Tokens as a text: with spaces between them, unless they have spaces of their own, or are single characters."""
    marked = any(" " in token for token in tokens) or all(len(token) <= 1 for token in tokens)
    return ("" if marked else " ").join(tokens)


def beginning(tokens: Sequence[str], most: int = 40) -> str:
    """How a text begins, on one line; without special tokens and the marks of word pieces.

    >>> beginning(["[CLS]", "the", "cat", "##s", "[SEP]"]), beginning("to be or not", 5)
    ('the cats', 'to be…')
    """
    line = " ".join(joined([token for token in tokens if not SPECIAL.fullmatch(token)]).split()).replace(" ##", "")
    return line if len(line) <= most else f"{line[:most]}…"


def _listed(side: str, what: str, axis: Axis, alone: list[int]) -> str:
    names = ", ".join(quoted(axis.name(n)) for n in alone[:NAMED])
    more = f" and {len(alone) - NAMED} more" if len(alone) > NAMED else ""
    return f"{len(alone)} of {len(axis)} {what} {side} ({names}{more})"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "–"
