"""FixedCache: a cache whose memory is allocated once."""

from __future__ import annotations

import torch

from regard.core.arrays import size
from regard.core.wrong_calls import answers_wrong_calls
from regard.nn.cache.contiguous import ContiguousCache
from regard.nn.cache.forms import form_of
from regard.nn.elsewhere import SIZES


class FixedCache(ContiguousCache):
    """Memory for `capacity` tokens, allocated once; only `reorder` moves it.

    Keys are (batch, heads, n, dk), values (batch, heads, n, dv). An append that does not fit raises ValueError, and
    adds nothing. dtype and device as in torch.empty; torch.int8 rounds each token of any floating dtype once, when it
    is appended: see KVCache, also for `append` and the rest.

    >>> cache = FixedCache(batch=2, heads=8, capacity=100, dk=64, dv=32)
    >>> keys, values = cache.append(torch.randn(2, 8, 7, 64), torch.randn(2, 8, 7, 32))
    >>> keys.shape, values.shape, cache.length
    (torch.Size([2, 8, 7, 64]), torch.Size([2, 8, 7, 32]), 7)
    """

    @answers_wrong_calls(SIZES)
    def __init__(
        self,
        batch: int,
        heads: int,
        capacity: int,
        dk: int,
        dv: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(form_of(dtype, type(self).__name__))
        given = {"batch": batch, "heads": heads, "capacity": capacity, "dk": dk, "dv": dv}
        batch, heads, capacity, dk, dv = (size(n, f"FixedCache.{name}") for name, n in given.items())
        with torch.inference_mode(False):  # as in ContiguousCache
            self._buffers = tuple(
                torch.empty(batch, heads, capacity, width, dtype=kept, device=device)
                for width, kept in self._form.shapes(dk, dv, dtype)
            )
        self.capacity = capacity

    def _capacity_for(self, rows: int) -> int:
        raise ValueError(
            f"append: {rows - self._length} more tokens do not fit, the cache has {self._length} of "
            f"{self.capacity}. Give it a larger capacity, crop it, or use GrowingCache or RollingCache."
        )

    def reset(self) -> None:
        self.crop(0)
