"""lazy_mask: what transformers asks for masks of models on regard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from regard.compat.transformers.mask import LazyMask
from regard.compat.transformers.models import APPENDING_KEYS, SAYING_CAUSAL, form_of
from regard.compat.transformers.patterns import MaskFunction
from regard.compat.transformers.sharded_mask import ShardedMask, running
from regard.compat.transformers.static_mask import StaticMask
from regard.core.errors import ShapeError
from regard.core.positions import Positions, counted
from regard.core.shapes import listed
from regard.core.tracing import data_unavailable
from regard.masks.algebra import Everything


def lazy_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | LazyMask | ShardedMask | None = None,
    cache_position: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **_: Any,
) -> LazyMask | ShardedMask | Tensor | None:
    """What transformers asks for a mask, by the name "regard" in its AttentionMaskInterface.

    The arguments are those of transformers.masking_utils.sdpa_mask; `cache_position`, the queries' positions, stands
    for q_length and q_offset before transformers 5.5. A tensor where the model's layers append to the mask. None where
    transformers asks for no mask if nothing is hidden (`allow_is_bidirectional_skip`): some models add to what is not
    None.
    """
    if isinstance(attention_mask, (LazyMask, ShardedMask)):
        return attention_mask
    forward = running()
    if forward is not None:
        return forward.mask(batch_size, mask_function, use_vmap, form_of(config, dtype))
    place = attention_mask.device if device is None and attention_mask is not None else device
    if cache_position is not None:
        positions = Positions(
            cache_position, torch.arange(kv_length, device=cache_position.device, dtype=torch.int64) + kv_offset
        )
    else:
        assert q_length is not None
        positions = counted_from(q_length, kv_length, q_offset, kv_offset, place)
    padding = None if attention_mask is None else attention_mask.bool()
    if padding is not None and padding.dim() == 2 and padding.shape[0] not in (1, batch_size):
        raise ShapeError(
            f"attention_mask has shape {listed(padding.shape)}; expected ({batch_size}, tokens), a row a sequence."
        )
    # a static cache has a tensor of how many tokens it holds
    kind = StaticMask if isinstance(q_offset, Tensor) and positions.span is not None else LazyMask
    lazy = kind(batch_size, positions, mask_function, form_of(config, dtype), padding, use_vmap)
    model_type = getattr(config, "model_type", None)
    if model_type in APPENDING_KEYS:
        return lazy.written("torch.cat")
    # of a decoder made to look both ways the modules still say that they are causal
    says_causal = model_type in SAYING_CAUSAL or not getattr(config, "is_causal", True)
    skips = allow_is_bidirectional_skip and not says_causal
    return None if skips and isinstance(lazy.pattern, Everything) and isinstance(lazy.mask, Everything) else lazy


def counted_from(nq: int, nk: int, q_offset: int | Tensor, k_offset: int | Tensor, device: Any) -> Positions:
    """Positions that count up by one: as numbers where those are known. A static cache has its offset as a tensor."""
    offsets = [x for x in (q_offset, k_offset) if isinstance(x, Tensor)]
    if offsets and data_unavailable(*offsets):
        return Positions(
            torch.arange(nq, device=device, dtype=torch.int64) + q_offset,
            torch.arange(nk, device=device, dtype=torch.int64) + k_offset,
        )
    return counted((int(q_offset), nq), (int(k_offset), nk), device)
