"""MultiHeadAttention: projections, attention in each head, and the sum over heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import regard.nn.exchange as exchange
from regard.backends.base import Backend
from regard.core.errors import Unsupported
from regard.core.positions import Positions
from regard.core.wrong_calls import kind_of
from regard.masks.algebra import Everything, Mask
from regard.nn.cache.base import KVCache
from regard.nn.elsewhere import answers_layer_calls, answers_sizes
from regard.nn.heads import Heads, Parallel, plain
from regard.nn.rotary import Rotary
from regard.scores.algebra import Score


class MultiHeadAttention(Heads):
    """Multi-head attention: concat(A_0, ..., A_{h-1}) W^O = Σ_i A_i W_i^O, A_i = Attention(x W_i^Q, c W_i^K, c W_i^V).

    x (*batch, n, d_model) is the sequence of the queries, c (*batch, m, d_context) that of the keys and values: x
    itself (self attention) or a context (cross attention). Output (*batch, n, d_out).

    d_model    width of x                      key_heads  heads of k and v (grouped queries), default `heads`
    heads      number of query heads           d_k, d_v   widths of a head, default d_model / heads; d_v may differ
    d_context  width of c, default d_model     d_out      width of the output, default d_model
    bias       whether the four projections have one, as in nn.Linear
    score      a Score, or a module that returns one when called (AdditiveScore, BilinearScore). Parameters in either
               are trained, other tensors move with the layer
    rotary     a Rotary, applied to q and k
    qk_norm    makes a norm of q and of k from d_k, for instance nn.RMSNorm
    sink       a logit a head, a number or (heads,): the start of a learned parameter
    dropout    probability, on the weights, in training only
    backend    a Backend that must run it, or None
    parallel   a SequenceParallel of regard.parallel, where each process has some tokens of the sequence: x is then this
               process's part, and the mask is still the whole's

    The projections are nn.Linear modules and are called: hooks, LoRA and quantisation work. Raises ValueError where
    sizes do not divide, ShapeError for inputs of another width.
    Source: Vaswani et al. 2017 (arXiv 1706.03762), §3.2.2.

    >>> import regard as rg
    >>> layer = MultiHeadAttention(64, heads=8, key_heads=2)
    >>> layer(torch.randn(3, 10, 64), mask=rg.Causal()).shape
    torch.Size([3, 10, 64])
    >>> cache = rg.nn.GrowingCache()
    >>> with torch.no_grad():  # decoding: a prompt of 10 tokens, then one token
    ...     prompt = layer(torch.randn(3, 10, 64), mask=rg.Causal(), cache=cache)
    ...     step = layer(torch.randn(3, 1, 64), mask=rg.Causal(), cache=cache)
    >>> step.shape, cache.length
    (torch.Size([3, 1, 64]), 11)
    """

    @answers_sizes
    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        key_heads: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
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
        key_heads = heads if key_heads is None else key_heads
        _check_sizes(d_model, heads, key_heads, d_k, d_v)
        width_k, width_v = (d_model // heads if d is None else d for d in (d_k, d_v))
        context, place = d_model if d_context is None else d_context, {"device": device, "dtype": dtype}
        super().__init__(
            nn.Linear(d_model, heads * width_k, bias, **place),
            nn.Linear(context, key_heads * width_k, bias, **place),
            nn.Linear(context, key_heads * width_v, bias, **place),
            nn.Linear(heads * width_v, d_model if d_out is None else d_out, bias, **place),
            d_model=d_model,
            d_context=context,
            heads=heads,
            key_heads=key_heads,
            q_width=width_k,
            k_width=width_k,
            score=score,
            rotary=rotary,
            qk_norm=qk_norm,
            sink=sink,
            dropout=dropout,
            backend=backend,
            parallel=parallel,
            place=place,
        )
        self.d_k, self.d_v = width_k, width_v

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
        """(*batch, n, d_out) of x (*batch, n, d_model); mask and positions as in regard.attention.

        With a cache, x are the tokens that follow those in it: their keys and values are appended to it, and the
        queries read what it returns, under `mask & cache.mask`. There is then no context, and the positions are the
        cache's. Only under torch.no_grad or torch.inference_mode: see KVCache. Raises ValueError otherwise.
        """
        heads = self.attend(x, context, mask=mask, positions=positions, cache=cache)
        return self.out_proj(heads.transpose(-3, -2).flatten(-2))

    def per_head(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask = Everything(),
        positions: Positions | None = None,
    ) -> Tensor:
        """What each head adds to the output: A_i W_i^O as (*batch, heads, n, d_out).

        Their sum over heads, plus out_proj.bias, is the layer's output. Raises Unsupported, as do the circuits, if a
        projection is no longer a plain nn.Linear (LoRA): its weight alone would give a wrong result.
        """
        heads = self.attend(x, context, mask=mask, positions=positions)
        return torch.einsum("...ind,oid->...ino", heads, self._weight("out_proj").unflatten(1, (self.heads, self.d_v)))

    def qk_circuit(self, head: int) -> Tensor:
        """M = W_Q W_K^T of one head, (d_model, d_context): without bias, norm and rotation, q_i · k_j = x_i M c_j^T."""
        key_head = self._key_head(head)
        w_q = self._weight("q_proj").unflatten(0, (self.heads, self.d_k))[head]
        w_k = self._weight("k_proj").unflatten(0, (self.key_heads, self.d_k))[key_head]
        return w_q.T @ w_k

    def ov_circuit(self, head: int) -> Tensor:
        """W_V W_O of one head, (d_context, d_out): what reading a token writes to the output, per unit of weight."""
        key_head = self._key_head(head)
        w_v = self._weight("v_proj").unflatten(0, (self.key_heads, self.d_v))[key_head]
        w_o = self._weight("out_proj").unflatten(1, (self.heads, self.d_v))[:, head]
        return w_v.T @ w_o.T

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, d_k={self.d_k}, d_v={self.d_v}"

    @staticmethod
    def from_torch(layer: nn.MultiheadAttention) -> MultiHeadAttention:
        """The same layer with the weights of torch's, copied; inputs are (batch, n, d) whatever its batch_first.

        add_zero_attn becomes a sink of logit 0 that is not trained. Raises Unsupported for bias_k and bias_v, and for
        values of another width than keys. See regard.nn.exchange. Inside nn.TransformerEncoderLayer, use
        regard.compat.torch.MultiheadAttention.
        """
        return exchange.from_torch(layer, MultiHeadAttention)

    def to_torch(self) -> nn.MultiheadAttention:
        """torch's layer with a copy of these weights, batch_first; Unsupported for features that it does not have."""
        return exchange.to_torch(self)

    def _weight(self, name: str) -> Tensor:
        linear = getattr(self, name)
        if not plain(linear):
            raise Unsupported(
                f"{name} is {kind_of(linear)}, whose forward is its own; merge it into an nn.Linear first."
            )
        return linear.weight

    def _key_head(self, head: int) -> int:
        if not 0 <= head < self.heads:
            raise IndexError(f"head {head}; this layer has heads 0 to {self.heads - 1}.")
        return head // (self.heads // self.key_heads)


def _check_sizes(d_model: int, heads: int, key_heads: int, d_k: int | None, d_v: int | None) -> None:
    for name, size in (("d_model", d_model), ("heads", heads), ("key_heads", key_heads), ("d_k", d_k), ("d_v", d_v)):
        if isinstance(size, (str, float, list, tuple, bool)):
            raise TypeError(f"MultiHeadAttention.{name} is {kind_of(size)}; expected an integer.")
    if heads < 1:
        raise ValueError(f"heads={heads}; expected 1 or more.")
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"heads={heads}, key_heads={key_heads}; expected heads to be a multiple of key_heads.")
    if d_model % heads and (d_k is None or d_v is None):
        raise ValueError(f"d_model={d_model} is no multiple of heads={heads}; give d_k and d_v.")
