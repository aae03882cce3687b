"""Attention: one head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.backends.base import Backend
from regard.core.positions import Positions
from regard.masks.algebra import Everything, Mask
from regard.nn.cache.base import KVCache
from regard.nn.elsewhere import answers_layer_calls, answers_sizes_of_one_head, answers_weights_calls
from regard.nn.heads import Heads, Parallel
from regard.nn.rotary import Rotary
from regard.scores.algebra import Score


class Attention(Heads):
    """One attention head with any score: Attention(x W^Q, c W^K, c W^V), followed by W^O if d_out is set.

    x (*batch, n, d_model) is the sequence of the queries, c (*batch, m, d_context) that of the keys and values: x
    itself (self attention) or a context (cross attention). Output (*batch, n, d_v), or (*batch, n, d_out).

    d_k    width of x W^Q and c W^K; None: no such projections, the score compares x and c themselves
    d_v    width of c W^V; None: no such projection, the values are c itself
    d_out  width of the output after W^O; None: no such projection

    Other arguments as in MultiHeadAttention, which with heads=1 is the same layer with a head axis; `attend` gives the
    output before W^O, `weights` the attention weights. Raises ShapeError for inputs of another width.

    >>> import regard as rg
    >>> x, context = torch.randn(7, 12), torch.randn(11, 5)
    >>> rg.nn.Attention(12, d_k=4, d_v=3)(x).shape
    torch.Size([7, 3])
    >>> layer = rg.nn.Attention(12, d_k=None, d_v=3, d_context=5, d_out=2, score=rg.nn.AdditiveScore(12, 5, hidden=8))
    >>> layer(x, context).shape, layer.weights(x, context).shape
    (torch.Size([7, 2]), torch.Size([7, 11]))
    """

    @answers_sizes_of_one_head
    def __init__(
        self,
        d_model: int,
        d_k: int | None,
        d_v: int | None,
        *,
        d_context: int | None = None,
        d_out: int | None = None,
        bias: bool = True,
        score: Score | nn.Module | None = None,
        rotary: Rotary | None = None,
        qk_norm: Callable[[int], nn.Module] | None = None,
        sink: Tensor | float | None = None,
        dropout: float = 0.0,
        backend: Backend | None = None,
        parallel: Parallel | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        context, place = d_model if d_context is None else d_context, {"device": device, "dtype": dtype}

        def linear(width: int, out: int | None) -> nn.Module:
            return nn.Identity() if out is None else nn.Linear(width, out, bias, **place)

        super().__init__(
            linear(d_model, d_k),
            linear(context, d_k),
            linear(context, d_v),
            linear(context if d_v is None else d_v, d_out),
            d_model=d_model,
            d_context=context,
            heads=1,
            key_heads=1,
            q_width=d_model if d_k is None else d_k,
            k_width=context if d_k is None else d_k,
            score=score,
            rotary=rotary,
            qk_norm=qk_norm,
            sink=sink,
            dropout=dropout,
            backend=backend,
            parallel=parallel,
            place=place,
        )

    @answers_layer_calls
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask = Everything(),
        positions: Positions | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(*batch, n, d_v or d_out) of x (*batch, n, d_model); mask and positions as in regard.attention.

        cache as in MultiHeadAttention; its keys have one head.
        """
        return self.out_proj(self.attend(x, context, mask=mask, positions=positions, cache=cache))

    def attend(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask = Everything(),
        positions: Positions | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The contextualised embeddings before W^O: (*batch, n, d_v)."""
        return super().attend(x, context, mask=mask, positions=positions, cache=cache).squeeze(-3)

    @answers_weights_calls
    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask = Everything(),
        positions: Positions | None = None,
        rows: Any = None,
    ) -> Tensor:
        """The attention weights (*batch, n, m), or of some rows; see regard.attention_weights."""
        return super().weights(x, context, mask=mask, positions=positions, rows=rows).squeeze(-3)
