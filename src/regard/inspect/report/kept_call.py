"""KeptCall: the queries and keys of a call, kept so that any row of its weights can be computed exactly, at once."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.api import attention_weights
from regard.call.hooks import AttentionCall
from regard.core.shapes import blocks
from regard.inspect.report.reach import visible
from regard.masks.algebra import View

HALF = (torch.float16, torch.bfloat16)
STRIP = 256  # queries whose weights are computed at a time, for all batch elements


@dataclass(frozen=True, eq=False)
class KeptCall:
    """What one call of a layer was made of, and which of its queries and keys the layer shows.

    call     q, k, score, mask, positions and sink
    view     the mask on the call's frame
    element  the batch element, counted flat
    rows     the call's queries that the layer shows
    keys     the call's keys that the layer shows
    places   (keys,) where these stand among the layer's keys
    """

    call: AttentionCall
    view: View
    element: int
    rows: slice
    keys: slice
    places: Tensor

    @property
    def size(self) -> int:
        """Bytes that q and k take, those of other batch elements included."""
        return sum(t.numel() * t.element_size() for t in (self.call.q, self.call.k))

    @property
    def queries(self) -> int:
        """How many queries the layer shows of this call."""
        return self.rows.stop - self.rows.start

    @torch.no_grad()
    def row(self, query: int, keys: int) -> tuple[Tensor, Tensor]:
        """The weights of a query, counted from the first that is shown, on all of the layer's keys; and which it sees.

        Both (h, keys), on the CPU: float32 (float64 for float64), and boolean. Time and memory are linear in the keys.
        """
        row = self.rows.start + query
        weights = self._weights(slice(row, row + 1), keys)[:, 0]
        seen = visible(self.view, self.element, slice(row, row + 1))[:, 0]
        return weights, seen.new_zeros(len(seen), keys).index_copy_(1, self.places, seen[:, self.keys])

    @torch.no_grad()
    def weights(self, keys: int) -> Tensor:
        """The weights of all queries on all of the layer's keys, (h, queries, keys), as `row` has them."""
        strips = blocks(self.queries, STRIP)
        first = self.rows.start
        return torch.cat([self._weights(slice(first + one.start, first + one.stop), keys) for one in strips], 1)

    @torch.no_grad()
    def strips(self, keys: int) -> Generator[tuple[Tensor, Tensor], None, None]:
        """The weights of 256 queries at a time, (h, r, keys), and which keys any head may see, boolean (r, keys)."""
        for strip in blocks(self.queries, STRIP):
            rows = slice(self.rows.start + strip.start, self.rows.start + strip.stop)
            seen = visible(self.view, self.element, rows).any(0)[:, self.keys]
            yield self._weights(rows, keys), seen.new_zeros(len(seen), keys).index_copy_(1, self.places, seen)

    def _weights(self, rows: slice, keys: int) -> Tensor:
        frame, call = self.view.frame, _widened(self.call)
        weights = attention_weights(
            call.q,
            call.k,
            score=call.score,
            mask=call.mask,
            positions=call.positions,
            sink=call.sink,
            rows=list(range(rows.start, rows.stop)),
        )
        weights = weights.reshape(math.prod(frame.batch), frame.heads, -1, frame.nk)[self.element].cpu()
        none = weights.new_zeros(*weights.shape[:2], keys)
        return none.index_copy_(2, self.places, weights[..., self.keys])


def _widened(call: AttentionCall) -> AttentionCall:
    """The same in float32, where it is of half precision: its weights would be rounded to three digits."""
    if call.q.dtype not in HALF:
        return call
    score = call.score.with_tensors(iter([_wide(t) for t in call.score.tensors()]))
    sink = _wide(call.sink) if isinstance(call.sink, Tensor) else call.sink
    return replace(call, q=call.q.float(), k=call.k.float(), score=score, sink=sink)


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in HALF else t
