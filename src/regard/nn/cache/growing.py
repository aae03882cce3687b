"""GrowingCache: a cache without an end."""

from __future__ import annotations

import torch

from regard.core.wrong_calls import answers_wrong_calls
from regard.nn.cache.contiguous import ContiguousCache
from regard.nn.cache.forms import form_of_any


class GrowingCache(ContiguousCache):
    """Keeps all tokens. The memory doubles when it is full; other steps copy only the new tokens.

    Takes any axes, (*batch, heads, n, d), (batch, n, d) or (n, d), as the first append has them. All copies together
    are less than twice the cache's size. Memory is reserved for up to twice the tokens, plus two. See KVCache for
    `append` and the rest.

    dtype: None, or torch.int8, which rounds each token once, when it is appended: see KVCache. Raises ValueError for
    another.

    >>> cache, (q, k, v) = GrowingCache(), torch.randn(3, 2, 8, 10, 64)
    >>> for i in range(10):
    ...     new = k[..., i : i + 1, :], v[..., i : i + 1, :]
    ...     out = rg.attention(q[..., i : i + 1, :], *cache.append(*new), mask=rg.Causal(), positions=cache.positions)
    >>> torch.allclose(out, rg.attention(q, k, v, mask=rg.Causal())[..., -1:, :], atol=1e-6)
    True
    """

    @answers_wrong_calls({}, "A growing cache needs no sizes; FixedCache has a capacity.")
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__(form_of_any(dtype, type(self).__name__))

    def _capacity_for(self, rows: int) -> int:
        return 2 * rows
