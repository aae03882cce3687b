"""torch.nn.functional.multi_head_attention_forward, read: the q and k that it projects, and what its masks mean."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, multi_head_attention_forward

from regard.call.hooks import AttentionCall, is_cross
from regard.core.positions import head
from regard.inspect.capture.padding import real_queries
from regard.inspect.capture.sdpa import witnessed
from regard.masks.convert import Converted, from_mha, from_sdpa

SIGNATURE = inspect.signature(multi_head_attention_forward)


def multi_head(*args: Any, **kwargs: Any) -> AttentionCall:
    """What a call with these arguments looks at (torch 2.13), as (batch, heads, n, d); batch is 1 where there is none.

    Keys that the function appends, bias_k's and the zero of add_zero_attn, are the last ones. Where a sequence reads
    itself, the queries that key_padding_mask hides are masked too.
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    heads = int(given["num_heads"])
    q, k = (_split(t, heads) for t in _projected(given))
    if given["static_k"] is not None:
        k = given["static_k"].unflatten(0, (-1, heads))
    if given["add_zero_attn"]:
        k = torch.cat([k, torch.zeros_like(k[..., :1, :])], -2)
    call = witnessed(q, k, _masks(given, heads, q.shape[-2], k.shape[-2]))
    return replace(call, cross=is_cross(given["query"], given["key"]))


def _projected(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """q (L, batch, E) and k (S, batch, E), with bias_k's key."""
    query, key = (t if t.dim() == 3 else t[:, None] for t in (given["query"], given["key"]))
    if given["use_separate_proj_weight"]:
        w_q, w_k = given["q_proj_weight"], given["k_proj_weight"]
    else:
        w_q, w_k, _ = given["in_proj_weight"].chunk(3)
    b_q, b_k, _ = (None,) * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    q, k = linear(query, w_q, b_q), linear(key, w_k, b_k)
    if given["bias_k"] is not None:
        k = torch.cat([k, given["bias_k"].repeat(1, k.shape[1], 1)])
    return q, k


def _split(t: Tensor, heads: int) -> Tensor:
    """(n, batch, heads · d) as (batch, heads, n, d)."""
    return t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _masks(given: Mapping[str, Any], heads: int, nq: int, nk: int) -> Converted:
    attn_mask, padding = given["attn_mask"], given["key_padding_mask"]
    if given["is_causal"] and padding is None and not given["need_weights"]:
        return from_sdpa(None, nq, nk, is_causal=True)  # the one case in which the hint replaces the mask
    read = from_mha(attn_mask, padding, heads, appended=(given["bias_k"] is not None) + bool(given["add_zero_attn"]))
    return of_one_sequence(read, given["query"], given["key"], padding, nk)


def of_one_sequence(read: Converted, query: Tensor, key: Tensor, padding: Tensor | None, nk: int) -> Converted:
    """The masks of a call, with what only an observer needs, where a sequence reads itself.

    query and key (n, batch, E) or (n, E) are those before they are projected; nk: how many keys are read.
    """
    nq = query.shape[0]
    if nk > nq == key.shape[0] and read.positions is None:
        read = read._replace(positions=head(nq, nk, key.device))  # what is appended stands behind the sequence
    if padding is None or query is not key:
        return read
    hidden = padding if padding.dtype == torch.bool else padding == -torch.inf
    return read._replace(mask=read.mask & real_queries(~hidden.reshape(-1, nq)))
