"""regard's caches as transformers' Cache: model.generate(..., past_key_values=GrowingCache(model.config))."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, CacheLayerMixin, get_layer_types_and_kwargs

import regard.nn.cache.fixed as fixed
import regard.nn.cache.growing as growing
import regard.nn.cache.paged as paged
from regard.core.int8_rows import Int8Rows
from regard.core.wrong_calls import kind_of
from regard.nn.cache.base import KVCache
from regard.nn.cache.forms import form_of_any
from regard.nn.cache.rolling import RollingCache

# A new cache for one layer, of its first keys and values (batch, heads, n, d).
Maker = Callable[[Tensor, Tensor], KVCache]
WINDOWED = "sliding_attention", "chunked_attention"
KEYLESS = "conv", "linear_attention", "dummy"
OF_MODEL = "load the model in the dtype that tokens shall have"


class Layer(CacheLayerMixin):
    """One layer of a cache: transformers' names for what a cache of regard.nn does.

    make    makes the cache of regard.nn when the first keys come
    most    tokens that it can hold, or that its window has; -1 = any number
    window  keys that a query sees, its own included; None = all
    """

    is_croppable = True

    def __init__(self, make: Maker, most: int = -1, window: int | None = None) -> None:
        # not super().__init__(), which sets what is read from the cache here: keys, values, is_initialized
        self.make, self.most, self.window = make, most, window
        self.cache: KVCache | None = None
        self.is_sliding = window is not None
        self.record_past = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache = self.make(key_states, value_states)
        if self.record_past:
            self.activate_past_recording()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        assert self.cache is not None
        keys, values = self.cache.append(key_states, value_states)
        n = key_states.shape[-2]
        return self._seen(keys, n), self._seen(values, n)

    @property
    def is_initialized(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it holds tokens: models with a prefix (PaliGemma) ask whether this forward is the first."""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What it holds of earlier keys for the next tokens, (batch, heads, n, d), or None where there are none.

        n is that of all tokens, at most window - 1. Cross attention reads it, without an update.
        """
        return None if self.cache is None or not self.cache.length else self._seen(self.cache.read()[0], 0)

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values of `keys`."""
        return None if self.cache is None or not self.cache.length else self._seen(self.cache.read()[1], 0)

    def _seen(self, rows: Tensor, n: int) -> Tensor:
        """Of the rows that the cache returns those that its last n tokens, or else the next one, see in a window."""
        if self.window is None or rows.shape[-2] < self.window + n:
            return rows
        last = slice(rows.shape[-2] - self.window - n + 1, None)
        return rows.sliced(last) if type(rows) is Int8Rows else rows[..., last, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next update returns, and the position of the first of them."""
        length = self.get_seq_length()
        first = 0 if self.window is None else max(length - self.window + 1, 0)
        return length + query_length - first, first

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else self.cache.length

    def get_max_length(self) -> int:
        return self.most

    def activate_past_recording(self) -> None:
        """From now on `crop` can come back to where it was called last, or to here, past any number of updates."""
        self.record_past = True
        if isinstance(self.cache, RollingCache):
            self.cache.keep()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): expected 0 or a negative number, -n to remove the last n tokens."
            )
        if self.cache is not None:
            self.cache.remove_last(-tokens_to_remove)

    def take_back(self, n: int) -> None:
        """Removes the last n tokens, of a forward that a later layer refused."""
        if self.cache is not None:
            self.cache.take_back(n)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            batch = len(self.cache.lengths)
            self.reorder_cache(torch.arange(batch, dtype=torch.int64, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices)

    def reset(self) -> None:
        if self.cache is not None:
            self.cache.reset()

    def __repr__(self) -> str:
        return "Layer()" if self.cache is None else f"Layer({self.cache!r})"


class _TakesBack(DynamicCache):
    """What the caches share: of a forward that one layer refuses, no layer keeps the tokens.

    Those of transformers' own layers, where a model has some (Mamba, convolutions), have seen them all the same.

    It is a DynamicCache for EncoderDecoderCache and for models, which ask for one where tokens are removed (assisted
    decoding), sequences chosen, or a cache for cross attention put beside it (BLIP).
    """

    def __init__(self, layers: list[Any]) -> None:
        super(DynamicCache, self).__init__(layers=layers)  # DynamicCache would make layers of its own

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        try:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except BaseException:
            refused = self.layers[layer_idx]
            for layer in self.layers[:layer_idx]:
                if isinstance(layer, Layer) and isinstance(refused, Layer):
                    layer.take_back(max(layer.get_seq_length() - refused.get_seq_length(), 0))
            raise


class GrowingCache(_TakesBack):
    """A cache for `generate` whose layers are regard.nn.GrowingCache: any number of tokens, copied once each.

    It takes the place of transformers' DynamicCache, which copies all keys at every step: beams, assisted and
    prompt-lookup decoding, left padding, a prompt's cache that is copied for several continuations (copy.deepcopy).

    config: that of the model. A layer with a sliding window, or with chunks, is a regard.nn.RollingCache and keeps its
    window. Layers without keys (Mamba, convolutions) are transformers' own. Layers that index their keys, or have a
    recurrence beside them (Falcon-H1, Zamba), are transformers' own too where dtype is None; ValueError with int8, and
    in the other caches.

    A cache is for inference: raises ValueError for keys that require a gradient where gradients are recorded. Shapes
    are not fixed: torch.compile makes several graphs with it, and one with transformers' StaticCache.

    dtype: None, or torch.int8, which rounds each token once, when it comes, as regard.nn.KVCache says; other attention
    implementations than regard's then read the rounded numbers in the model's dtype. Raises ValueError for another.

    >>> from regard.compat.transformers import GrowingCache
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, attn_implementation="regard", **sizes))
    >>> cache = GrowingCache(model.config)
    >>> model.generate(torch.tensor([[1, 5, 3]]), past_key_values=cache, max_new_tokens=4, pad_token_id=0).shape
    torch.Size([1, 7])
    >>> cache.get_seq_length()
    6
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype | None = None) -> None:
        of_others = dtype is None  # whose layers grow too
        super().__init__(layers=_layers(type(self).__name__, config, partial(_growing, dtype), -1, dtype, of_others))


class FixedCache(_TakesBack):
    """A cache for `generate` whose layers are regard.nn.FixedCache: memory for `capacity` tokens, allocated once.

    The batch is that of the first forward, beams included; `reset` keeps the memory. A forward with more tokens than
    are left raises ValueError. Layers with a window, and dtype, are as in GrowingCache; see there for the rest.

    >>> from regard.compat.transformers import FixedCache
    >>> from transformers import LlamaConfig
    >>> FixedCache(LlamaConfig(num_hidden_layers=2), capacity=100).get_max_length()
    100
    """

    def __init__(self, config: PretrainedConfig, capacity: int, dtype: torch.dtype | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"FixedCache(capacity={capacity}): expected 1 token or more.")
        super().__init__(layers=_layers(type(self).__name__, config, partial(_fixed, capacity, dtype), capacity, dtype))


class PagedCache(_TakesBack):
    """A cache for `generate` whose layers are regard.nn.PagedCache: each has a pool of `pages` pages of `page_size`.

    Beams, and continuations of one prompt, share the pages of their common tokens: reordering copies tables, no keys. A
    forward that needs more pages than are free raises ValueError. Layers with a window, and dtype, are as in
    GrowingCache; see there for the rest. For requests of unequal lengths take continuous batching,
    model.generate_batch.

    >>> from regard.compat.transformers import PagedCache
    >>> from transformers import LlamaConfig
    >>> PagedCache(LlamaConfig(num_hidden_layers=2), pages=40, page_size=16)
    PagedCache(layers=[Layer(), Layer()])
    """

    def __init__(self, config: PretrainedConfig, pages: int, page_size: int, dtype: torch.dtype | None = None) -> None:
        for name, given in (("pages", pages), ("page_size", page_size)):
            if given < 1:
                raise ValueError(f"PagedCache({name}={given}): expected 1 or more.")
        super().__init__(
            layers=_layers(type(self).__name__, config, partial(_paged, pages, page_size, dtype), -1, dtype)
        )


def _layers(
    name: str, config: PretrainedConfig, make: Maker, most: int, dtype: torch.dtype | None, of_others: bool = False
) -> list[Any]:
    """A layer of a cache for each layer of a model.

    of_others: keys of other attention than full and windowed may lie in transformers' own layers; ValueError else
    """
    form_of_any(dtype, name, OF_MODEL)  # ValueError for another than None and int8
    if not isinstance(config, PretrainedConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name}: config is {kind_of(config)}; expected the model's configuration, model.config.")
    types, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    layers: list[Any] = []
    for kind, given in zip(types, options, strict=True):
        if kind == "full_attention":
            layers.append(Layer(make, most))
        elif kind in WINDOWED:
            window: int = given["sliding_window"]
            layers.append(Layer(partial(_rolling, window, dtype), window, window))
        elif of_others or kind in KEYLESS:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**given))
        else:
            raise ValueError(
                f"{name}: layer {len(layers)} of {type(config).__name__} is of type {kind!r}, whose keys transformers' "
                "own layers keep, which grow and round nothing. Leave past_key_values out, or pass "
                "GrowingCache(model.config), without dtype."
            )
    return layers


def _growing(dtype: torch.dtype | None, k: Tensor, v: Tensor) -> KVCache:
    return growing.GrowingCache(dtype)


def _rolling(window: int, dtype: torch.dtype | None, k: Tensor, v: Tensor) -> KVCache:
    return RollingCache(window, dtype)


def _fixed(capacity: int, dtype: torch.dtype | None, k: Tensor, v: Tensor) -> KVCache:
    batch, heads, _, dk = k.shape
    return fixed.FixedCache(batch, heads, capacity, dk, v.shape[-1], dtype or k.dtype, k.device)


def _paged(pages: int, page_size: int, dtype: torch.dtype | None, k: Tensor, v: Tensor) -> KVCache:
    batch, heads, _, dk = k.shape
    return paged.PagedCache(batch, heads, pages, page_size, dk, v.shape[-1], dtype or k.dtype, k.device)
