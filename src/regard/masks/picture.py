"""A mask as a notebook shows it: how large a call its picture is of, and the picture, of pairs or of tiles."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from torch import Tensor

import regard.core.html as html
from regard.core.region import Frame
from regard.core.shapes import count_of
from regard.masks.intervals import Interval

LEAST, MOST = 16, 1 << 20  # tokens of a picture, where the mask leaves that open
WRITTEN = 192  # tokens up to which every pair is drawn
TILES = 128  # of each side, about, where there are more
SIDE = 200  # pixels
MAPS = 4  # sequences and heads that are drawn at most


class Extent(NamedTuple):
    """What a mask's own numbers say of the calls that it is made for.

    heads, nq, nk  the sizes that its tensors fit, None where any does
    tokens         how many it takes to see what its numbers say
    """

    heads: int | None = None
    nq: int | None = None
    nk: int | None = None
    tokens: int = 0

    def both(self, other: Extent) -> Extent:
        """Of a mask made of two; where they fit no call in common, the first one's sizes."""
        heads, nq, nk = (b if a is None else a for a, b in zip(self[:3], other[:3], strict=True))
        return Extent(heads, nq, nk, max(self.tokens, other.tokens))

    def sizes(self) -> tuple[int, int, int]:
        """Heads, queries and keys of the picture; queries and keys are as many where only one of them is given."""
        free = min(max(self.tokens, LEAST), MOST)
        nq, nk = (first if first is not None else second for first, second in ((self.nq, self.nk), (self.nk, self.nq)))
        return self.heads or 1, free if nq is None else nq, free if nk is None else nk


class Shown(Protocol):
    """The questions that a mask on a frame answers."""

    @property
    def frame(self) -> Frame: ...
    def rows(self) -> Interval | None: ...
    def dense(self) -> Tensor: ...
    def cover(self, r: int, c: int) -> Tensor: ...
    def density(self) -> float: ...


def picture(shown: Shown) -> html.Markup:
    """The map of each sequence and head, the first MAPS of them; one alone where they are equal.

    Up to WRITTEN queries and keys, ink is a visible pair. Beyond, a cell is a tile: full ink where all of its pairs are
    visible, half where some are; so the memory is that of about TILES × TILES numbers a map, however long the call.
    """
    frame = shown.frame
    size = math.ceil(max(frame.nq, frame.nk) / TILES) if max(frame.nq, frame.nk) > WRITTEN else 1
    full = 1 if size == 1 else 2  # a visible pair is True, a tile of which all are visible Cover.ALL
    levels = shown.dense().expand(frame.shape) if size == 1 else shown.cover(size, size)
    maps = levels.reshape(math.prod(levels.shape[:-2]), *levels.shape[-2:])
    if bool((maps == maps[:1]).all()):
        maps = maps[:1]  # one for all sequences and heads
    longest = max(frame.nq, frame.nk, 1)
    width, height = (max(8, round(SIDE * n / longest)) for n in (frame.nk, frame.nq))
    named = _named(frame, len(maps))
    drawn = [
        html.figure(name, html.picture(one, f"{name or 'the mask'}: queries down, keys across", width, height))
        for name, one in zip(named, (maps[:MAPS] / full).tolist(), strict=False)
    ]
    said = f"{count_of(frame.nq, 'query', ',')} (down) × {count_of(frame.nk, 'key', ',')} (across)"
    if size == 1 or shown.rows() is not None:
        said += f"; {100 * shown.density():.3g}% of the pairs are visible"
    if size > 1:
        said += f"; a cell is {size:,} × {size:,} pairs: all visible, some (faint), or none"
    if len(maps) > MAPS:
        said += f"; the first {MAPS} of {len(maps):,} maps"
    return html.element("div", html.side_by_side(*drawn), html.quiet(said))


def _named(frame: Frame, maps: int) -> list[str]:
    """What each map is of; one alone needs no name."""
    if maps == 1:
        return [""]
    sequences = [f"sequence {n}" for n in range(maps // frame.heads)] if frame.batch else [""]
    heads = [f"head {n}" for n in range(frame.heads)] if frame.heads > 1 else [""]
    return [", ".join(filter(None, (sequence, head))) for sequence in sequences for head in heads]
