"""Keras' attention under its own names, on regard: keras.ops.dot_product_attention and keras.layers.MultiHeadAttention.

    from regard.compat.keras import MultiHeadAttention, dot_product_attention

The layer needs Keras' torch backend (KERAS_BACKEND=torch), the function that, "jax" or "numpy". True = may attend; a
causal mask is aligned top-left. One difference: a query that sees nothing gives 0, where Keras averages all values, or
gives 0, by path.
"""

from __future__ import annotations

import importlib
from typing import Any

import regard.compat.jax as jax_shaped
from regard.api import attention, attention_weights
from regard.core.dropout import Dropout
from regard.core.errors import Unsupported
from regard.core.positions import head
from regard.core.shapes import listed
from regard.masks.algebra import Everything, Mask
from regard.masks.peers import from_keras
from regard.scores.similarity import ScaledDot

keras: Any = importlib.import_module("keras")


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None = None,
    mask: Any | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Any:
    """keras.ops.dot_product_attention: query (B, T, N, H), key and value (B, S, K, H) -> (B, T, N, H).

    bias and mask broadcast to (B, N, T, S), and may be given both, with is_causal too; flash_attention is ignored. K
    divides N; head i reads head i // (N // K). Differentiable in query, key, value and bias.
    Raises ShapeError, TypeError and ValueError for what does not fit, Unsupported on other backends and for
    attn_logits_soft_cap, which Keras has on a TPU alone.
    Source: keras.ops.dot_product_attention, Keras 3.15.

    >>> x = keras.random.normal((2, 5, 4, 8))
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([2, 5, 4, 8])
    """
    _check_backend("torch", "jax", "numpy")
    if attn_logits_soft_cap is not None:
        raise Unsupported(
            "attn_logits_soft_cap: Keras ignores it but on a TPU; regard.attention(q, k, v, score=ScaledDot() >> "
            "SoftCap(cap)) has it, for tensors (batch, heads, n, d)."
        )
    arrays = (query, key, value, bias, mask if mask is None else keras.ops.convert_to_tensor(mask, "bool"))
    return jax_shaped.dot_product_attention(*arrays, scale=scale, is_causal=is_causal)


@keras.saving.register_keras_serializable("regard")
class MultiHeadAttention(keras.layers.MultiHeadAttention):
    """keras.layers.MultiHeadAttention with its arguments, weights, masks and config, computed by regard.attention.

    layer(query, value, key=None, attention_mask=(B, T, S), use_causal_mask=..., ...) and Keras' own masks mean what
    they mean to Keras; they stay rules: no (T, S) mask is built for causal masks, windows and padding. The output does
    not depend on return_attention_scores, which returns the weights (B, N, T, S) before dropout.
    Raises Unsupported on another backend than torch, and for inputs of more than three axes.
    Source: keras.layers.MultiHeadAttention, Keras 3.15.

    >>> layer = MultiHeadAttention(num_heads=4, key_dim=8)
    >>> x = keras.random.normal((2, 5, 16))
    >>> layer(x, x, use_causal_mask=True).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_backend("torch")
        super().__init__(*args, **kwargs)

    def _compute_attention_mask(
        self,
        query: Any,
        value: Any,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
    ) -> Mask:
        given = (query_mask, value_mask, key_mask, attention_mask)
        query_mask, value_mask, key_mask, attention_mask = (
            None if mask is None else keras.ops.convert_to_tensor(mask, "bool") for mask in given
        )
        return from_keras(
            query.shape[1],
            value.shape[1],
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            use_causal_mask=use_causal_mask,
            sliding_window=self._sliding_window,
        ).mask

    def _compute_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Mask = Everything(),
        training: bool | None = None,
        return_attention_scores: bool = False,
    ) -> tuple[Any, Any]:
        if query.dim() != 4:
            raise Unsupported(
                f"{type(self).__name__}: attention over several axes, projected queries {listed(query.shape)}; "
                "reshape the inputs to (batch, n, features), or use keras.layers.MultiHeadAttention."
            )
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        positions = head(q.shape[2], k.shape[2], q.device)
        call: dict[str, Any] = {"score": ScaledDot(self._inverse_sqrt_key_dim), "mask": attention_mask}
        dropout = Dropout(self._dropout) if training and self._dropout else None
        out = attention(q, k, v, positions=positions, dropout=dropout, **call)
        weights = attention_weights(q, k, positions=positions, **call) if return_attention_scores else None
        return out.transpose(1, 2), weights


def _check_backend(*served: str) -> None:
    backend = keras.backend.backend()
    if backend not in served:
        raise Unsupported(f"Keras runs on {backend!r}; set KERAS_BACKEND to one of {', '.join(served)}.")
