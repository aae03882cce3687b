"""torch.nn.MultiheadAttention, and torch.nn.functional.multi_head_attention_forward that it calls, on regard."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from regard.api import attention, attention_weights
from regard.call.hooks import AttentionCall, is_cross, notify
from regard.compat.torch.multihead_arguments import (
    check_appended,
    check_mask_dtypes,
    check_mask_shapes,
    check_sizes,
    linear_as_it_lies,
    project,
    static_rows,
)
from regard.compat.torch.scripting import scripts_as
from regard.core.dropout import Dropout
from regard.core.errors import Unsupported
from regard.inspect.capture.mha import of_one_sequence
from regard.masks.convert import Converted, from_mha, from_sdpa
from regard.scores.algebra import Score
from regard.scores.modifiers import Bias
from regard.scores.similarity import ScaledDot
from regard.sequences.jagged import nest_like


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with its arguments, parameters and state_dict, computed by regard.attention.

    query (L, N, embed_dim), key (S, N, kdim), value (S, N, vdim) -> (output (L, N, embed_dim), weights or None); with
    batch_first (N, L, ...); without a batch (L, ...). It replaces torch's layer, also in nn.TransformerEncoderLayer and
    nn.TransformerDecoderLayer: a hook that does nothing keeps the encoder layer from its fused kernel, which would not
    call this layer.

    key_padding_mask, attn_mask, is_causal, need_weights and average_attn_weights have torch's meaning: a boolean True
    hides, numbers are added. Nested tensors (with batch_first and no mask) attend to their own keys, in training too.
    The output of a call does not depend on need_weights; with need_weights the memory is that of the weights. Three
    differences: a query that sees nothing gets 0, and weights 0, where torch has NaN or 0 depending on the path; the
    weights are those before dropout; nested tensors have no weights. torch.jit.script compiles torch's function instead
    of regard's: the program runs without regard.
    Raises AssertionError and RuntimeError for arguments that do not fit, as torch does.
    Source: torch.nn.MultiheadAttention, torch 2.13.

    >>> layer = MultiheadAttention(16, num_heads=4, batch_first=True)
    >>> x = torch.randn(2, 5, 16)
    >>> out, weights = layer(x, x, x, key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))
    >>> out.shape, weights.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
    >>> theirs = torch.nn.MultiheadAttention(16, num_heads=4, batch_first=True)
    >>> layer.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            *(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype)
        )
        self._unfused = nn.Identity()  # torch.jit.script wants more of a hook of a layer with keyword arguments
        self._unfused.register_forward_pre_hook(_keep_off_the_fused_kernel)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights): weights (N, L, S), the mean over heads, or (N, heads, L, S), or None if not needed."""
        # torch.jit.script compiles this method: what it cannot compile stands under is_scripting
        if not torch.jit.is_scripting() and (  # pyright: ignore[reportPrivateImportUsage]
            query.is_nested or key.is_nested or value.is_nested
        ):
            masked = is_causal or attn_mask is not None or key_padding_mask is not None
            return self._nested(query, key, value, need_weights, masked), None
        turned = self.batch_first and query.dim() == 3
        if turned:  # what is one tensor stays one: it is projected at once
            sequence = query.transpose(0, 1)
            keys = sequence if key is query else key.transpose(0, 1)
            value = keys if value is key else value.transpose(0, 1)
            query, key = sequence, keys
        out, weights = multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=not self._qkv_same_embed_dim,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        return out.transpose(0, 1) if turned else out, weights

    def _nested(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, masked: bool) -> Tensor:
        """The output for nested tensors (N, n*, ...), in the layout of query: padded, and the padding hidden."""
        if need_weights or masked or not self.batch_first:
            raise Unsupported(
                "nested tensors are taken with batch_first=True, need_weights=False and no mask, is_causal included; "
                "others: x.to_padded_tensor(0.0), and a key_padding_mask."
            )
        counts = torch.tensor([len(row) for row in key.unbind()], device=key.device, dtype=torch.int64)
        padded = {id(t): t.to_padded_tensor(0.0) for t in (query, key, value)}
        q, k, v = (padded[id(t)] for t in (query, key, value))
        hidden = torch.arange(k.shape[1], device=k.device, dtype=torch.int64) >= counts[:, None]
        out, _ = self.forward(q, k, v, key_padding_mask=hidden, need_weights=False)
        rows = [row[: len(given)] for row, given in zip(out, query.unbind(), strict=True)]
        if query.layout == torch.jagged:  # with the query's sizes, so that x + layer(x, x, x) is one of tensors alike
            return nest_like(torch.cat(rows), query)
        return torch.nested.as_nested_tensor(rows, layout=query.layout)


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch's function of this name, argument by argument: see MultiheadAttention, which calls it.

    query (L, N, E), key and value (S, N, E) or without N -> (L, N, E) and the weights, or None.
    """
    batched = functional._mha_shape_check(query, key, value, key_padding_mask, attn_mask, num_heads)  # pyright: ignore
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal is a hint about attn_mask, which is not given: pass the causal mask too.")
    check_sizes(query, key, value, embed_dim_to_check, num_heads, use_separate_proj_weight)
    check_appended(bias_k, bias_v, static_k, static_v)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    projected = project(query, key, value, weights, in_proj_bias)
    q, k, v = projected if batched else (t[:, None] for t in projected)
    pairs, batch = (q.shape[0], k.shape[0]), q.shape[1]
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([t, b.repeat(1, batch, 1)]) for t, b in ((k, bias_k), (v, bias_v)))
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = static_rows("static_k", static_k, k, q), static_rows("static_v", static_v, v, q)
    if add_zero_attn:
        k, v = (pad(t, (0, 0, 0, 1)) for t in (k, v))
    nq, nk, appended = q.shape[-2], k.shape[-2], (bias_k is not None) + add_zero_attn  # torch pads masks by so many
    try:
        if is_causal and key_padding_mask is None and not need_weights:
            masks = from_sdpa(None, nq, nk, is_causal=True)  # torch believes the hint here, and does not read the mask
        else:
            check_mask_shapes(attn_mask, key_padding_mask, pairs, (batch, num_heads, nk - appended), batched)
            check_mask_dtypes(attn_mask, key_padding_mask, query, q, need_weights)
            masks = from_mha(attn_mask, key_padding_mask, num_heads, appended=appended)
        score: Score = ScaledDot() if masks.bias is None else ScaledDot() >> Bias(masks.bias)
        mask, at = masks.mask, masks.positions
        # torch takes less than 0 for none where it gives weights
        drops = training and (dropout_p > 0 if need_weights else dropout_p != 0)
        dropout = Dropout(dropout_p) if drops else None
        notify(lambda: _observed(AttentionCall(None, q, k, score, v=v), masks, query, key, key_padding_mask))
        heads = attention(q, k, v, score=score, mask=mask, positions=at, dropout=dropout)
        p = attention_weights(q, k, score=score, mask=mask, positions=at) if need_weights else None
    except (ValueError, TypeError) as error:  # torch's own checks raise nothing else
        raise RuntimeError(str(error)) from error
    batch_first = batched and not query.is_contiguous()
    out = heads.transpose(1, 2).flatten(-2).transpose(0, 1) if batch_first else heads.permute(2, 0, 1, 3).flatten(-2)
    out = linear_as_it_lies(out, out_proj_weight, out_proj_bias)
    if p is not None and average_attn_weights:
        p = p.mean(1)
    return (out, p) if batched else (out[:, 0], None if p is None else p[0])


def _observed(
    call: AttentionCall, masks: Converted, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
) -> AttentionCall:
    """The call as record takes it from torch's function too."""
    seen = of_one_sequence(masks, query, key, key_padding_mask, call.k.shape[-2])
    return replace(call, mask=seen.mask, positions=seen.positions, cross=is_cross(query, key))


def _keep_off_the_fused_kernel(self: nn.Module, inputs: tuple[Tensor]) -> None:
    """nn.TransformerEncoderLayer calls its modules one by one where one of them, or of theirs, has a hook."""


scripts_as(multi_head_attention_forward, functional.multi_head_attention_forward)
