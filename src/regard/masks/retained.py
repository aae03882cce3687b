"""Retained: keys that are seen up to a position of the query, as when a cache evicts them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.core.arrays import integers
from regard.core.region import Frame, Region, Tiling
from regard.core.shapes import equal_shapes, listed, repeat_heads
from regard.core.wrong_calls import answers_wrong_calls
from regard.masks.algebra import Mask, cover_of
from regard.masks.picture import Extent

_OF_BOOLEANS = " Booleans that say which keys stay for all queries are Dense(kept[:, None, None, :])."


@answers_wrong_calls(
    {
        **dict.fromkeys(("end", "ends", "stop", "evicted", "evict_at", "lifetime"), "write until=positions"),
        "startend_row_indices": "of FlashMask's causal mask with one column, Causal() & Retained(indices[..., 0])",
    },
    "until holds, for each key, the first position of a query that no longer sees it.",
)
@dataclass(frozen=True)
class Retained(Mask):
    """Keys until they are evicted: key j is visible to a query while the query's position is below until[j].

    until: integers (nk,), (*batch, nk) or (*batch, g, nk), one for each key: the position of the first query that no
    longer sees it. g divides the number of query heads; each row is for h / g neighbouring heads, so g may be 1, the
    number of key heads or that of query heads. A number beyond all queries keeps the key for all of them; one at or
    before the first query's position hides it from all. Without tokens' positions, a query's position is its index.

    Mostly it is joined to a causal mask, Causal() & Retained(until): the mask of a cache that evicts keys, in training
    and prefill. Raises TypeError for other numbers than integers, ShapeError for another shape. Sources: Łańcucki et
    al. 2025, Dynamic Memory Sparsification (arXiv 2506.05345); Wang et al. 2024, FlashMask (arXiv 2410.01359), whose
    start of the lower triangle it is.

    >>> from regard.masks.positional import Causal
    >>> (Causal() & Retained(torch.tensor([4, 2, 3, 4]))).draw(4)
    ■···
    ■■··
    ■·■·
    ■··■
    """

    states_pattern: ClassVar[bool] = True
    until: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "until", integers(self.until, "Retained.until", _OF_BOOLEANS))

    def visible(self, at: Region) -> Tensor:
        return at.i < at.pairs(self._of_heads(at.frame))

    def cover(self, at: Tiling) -> Tensor:
        least, largest = at.pairs(self._of_heads(at.frame))
        first, last = at.i
        return cover_of(none=largest <= first, all_=least > last)

    def of_pairs(self, frame: Frame) -> Tensor:
        """until as (*batch, g, 1, nk), without the leading axes that it lacks."""
        if self.until.dim() == len(frame.batch) + 2:
            return self.until[..., None, :]
        return self.until[..., None, None, :] if self.until.dim() > 1 else self.until[None, None]

    def _of_heads(self, frame: Frame) -> Tensor:
        """The same with a row for each head, or one for all, in the caller's axes."""
        t = self.of_pairs(frame)
        t = t if t.shape[-3] == 1 else repeat_heads(t, frame.heads)
        return t if frame.headed else t.squeeze(-3)

    def differs_by_head(self) -> bool:
        return self.until.dim() > 1

    def shape_error(self, frame: Frame) -> str | None:
        shape, lead = tuple(self.until.shape), self.until.shape[:-1]
        groups = lead[-1] if frame.headed and len(lead) and equal_shapes(lead[:-1], frame.batch) else None
        divide = groups is not None and (groups == frame.heads or (groups > 0 and frame.heads % groups == 0))
        if shape[-1:] == (frame.nk,) and (not len(lead) or equal_shapes(lead, frame.batch) or divide):
            return None
        fits = [f"({frame.nk},)"]
        if frame.batch:
            fits.append(listed((*frame.batch, frame.nk)))
        if frame.headed:
            fits.append(
                f"({', '.join(map(str, (*frame.batch, 'g', frame.nk)))}) where g divides the {frame.heads} heads"
            )
        return f"Retained.until has shape {listed(shape)}; expected {' or '.join(fits)}: a position for each key."

    def batch(self) -> tuple[int, ...]:
        return tuple(self.until.shape[:-2] if self.until.dim() > 2 else self.until.shape[:-1])

    def extent(self) -> Extent:
        groups = self.until.shape[-2] if self.until.dim() > 2 else 1
        return Extent(None if groups == 1 else groups, None, self.until.shape[-1] if self.until.dim() else None)

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        first = int(frame.positions.q.min()) if frame.nq else 0
        heads = (frame.heads,) if frame.headed else ()

        def until(*lead: int) -> Tensor:
            n = torch.arange(math.prod(lead) * frame.nk, device=frame.device, dtype=torch.int64)
            return (first + n * 7 % (frame.nq + 3)).reshape(*lead, frame.nk)

        return cls(until()), cls(until(*frame.batch, *heads))
