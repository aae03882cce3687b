"""What flash-attention's three functions share: their options as a mask and a score, and a call on regard."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.dropout import Dropout
from regard.core.paged import Paged
from regard.core.positions import Positions, tail
from regard.masks.algebra import Everything, Mask
from regard.masks.convert import from_flash_window
from regard.masks.positional import Causal
from regard.masks.ragged import Lengths
from regard.runtime.binding import BoundCall
from regard.scores.algebra import Score
from regard.scores.modifiers import Alibi, SoftCap
from regard.scores.similarity import ScaledDot

Window = Sequence[int] | Tensor


@dataclass(frozen=True)
class Options:
    """The arguments that say what attention is computed; meanings as in `flash_attention`."""

    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    dropout_p: float = 0.0

    def mask(self) -> Mask:
        left, right = bounds(self.window_size)
        right = 0 if self.causal else right
        if left == -1 and right < 1:
            return Causal() if right == 0 else Everything()
        return from_flash_window(left, right)

    def score(self, slopes: Tensor | None) -> Score:
        """slopes (heads,), added after the cap. Those of no sequence, (0, heads), change nothing."""
        score: Score = ScaledDot(self.softmax_scale)
        score = score >> SoftCap(self.softcap) if self.softcap > 0 else score
        return score if slopes is None or slopes.dim() == 2 else score >> Alibi(slopes)

    def bind(
        self, q: Tensor, k: Tensor | Paged, v: Tensor | Paged, slopes: Tensor | None, mask: Mask, positions: Positions
    ) -> BoundCall:
        """A call of q (batch, nq, heads, d), checked. Keys and values: (batch, nk, hk, d), or on pages."""
        k, v = (t if isinstance(t, Paged) else t.transpose(1, 2) for t in (k, v))
        dropout = Dropout(self.dropout_p) if self.dropout_p else None
        return BoundCall(q.transpose(1, 2), k, v, self.score(slopes), mask, positions, None, dropout)

    def bind_to_last(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> BoundCall:
        """A call whose queries are the last of the tokens."""
        return self.bind(q, k, v, slopes, self.mask(), tail(q.shape[1], k.shape[1], q.device))


@dataclass(frozen=True)
class CachedTokens:
    """The keys and values that sequences have on pages of pools (pages, page_size, hk, d).

    table    (batch, most pages), each of which there is
    lengths  the tokens of each sequence, () for the same of all, or (batch,)
    first    (batch,), where each sequence begins, or None
    """

    pools: tuple[Tensor, Tensor]
    table: Tensor
    lengths: Tensor
    first: Tensor | None

    def of(self, rows: slice) -> CachedTokens:
        lengths = self.lengths[rows] if self.lengths.dim() else self.lengths
        return CachedTokens(self.pools, self.table[rows], lengths, None if self.first is None else self.first[rows])

    def bind(self, q: Tensor, slopes: Tensor | None, options: Options) -> BoundCall:
        """A call of q (batch, nq, heads, d), the last tokens of each sequence; no key is read yet."""
        nq, n = q.shape[1], int(self.lengths.max()) if self.lengths.numel() else 0
        mask, positions = options.mask(), tail(nq, n, q.device)
        if self.lengths.dim():
            at = torch.arange(nq, device=q.device, dtype=torch.int64)
            mask, positions = mask & Lengths(keys=self.lengths), Positions(self.lengths[:, None] - nq + at, positions.k)
        if self.first is not None:
            mask = mask & Lengths(first=self.first.clamp(max=n))
        keys, values = (Paged(t.transpose(1, 2), self.table, n) for t in self.pools)
        return options.bind(q, keys, values, slopes, mask, positions)


def bounds(window_size: Window) -> tuple[int, int]:
    """(left, right) as numbers, of two integers in whatever holds them: a tuple, a tensor, an array."""
    try:
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size is {window_size!r}; expected two integers, (left, right).") from None
    return left, right


def run(call: BoundCall) -> tuple[Tensor, Tensor]:
    """out (batch, nq, heads, dv) and lse (batch, heads, nq)."""
    with call.precision():
        out, stats = call.run_with_stats(None)
        return out.to(call.problem.dtype).transpose(1, 2).contiguous(), stats.lse.masked_fill(stats.empty, math.inf)
