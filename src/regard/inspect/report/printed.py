"""How grids and findings look in a terminal: block characters, and sentences with their rules."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from regard.inspect.report.findings import Finding
from regard.inspect.report.grids import Grid

BLOCKS = "▁▂▃▄▅▆▇█"
BELOW = "▁░░▒▒▒▓▓"  # the same for numbers below 0, where signs have a meaning
SPACED = 8  # heads up to which blocks stand apart


def block(share: float) -> str:
    """One character for a place on a scale: from 0 to 1, or from -1, where numbers below 0 are shaded.

    >>> "".join(block(x / 4) for x in range(5)), "".join(block(-x / 4) for x in range(5))
    ('▁▃▅▇█', '▁░▒▓▓')
    """
    characters = BELOW if share < 0 else BLOCKS
    return characters[min(int(abs(share) * len(characters)), len(characters) - 1)]


def grid(shown: Grid) -> list[str]:
    """Lines of a picture: a title, the scale, the heads, and one row a layer; "·" stands for what is no number.

    >>> print("\\n".join(grid(Grid("entropy", "nats", ((0.0, 1.0), (2.0, 1.0)), 0, 2))))
    entropy, nats
    ▁ 0  █ 2
         0 1
    L0   ▁ ▅
    L1   █ ▅
    """
    most = max(map(len, shown.values), default=0)
    gap = " " if most <= SPACED else ""
    heads = gap.join(f"{n % 10}" for n in range(most))
    rows = (gap.join(block(shown.share(v)) if math.isfinite(v) else "·" for v in row) for row in shown.values)
    wide = max(4, *map(len, shown.rows))
    return [shown.label, _scale(shown), f"{'':{wide}} {heads}"] + [
        f"{place:{wide}} {row}" for place, row in zip(shown.rows, rows, strict=True)
    ]


def _scale(shown: Grid) -> str:
    if shown.signs is None:
        return f"{BLOCKS[0]} {shown.low:.3g}  {BLOCKS[-1]} {shown.high:.3g}"
    below, above = shown.signs
    return f"{BELOW[-1]} {shown.low:.3g} {below}  {BLOCKS[0]} 0  {BLOCKS[-1]} {shown.high:+.3g} {above}"


def side_by_side(*pictures: list[str], gap: int = 4) -> list[str]:
    """Pictures of equal height next to each other.

    >>> print("\\n".join(side_by_side(["a", "bc"], ["d", "e"])))
    a     d
    bc    e
    """
    widths = [max(map(len, picture)) for picture in pictures]
    rows = zip(*pictures, strict=True)
    return [(" " * gap).join(part.ljust(w) for part, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def shelves(pictures: Sequence[list[str]], width: int, gap: int = 4) -> list[str]:
    """Pictures of equal height in rows, as many in each as the width takes, a blank line between rows.

    >>> shelves([["aa"], ["bb"], ["cc"]], width=8)
    ['aa    bb', '', 'cc']
    """
    rows: list[list[list[str]]] = []
    room = -1
    for picture in pictures:
        size = max(map(len, picture)) + gap
        if size > room + gap or not rows:
            rows.append([])
            room = width
        rows[-1].append(picture)
        room -= size
    joined = [side_by_side(*row, gap=gap) for row in rows]
    return [line for n, lines in enumerate(joined) for line in ([""] if n else []) + lines]


def sentences(findings: Iterable[Finding], width: int) -> list[str]:
    """Lines of findings, each with its rule below it."""
    return [
        line
        for finding in findings
        for line in (
            *textwrap.wrap(finding.said, width, subsequent_indent="    "),
            *textwrap.wrap(f"rule: {finding.rule}", width, initial_indent="    ", subsequent_indent="    "),
        )
    ]
