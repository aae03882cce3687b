"""Pattern: which pairs a mask shows, counted in strips of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.region import Frame, Region
from regard.core.shapes import blocks
from regard.core.value import is_regards_own
from regard.masks.algebra import And, Mask, Or

STRIP = 64  # rows whose pairs are held at once


@dataclass(frozen=True, eq=False)
class Pattern:
    """Of a mask in one frame; "in any" is in any batch element and head.

    keys_of_row   how many keys each row sees, (..., nq), over the mask's own leading axes
    rows_of_key   how many rows see each key, (..., nk)
    ends          whether the visible keys of every row are the first ones; the same of the last ones
    own           how many queries have a key at their own position, and of how many it is visible in any
    beside        pairs whose positions differ by one, and how many of them are visible in any
    past, future  pairs whose key is before, or after, the query that are visible in any
    all_past      pairs whose key is before the query
    """

    keys_of_row: Tensor
    rows_of_key: Tensor
    ends: tuple[bool, bool]
    own: tuple[int, int]
    beside: tuple[int, int]
    past: int
    future: int
    all_past: int


def written_out(mask: Mask) -> bool:
    """Whether the mask is defined pair by pair, by `~`, or by a class of others, which states no pattern."""
    if isinstance(mask, (And, Or)):
        return written_out(mask.a) or written_out(mask.b)
    return not (mask.states_pattern and is_regards_own(type(mask)))


def pattern(mask: Mask, frame: Frame) -> Pattern:
    """Counts over all pairs, a strip of rows at a time."""
    # room beforehand: small results between the large ones of each strip would keep the heap from reusing those
    lead = mask.visible(frame.region(slice(0, 1))).shape[:-2]
    keys_of_row = torch.zeros(*lead, frame.nq, dtype=torch.int64, device=frame.device)
    rows_of_key = torch.zeros(*lead, frame.nk, dtype=torch.int64, device=frame.device)
    ends = [True, True]
    totals = torch.zeros(7, dtype=torch.int64, device="cpu")
    last = frame.nk - 1
    for at, seen in strips(mask, frame):
        count = seen.sum(-1)
        keys_of_row[..., at.rows] = count
        rows_of_key += seen.sum(-2)
        for n, end in enumerate((seen, seen.flip(-1))):
            farthest = last - end.flip(-1).int().argmax(-1)  # the last visible key, counted from that end
            ends[n] = ends[n] and bool(((farthest + 1 == count) | (count == 0)).all())
        ahead = at.j - at.i
        own, beside, past, future = ahead == 0, ahead.abs() == 1, ahead < 0, ahead > 0
        pairs = (beside, beside & seen, past & seen, future & seen, past)
        rows = (in_any(own).any(-1), in_any(own & seen).any(-1))
        totals += torch.stack([*(x.sum() for x in rows), *(in_any(x).sum() for x in pairs)]).cpu()
    own, own_seen, beside, beside_seen, past, future, all_past = totals.tolist()
    return Pattern(
        keys_of_row, rows_of_key, (ends[0], ends[1]), (own, own_seen), (beside, beside_seen), past, future, all_past
    )


def strips(mask: Mask, frame: Frame) -> Iterator[tuple[Region, Tensor]]:
    """Each strip of rows, and what is visible there: (..., r, nk), over the mask's own leading axes."""
    for rows in blocks(frame.nq, STRIP):
        at = frame.region(rows)
        seen = mask.visible(at)
        yield at, seen.expand(*seen.shape[:-2], rows.stop - rows.start, frame.nk)


def leaked(mask: Mask, frame: Frame, everybodys: Tensor | None = None) -> Tensor:
    """How many keys that stand behind it each query sees in any, (nq,).

    everybodys: which keys are left out, over the mask's own leading axes, (..., nk).
    """
    found = torch.zeros(frame.nq, dtype=torch.int64, device=frame.device)
    for at, seen in strips(mask, frame):
        future = seen & (at.j > at.i)
        if everybodys is not None:
            future = future & ~everybodys[..., None, :]
        found[at.rows] = in_any(future).sum(-1)
    return found


def in_any(pairs: Tensor) -> Tensor:
    """(..., r, c) -> (r, c): True where it is in any batch element or head."""
    return pairs.flatten(0, -3).any(0) if pairs.dim() > 2 else pairs
