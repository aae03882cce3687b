"""Layers: attention with projections, learned scores, rotary positions, pooling, and caches of keys and values.

>>> import torch
>>> layer = MultiHeadAttention(64, heads=8, rotary=Rotary(8))
>>> layer(torch.randn(3, 10, 64)).shape
torch.Size([3, 10, 64])
"""

from typing import TYPE_CHECKING

from regard.core.wrong_calls import no_name as _no_name
from regard.core.wrong_calls import public_names as _public_names
from regard.nn.attention import Attention as Attention
from regard.nn.cache.base import KVCache as KVCache
from regard.nn.cache.fixed import FixedCache as FixedCache
from regard.nn.cache.growing import GrowingCache as GrowingCache
from regard.nn.cache.paged import PagedCache as PagedCache
from regard.nn.cache.rolling import RollingCache as RollingCache
from regard.nn.elsewhere import NAMES as _NAMES
from regard.nn.multihead import MultiHeadAttention as MultiHeadAttention
from regard.nn.pooling import AttentionPooling as AttentionPooling
from regard.nn.pooling import GatedAttentionPooling as GatedAttentionPooling
from regard.nn.rotary import Rotary as Rotary
from regard.nn.rotary import RotaryInterleaved as RotaryInterleaved
from regard.nn.scores import AdditiveScore as AdditiveScore
from regard.nn.scores import BilinearScore as BilinearScore
from regard.nn.scores import OwnedScore as OwnedScore

if not TYPE_CHECKING:  # which would take every name for one of this module

    def __dir__() -> list[str]:
        """The public names: what completion shows."""
        return _public_names(globals())

    def __getattr__(name: str) -> object:
        """AttributeError, with the names that are near."""
        raise _no_name(__name__, name, _public_names(globals()), _NAMES)
