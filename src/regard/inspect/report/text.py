"""How facts look in a terminal: grids of layers × heads in block characters, and a report around them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from regard.inspect.report.content import Content
from regard.inspect.report.grids import Grid, grids

BLOCKS = "▁▂▃▄▅▆▇█"
SPACED = 8  # heads up to which blocks stand apart


def block(value: float, low: float, high: float) -> str:
    """One character for a value between low and high, the ends included; ends are kept beyond them.

    >>> "".join(block(x / 4, 0, 1) for x in range(5))
    '▁▃▅▇█'
    """
    if not math.isfinite(value):
        return "·"
    share = 0.0 if high <= low else (value - low) / (high - low)
    return BLOCKS[min(max(int(share * len(BLOCKS)), 0), len(BLOCKS) - 1)]


def grid(shown: Grid) -> list[str]:
    """Lines of a picture: a title, the scale, the heads, and one row a layer.

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
    rows = (gap.join(block(v, shown.low, shown.high) for v in row) for row in shown.values)
    scale = f"{BLOCKS[0]} {shown.low:.3g}  {BLOCKS[-1]} {shown.high:.3g}"
    wide = max(4, *map(len, shown.rows))
    return [shown.label, scale, f"{'':{wide}} {heads}"] + [
        f"{place:{wide}} {row}" for place, row in zip(shown.rows, rows, strict=True)
    ]


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


def describe(report: Content, width: int) -> str:
    """The report: a line of facts, the grids, and each finding with its rule."""
    said = [
        line
        for finding in report.findings
        for line in (
            *textwrap.wrap(finding.said, width, subsequent_indent="    "),
            *textwrap.wrap(f"rule: {finding.rule}", width, initial_indent="    ", subsequent_indent="    "),
        )
    ]
    pictures = shelves([grid(one) for one in grids(report.layers, report.context, report.unit)], width)
    return "\n".join([*textwrap.wrap(f"{name(report)}  {facts(report)}", width), "", *pictures, "", *said])


def name(report: Content) -> str:
    """What was run."""
    return f"{report.title} ({report.model})"


def facts(report: Content) -> str:
    """The line of facts: what was read, how long it took, what was kept, what the weights would have taken."""
    read = _range([len(layer.keys) for layer in report.layers])
    heads = _range([layer.heads for layer in report.layers])
    notes = "".join(f", {note}" for note in report.notes)
    kept = f"kept {size(report.kept)} (dense weights: {size(report.dense)})"
    spent = f", {report.seconds:.1f} s" if report.seconds else ""
    return f"{read} {report.unit}s, {len(report.layers)} × {heads} heads{notes}{spent}   {kept}"


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def size(count: int) -> str:
    """Bytes as a person reads them.

    >>> size(6_000_000), size(75_500_000_000), size(1234)
    ('6.0 MB', '75.5 GB', '1.2 kB')
    """
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6)):
        if count >= bytes_:
            return f"{count / bytes_:,.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
