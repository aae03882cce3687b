"""torch.nn.functional.scaled_dot_product_attention, read: which weights a call of it is about."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from regard.call.hooks import AttentionCall
from regard.core.shapes import broadcast_shape
from regard.masks.causal_bias import is_causal_bias
from regard.masks.convert import Converted, from_sdpa
from regard.scores.algebra import Score
from regard.scores.modifiers import Bias
from regard.scores.similarity import ScaledDot


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """What a call with these arguments looks at: torch's signature, torch's meaning of each (2.13).

    Without enable_gqa, torch broadcasts heads like batch axes; with it, three axes are (heads, n, d). is_causal counts
    both sides from 0.
    """
    if enable_gqa and query.dim() == 3:
        query, key, value = query[None], key[None], value[None]
    if not enable_gqa:
        query, key = together(query, key)
        value = value.expand(*key.shape[:-2], *value.shape[-2:])
    if attn_mask is not None and not is_causal_bias(attn_mask):
        # two axes are (nq, nk), whatever the batch: written out, so that nobody takes them for a padding mask
        attn_mask = attn_mask[(None,) * (query.dim() - attn_mask.dim())]
    read = from_sdpa(attn_mask, query.shape[-2], key.shape[-2], is_causal=is_causal)
    return replace(witnessed(query, key, read, scale), v=value)


def witnessed(q: Tensor, k: Tensor, masks: Converted, scale: float | None = None) -> AttentionCall:
    """A call of scaled dot products under another library's masks."""
    score: Score = ScaledDot(scale)
    if masks.bias is not None:
        score = score >> Bias(masks.bias)
    return AttentionCall(None, q, k, score, masks.mask, masks.positions)


def together(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q (..., nq, d) and k (..., nk, d) with all axes before the last two broadcast."""
    if q.shape[:-2] == k.shape[:-2]:
        return q, k
    lead = broadcast_shape(q.shape[:-2], k.shape[:-2])
    return q.expand(*lead, *q.shape[-2:]), k.expand(*lead, *k.shape[-2:])
