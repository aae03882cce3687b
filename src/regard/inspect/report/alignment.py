"""Alignment: which tokens of two texts correspond."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

import torch
from torch import Tensor

from regard.inspect.report.axis import Axis
from regard.inspect.report.findings import shown

NONE = -1  # in place of a token: the other text has no counterpart


@dataclass(frozen=True, eq=False)
class Alignment:
    """The tokens of two texts in one order; those that correspond stand together.

    before, after   (n,) int64, numbers of tokens, ascending; NONE where the token of the other text has no counterpart
    names           (n,) what the tokens are called, as reports show them: "cat → dog" where they differ; or none

    Equal tokens correspond as difflib.SequenceMatcher finds them, and so do the tokens of a run that was replaced by as
    many others. Without texts, tokens correspond by their number.

    >>> def axis(text):
    ...     return Axis(torch.arange(len(text.split())), tuple(text.split()))
    >>> Alignment.of(axis("the old cat sat"), axis("the dog sat down")).names
    ('the', 'old (before)', 'cat (before)', 'dog (after)', 'sat', 'down (after)')
    >>> Alignment.of(axis("the cat sat"), axis("the dog sat")).names
    ('the', 'cat → dog', 'sat')
    """

    before: Tensor
    after: Tensor
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.before)

    @property
    def both(self) -> Tensor:
        """Where both texts have a token, boolean (n,)."""
        return (self.before != NONE) & (self.after != NONE)

    def number(self, n: int) -> int:
        """The number of the n-th token in its text: before, or after where that text alone has it."""
        return int(self.before[n] if self.before[n] != NONE else self.after[n])

    def alone(self, side: str) -> list[int]:
        """The tokens of a side, "before" or "after", that have no counterpart."""
        tokens = self.before if side == "before" else self.after
        return tokens[~self.both & (tokens != NONE)].tolist()

    @staticmethod
    def of(before: Axis, after: Axis) -> Alignment:
        """Of the tokens along one side of two maps."""
        pairs: list[tuple[int, int]] = []
        for _, a, b, c, d in _opcodes(before, after):
            if b - a == d - c:
                pairs += zip(range(a, b), range(c, d), strict=True)
            else:
                pairs += [(n, NONE) for n in range(a, b)] + [(NONE, n) for n in range(c, d)]
        known = bool(before.tokens and after.tokens)
        names = tuple(_name(before, after, *pair) for pair in pairs) if known else ()
        return Alignment(*_columns(pairs), names)

    @staticmethod
    def of_cells(count: int) -> Alignment:
        """Of as many cells in both maps, each with the one in its place."""
        return Alignment(*_columns([(n, n) for n in range(count)]))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal alignments."""
        return (*self.before.tolist(), "after", *self.after.tolist(), *self.names)


def _opcodes(before: Axis, after: Axis) -> list[tuple[str, int, int, int, int]]:
    """The runs of tokens that are equal, replaced, deleted or inserted, as difflib has them."""
    if before.tokens and after.tokens:
        return _of_texts(before.tokens, after.tokens)
    same, n, m = min(len(before), len(after)), len(before), len(after)
    rest = [("delete", same, n, same, same)] if n > same else [("insert", same, same, same, m)] if m > same else []
    return [("equal", 0, same, 0, same), *rest]


@lru_cache(16)  # the layers of two reports have the same few texts
def _of_texts(before: tuple[str, ...], after: tuple[str, ...]) -> list[tuple[str, int, int, int, int]]:
    return list(SequenceMatcher(None, before, after, autojunk=False).get_opcodes())


def _name(before: Axis, after: Axis, a: int, b: int) -> str:
    if b == NONE:
        return f"{shown(before.name(a))} (before)"
    if a == NONE:
        return f"{shown(after.name(b))} (after)"
    old, new = shown(before.name(a)), shown(after.name(b))
    return old if old == new else f"{old} → {new}"


def _columns(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    table = torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)
    return table[:, 0], table[:, 1]
