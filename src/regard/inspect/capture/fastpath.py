"""torch's fused encoder layers, read: which weights a call of them is about."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from regard.call.hooks import AttentionCall
from regard.inspect.capture.padding import real_queries
from regard.masks.algebra import Everything, Mask
from regard.masks.dense import Dense
from regard.masks.ragged import Lengths


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *rest: Any,
) -> AttentionCall:
    """What torch._transformer_encoder_layer_fwd looks at (torch 2.13); the last of `rest` are mask and mask_type."""
    mask, mask_type = rest[6:8] if len(rest) > 7 else (None, None)
    x, real = _padded(src)
    if norm_first:
        x = layer_norm(x, (embed_dim,), norm_weight, norm_bias, eps)
    return _fused(x, num_heads, qkv_weight, qkv_bias, _visible(mask, mask_type) & real)


def native_multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> AttentionCall:
    """What torch._native_multi_head_attention looks at (torch 2.13); nn.MultiheadAttention calls it on itself alone."""
    x, real = _padded(query)
    return _fused(x, num_heads, qkv_weight, qkv_bias, _visible(mask, mask_type) & real)


def _fused(x: Tensor, heads: int, weight: Tensor, bias: Tensor, mask: Mask) -> AttentionCall:
    (w_q, w_k, _), (b_q, b_k, _) = weight.chunk(3), bias.chunk(3)
    q, k = (linear(x, w, b).unflatten(-1, (heads, -1)).transpose(-3, -2) for w, b in ((w_q, b_q), (w_k, b_k)))
    return AttentionCall(None, q, k, mask=mask, cross=False)


def _padded(x: Tensor) -> tuple[Tensor, Mask]:
    """(batch, n, E), and the mask of real tokens: the encoder makes sequences padded at their end a nested tensor."""
    if not x.is_nested:
        return x, Everything()
    lengths = torch.tensor([len(one) for one in x.unbind()], device=x.device, dtype=torch.int64)
    return x.to_padded_tensor(0.0), Lengths(keys=lengths, queries=lengths)


def _visible(mask: Tensor | None, mask_type: int | None) -> Mask:
    """mask_type 0: (L, L), 1: (batch, L), 2: (batch, heads, L, L). Numbers other than 0 hide, they are not added."""
    if mask is None:
        return Everything()
    allowed = _narrow(mask) == 0
    if mask_type == 1:
        return Dense(allowed[:, None, None, :]) & real_queries(allowed)
    seen = Dense(allowed[(None,) * (4 - allowed.dim())])
    padding = getattr(mask, _PADDING, None)
    return seen if padding is None else seen & real_queries(padding == 0)


_PADDING = "_key_padding_mask_within"


def remembering(merge: Callable[..., tuple[Tensor | None, int | None]]) -> Callable[..., Any]:
    """nn.MultiheadAttention.merge_masks, that makes one mask for the kernels: the padding within stays known."""

    @functools.wraps(merge)
    def merge_masks(self: Any, attn_mask: Any, key_padding_mask: Any, query: Any) -> tuple[Tensor | None, int | None]:
        merged, kind = merge(self, attn_mask, key_padding_mask, query)
        if attn_mask is not None and key_padding_mask is not None:
            setattr(merged, _PADDING, key_padding_mask)
        return merged, kind

    return merge_masks


def _narrow(t: Tensor) -> Tensor:
    """One of each axis along which t repeats itself (stride 0)."""
    for axis, step in enumerate(t.stride()):
        if step == 0:
            t = t.narrow(axis, 0, min(1, t.shape[axis]))
    return t
