"""Keys and values as caches keep them: in pages, as rows of int8 with a scale each, or both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged

from .call import Call
from .gradients import Dress
from .tensors import Source


@dataclass(frozen=True)
class Kept:
    """How the keys and values of a call are kept. page_size: None where they lie in tensors."""

    page_size: int | None
    int8: bool
    seed: int

    def over(self, call: Call, dress: Dress) -> Dress:
        """The same dress with the keys and values of a call kept so."""
        kept: dict[int, Tensor] = {}
        tables: dict[tuple[int, ...], Tensor] = {}  # one for keys and values: caches have one

        def of(t: Tensor, own: Tensor) -> Tensor:
            if t is not call.k and t is not call.v:
                return dress(t, own)
            if id(t) not in kept:
                kept[id(t)] = self._of(own, tables)
            return kept[id(t)]

        return of

    def _of(self, rows: Tensor, tables: dict[tuple[int, ...], Tensor]) -> Tensor:
        if not self.int8:
            return self._in_pages(rows, tables)
        scales = scales_of(rows)
        numbers = (rows.double() / scales).round().to(torch.int8)
        return Int8Rows(self._in_pages(numbers, tables), self._in_pages(scales, tables), rows.dtype)

    def _in_pages(self, rows: Tensor, tables: dict[tuple[int, ...], Tensor]) -> Tensor:
        """Rows in pages of a pool in any order, among others and before rows that mean nothing."""
        if self.page_size is None:
            return rows
        batch, heads, n, d = rows.shape
        each = -(-n // self.page_size) + 1
        order = Source.of(self.seed).choice.sample(range(batch * each + 2), batch * each)
        numbers = torch.tensor(order, dtype=torch.int32, device="cpu").reshape(batch, each)
        table = tables.setdefault((batch, each), numbers)
        nothing = torch.nan if rows.is_floating_point() else 99
        pool = torch.full((batch * each + 2, heads, self.page_size, d), nothing, dtype=rows.dtype, device="cpu")
        for b in range(batch):
            for t in range(n):
                pool[table[b, t // self.page_size], :, t % self.page_size] = rows[b, :, t]
        return Paged(pool, table, n)


def draw_kept(s: Source, call: Call) -> tuple[Kept | None, Call]:
    """A way to keep the keys and values of a call, and the call with the numbers that are kept; None where none is.

    Pages are of one batch axis and heads. What is kept has no gradient.
    """
    four = call.k.dim() == call.v.dim() == 4 and call.k.shape[0] == call.v.shape[0]
    if not four or call.poisoned or call.q is call.k or call.q is call.v or not call.k.numel() or not call.v.numel():
        return None, call
    sizes = s.choice.choice((None, None, 1, 3, 4, 16))
    kept = Kept(sizes, sizes is None or s.maybe(0.5), s.choice.randrange(1 << 40))
    call = replace(call, needs=tuple(name for name in call.needs if name not in ("k", "v")))
    if not kept.int8:
        return kept, call
    k = in_eight_bits(call.k)
    return kept, replace(call, k=k, v=k if call.v is call.k else in_eight_bits(call.v))


def in_eight_bits(rows: Tensor) -> Tensor:
    """The nearest rows that whole numbers up to 127 and a power of two for each row make exactly."""
    scales = scales_of(rows)
    return ((rows.double() / scales).round() * scales).to(rows.dtype)


def scales_of(rows: Tensor) -> Tensor:
    """float32 (..., n, 1): the smallest power of two of which no number of the row is more than 127 times as large."""
    most = rows.double().abs().amax(-1, keepdim=True)
    exponent = torch.where(most > 0, (most / 127).log2().ceil(), 0.0)
    scales = exponent.clamp(-100, 100).exp2()
    return torch.where(most / scales > 127, 2 * scales, scales).float()  # log2 rounds
