"""What the tests of the five notes share: sizes, and the notes' own matrices taken out of regard's layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import regard as rg

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
DOUBLE = {"dtype": torch.float64}
N, M, BATCH, HEADS = 7, 11, 2, 3  # queries, keys, sequences, heads
WIDTH, CONTEXT, D_K, D_V = 15, 13, 5, 17


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, **DOUBLE)


def softmax(s: Tensor) -> Tensor:
    """As the notes write it: exp(S_ij) / Σ_k exp(S_ik)."""
    return torch.exp(s) / torch.exp(s).sum(-1, keepdim=True)


def multi_head(**options: object) -> rg.nn.MultiHeadAttention:
    options = {"d_k": D_K, "d_v": D_V, "bias": False, **DOUBLE, **options}
    return rg.nn.MultiHeadAttention(WIDTH, HEADS, **options)  # type: ignore[arg-type]


def matrices(layer: rg.nn.Attention | rg.nn.MultiHeadAttention) -> list[Tensor]:
    """W^Q, W^K, W^V, W^O as the notes write them, for x W: nn.Linear keeps their transposes."""
    return [p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj) if isinstance(p, nn.Linear)]


def of_heads(layer: rg.nn.MultiHeadAttention) -> list[list[Tensor]]:
    """W_i^Q, W_i^K, W_i^V and W_i^O of each head i."""
    w_q, w_k, w_v, w_o = matrices(layer)
    return [[a.chunk(HEADS, 1)[i] for a in (w_q, w_k, w_v)] + [w_o.chunk(HEADS, 0)[i]] for i in range(HEADS)]
