"""How a report looks in a terminal: a line of facts, grids of layers × heads, findings."""

from __future__ import annotations

import textwrap

from regard.inspect.report.content import Content
from regard.inspect.report.printed import grid, sentences, shelves


def describe(report: Content, width: int) -> str:
    """The report: a line of facts, the grids, and each finding with its rule."""
    pictures = shelves([grid(one) for one in report.grids], width)
    said = sentences(report.findings, width)
    return "\n".join([*textwrap.wrap(f"{name(report)}  {facts(report)}", width), "", *pictures, "", *said])


def name(report: Content) -> str:
    """What was run."""
    return f"{report.title} ({report.model})"


def facts(report: Content) -> str:
    """The line of facts: what was read, how long it took, what was kept, what the weights would have taken."""
    asking = [len(layer.queries) for layer in report.layers if not layer.looks_at_itself]  # of another sequence
    read = _range([*asking, *(len(layer.keys) for layer in report.layers)])
    units = report.unit if read == "1" else f"{report.unit}s"
    heads = _range([layer.heads for layer in report.layers])
    ways = "head" if heads == "1" and len(report.layers) == 1 else "heads"
    notes = "".join(f", {note}" for note in report.notes)
    inputs = f", q and k {size(report.inputs)}" if report.inputs else ""
    kept = f"kept {size(report.kept)}{inputs}"
    if report.dense > report.kept:
        kept += f" (dense weights: {size(report.dense)})"
    spent = f", {report.seconds:.1f} s" if report.seconds else ""
    return f"{read} {units}, {len(report.layers)} × {heads} {ways}{notes}{spent}   {kept}"


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
