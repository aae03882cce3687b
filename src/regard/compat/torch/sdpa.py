"""torch.nn.functional.scaled_dot_product_attention, on regard."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.api import attention
from regard.compat.torch.scripting import scripts_as
from regard.core.arrays import plain_tensor
from regard.core.dropout import Dropout
from regard.core.dtypes import autocast
from regard.core.positions import Positions, head
from regard.core.shapes import broadcast_shape, broadcasts, count_of, listed, repeat_heads
from regard.core.wrong_calls import kind_of
from regard.masks.algebra import Everything, Mask
from regard.masks.causal_bias import causal_bias_positions, is_causal_bias
from regard.masks.dense import Dense
from regard.masks.positional import Causal
from regard.scores.algebra import Score
from regard.scores.modifiers import Bias
from regard.scores.similarity import ScaledDot


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query key^T · scale + attn_mask) value: torch's function of this name, computed by regard.attention.

    query (*lead, L, E), key (*lead, S, E), value (*lead, S, Ev) -> (*lead, L, Ev), in the dtype of query; the leading
    axes broadcast, heads like batch axes. float16, bfloat16, float32, float64; jagged nested tensors (batch, heads, n*,
    d) without attn_mask.

    attn_mask   broadcasts to (*lead, L, S); boolean: True = may attend; floating point, in float32 or the dtype of
                query: added to the scores, and differentiable. -inf hides. Or causal_upper_left(L, S), or
                causal_lower_right(L, S), of torch.nn.attention.bias
    dropout_p   applied to the weights, always: pass 0.0 in eval. Drawn from torch's generator, not the bits of torch
    is_causal   query i sees the keys 0 to i, also where L differs from S (aligned top-left)
    scale       default 1 / sqrt(E)
    enable_gqa  key and value have fewer heads (axis -3), of which each serves H / Hk consecutive heads of query

    A query that sees nothing gives 0, and gradients 0, on every path. Differentiable to any order, in forward mode and
    under torch.func. Two differences: attn_mask with is_causal is always an error, which torch raises on some of its
    paths and computes on others; and so is a value with fewer rows than key. torch.jit.script compiles torch's function
    instead of this one: the program runs without regard.
    Raises RuntimeError for arguments that do not fit, as torch does, TypeError for an argument that is not a tensor.
    Source: torch.nn.functional.scaled_dot_product_attention, torch 2.13.

    >>> q, k, v = torch.randn(2, 8, 5, 16), torch.randn(2, 8, 7, 16), torch.randn(2, 8, 7, 16)
    >>> out = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True
    """
    for name, given in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(given, Tensor) and (given is not None or name != "attn_mask"):
            way = f": call regard.attention(q, k, v, mask={given!r})" if isinstance(given, Mask) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name} is {kind_of(given)}; expected a tensor{way}.")
    score: Score = ScaledDot(scale)
    mask: Mask = Everything()
    positions: Positions | None = None
    try:
        dropout = Dropout(dropout_p) if dropout_p else None
        if not query.is_nested:
            query, key, value = together(query, key, value, enable_gqa)
        if is_causal:
            if attn_mask is not None:
                raise ValueError("attn_mask and is_causal are both given; pass the one mask that has both.")
            nq, nk = query.shape[-2], key.shape[-2]
            mask, positions = Causal(), None if query.is_nested or nq == nk else head(nq, nk, query.device)
        elif is_causal_bias(attn_mask):
            positions = causal_bias_positions(attn_mask, query.shape[-2], key.shape[-2], query.device)
            mask = Causal()
        elif attn_mask is not None:
            attn_mask = plain_tensor(attn_mask, "attn_mask")
            _check_mask(attn_mask, query, key)
            # two axes are (L, S), whatever the batch: written out, so that nobody takes them for a padding mask
            attn_mask = attn_mask[(None,) * (query.dim() - attn_mask.dim())]
            if attn_mask.dtype == torch.bool:
                mask = Dense(attn_mask)
            else:
                score = score >> Bias(attn_mask)
        return attention(query, key, value, score=score, mask=mask, positions=positions, dropout=dropout)
    except (ValueError, TypeError) as error:  # torch's own checks raise nothing else
        raise RuntimeError(str(error)) from error


scripts_as(scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)


def together(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """All three with as many axes, as regard.attention reads them: (*batch, heads, n, d), or (batch, n, d), (n, d)."""
    given = query, key, value
    lead = query.shape[:-2]
    if key.shape[:-2] == lead == value.shape[:-2]:
        return given
    if not enable_gqa:
        return _expanded(given, 2)
    if min(t.dim() for t in given) < 3:
        shown = ", ".join(listed(t.shape) for t in given)
        raise ValueError(f"query, key and value have shapes {shown}; with enable_gqa expected (*lead, heads, n, d).")
    heads, key_heads, value_heads = (t.shape[-3] for t in given)
    if any(n == 0 or heads % n for n in (key_heads, value_heads)):
        raise ValueError(
            f"query has {count_of(heads, 'head')}, key {key_heads}, value {value_heads}; expected "
            "multiples of both (enable_gqa)."
        )
    query, key, value = _expanded(given, 3)
    if key_heads == value_heads and query.dim() > 3:
        return query, key, value
    return query, repeat_heads(key, heads), repeat_heads(value, heads)  # of three axes the first would be the batch


def _expanded(given: tuple[Tensor, Tensor, Tensor], last: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same with all axes but the `last` broadcast."""
    lead = broadcast_shape(*(t.shape[:-last] for t in given))
    query, key, value = (t.expand(*lead, *t.shape[-last:]) for t in given)
    return query, key, value


def _check_mask(attn_mask: Tensor, query: Tensor, key: Tensor) -> None:
    added = {torch.float32, query.dtype}
    if autocast(query.device.type) and query.dtype != torch.float64:  # which casts the mask too
        added |= {torch.float16, torch.bfloat16}
    if attn_mask.dtype not in (torch.bool, *added):
        raise TypeError(
            f"attn_mask has dtype {attn_mask.dtype}, query {query.dtype}; expected torch.bool, True = may attend, or "
            "torch.float32 or the dtype of query, added to the scores."
        )
    shape, full = attn_mask.shape, (*query.shape[:-1], key.shape[-2])
    if not broadcasts(shape, full):
        raise ValueError(f"attn_mask has shape {listed(shape)}; expected one that broadcasts to {listed(full)}.")
