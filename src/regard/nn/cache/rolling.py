"""RollingCache: the keys and values of a sliding window."""

from __future__ import annotations

import torch

from regard.backends.native.c_structs import TILE
from regard.core.arrays import size
from regard.core.wrong_calls import answers_wrong_calls
from regard.masks.positional import Window
from regard.nn.cache.contiguous import ContiguousCache
from regard.nn.cache.forms import form_of_any


class RollingCache(ContiguousCache):
    """Keeps the keys that queries under Window(before=window - 1, after=...) still read: the last `window` keys.

    An append of n tokens returns the last window - 1 + n keys and those before them back to a multiple of 128, or all
    where there are fewer, as one slice in order; so the kernels' tiles of keys, and with Native(invariant=True) the
    bits, are those of a call on all tokens. `positions` counts from the first of them, and `mask` is the window:
    combine it with the caller's mask. Old tokens are dropped when the buffer is full: each token is copied at most
    twice on average, and the memory is that of 2 · (window + 128) tokens, or of the longest append. `length` counts all
    tokens.

    `crop` can remove the last append; it raises ValueError if keys that the next query reads have been dropped. After
    `keep`, it can also come back past any number of appends. Takes any axes and dtypes, as GrowingCache. Raises
    ValueError for a window below 1. See KVCache for `append` and the rest.

    >>> cache, token = RollingCache(window=4), torch.zeros(1, 2, 1, 8)
    >>> for _ in range(260):
    ...     keys, values = cache.append(token, token)
    >>> keys.shape, cache.length, cache.positions.q, cache.positions.k
    (torch.Size([1, 2, 4, 8]), 260, tensor([259]), tensor([256, 257, 258, 259]))
    """

    @answers_wrong_calls(dict.fromkeys(("size", "capacity", "window_size", "max_length"), "write window=, in keys"))
    def __init__(self, window: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(form_of_any(dtype, type(self).__name__))
        self.window = size(window, "RollingCache.window", 1)
        self._kept: int | None = None  # the length that crop can come back to; None: that before the last append

    def keep(self) -> None:
        """From now on keeps what `crop` needs to come back to the present length, and after each `crop` to that one.

        For speculative decoding, which appends several times and then removes what was not accepted. Until the next
        `crop`, the memory grows with every token.
        """
        self._kept = self._length

    def crop(self, length: int) -> None:
        super().crop(length)
        if self._kept is not None:
            self._kept = self._length

    def take_back(self, n: int) -> None:
        kept = self._kept
        super().take_back(n)  # which crops, and so moves the length that `crop` can come back to
        self._kept = kept

    def reset(self) -> None:
        super().reset()
        if self._kept is not None:
            self._kept = 0

    @property
    def mask(self) -> Window:
        return Window(before=self.window - 1, after=None)

    def _first_read(self, position: int) -> int:
        return max(0, position - self.window + 1) // TILE * TILE

    def _shortest(self) -> int:
        return self._length if self._kept is None else min(self._kept, self._length)

    def _capacity_for(self, rows: int) -> int:
        return max(2 * (self.window + TILE), rows if self._kept is None else 2 * rows)
