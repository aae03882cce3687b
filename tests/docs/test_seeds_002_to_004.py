"""Notes 002, 003 and 004, formula by formula; see test_seeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from note_003_code import MultiHeadSelfAttentionAISummer, SelfAttentionAISummer
from note_layers import (
    BATCH,
    D_K,
    D_V,
    DOUBLE,
    HEADS,
    WIDTH,
    M,
    N,
    exact,
    matrices,
    multi_head,
    normal,
    of_heads,
    softmax,
)
from regard.masks.convert import from_blocked

# 002


@pytest.mark.parametrize("score", [rg.Dot(), rg.ScaledDot(), rg.Cosine(3.0), rg.Distance(0.25)], ids=repr)
def test_002_pooling_is_a_weighted_average_of_values(score: rg.Score) -> None:
    q, k, v = normal(N, D_K), normal(M, D_K), normal(M, D_V)
    weights = rg.attention_weights(q, k, score=score)
    exact(weights.sum(-1), torch.ones(N, **DOUBLE))
    exact(rg.attention(q, k, v, score=score), weights @ v)


def test_002_dot_product() -> None:
    q, k = normal(N, D_K), normal(M, D_K)
    alpha = torch.stack([torch.stack([(q[i] * k[j]).sum() / math.sqrt(D_K) for j in range(M)]) for i in range(N)])
    exact(rg.attention_weights(q, k, score=rg.ScaledDot()), softmax(alpha))


def test_002_dot_product_vectorised() -> None:
    Q, K = normal(M, D_K), normal(N, D_K)
    exact(rg.attention_weights(Q, K), softmax(Q @ K.T / math.sqrt(D_K)))


def bmm(Q: Tensor, K: Tensor) -> Tensor:
    return torch.stack([Q[i] @ K[i] for i in range(len(Q))])


def test_002_batches_are_independent_problems() -> None:
    q, k, v = normal(13, N, D_K), normal(13, M, D_K), normal(13, M, D_V)
    out = rg.attention(q, k, v)
    for i in range(13):
        exact(out[i], rg.attention(q[i], k[i], v[i]))


def test_002_batch_matrix_multiplication() -> None:
    q, k, v = normal(13, N, D_K), normal(13, M, D_K), normal(13, M, D_V)
    exact(torch.bmm(q, k.mT), bmm(q, k.mT))
    exact(rg.attention(q, k, v, score=rg.Dot()), bmm(softmax(bmm(q, k.mT)), v))


def test_002_bilinear() -> None:
    q, k, m = normal(N, D_K), normal(M, D_V), normal(D_K, D_V)
    s = torch.stack([torch.stack([q[i] @ m @ k[j] for j in range(M)]) for i in range(N)])
    exact(rg.attention_weights(q, k, score=rg.Bilinear(m)), softmax(s))
    score = rg.nn.BilinearScore(D_K, D_V, **DOUBLE)
    exact(rg.attention_weights(q, k, score=score()), softmax(q @ score.m @ k.T))


def test_002_scaled_dot_product() -> None:
    Q, K, V = normal(N, D_K), normal(M, D_K), normal(M, D_V)
    out = rg.attention(Q, K, V)
    assert out.shape == (N, D_V)
    exact(out, softmax(Q @ K.T / math.sqrt(D_K)) @ V)


D_Q, HIDDEN = 3, 13


def multilayer_perceptron() -> tuple[Tensor, ...]:
    """The note's W_k (h, d_k), W_q (h, d_q), v (h,), with queries and keys."""
    return normal(HIDDEN, D_K), normal(HIDDEN, D_Q), normal(HIDDEN), normal(N, D_Q), normal(M, D_K)


def test_002_additive() -> None:
    w_k, w_q, v, q, k = multilayer_perceptron()
    alpha = torch.stack([torch.stack([v @ torch.tanh(w_k @ k[j] + w_q @ q[i]) for j in range(M)]) for i in range(N)])
    exact(rg.attention_weights(q, k, score=rg.Additive(w_q.T, w_k.T, v)), softmax(alpha))
    module = rg.nn.AdditiveScore(D_Q, D_K, HIDDEN, **DOUBLE)
    module.load_state_dict({"w_q": w_q.T, "w_k": w_k.T, "w": v})
    exact(rg.attention_weights(q, k, score=module()), softmax(alpha))


def test_002_additive_is_a_perceptron_of_both() -> None:
    w_k, w_q, v, q, k = multilayer_perceptron()
    hidden, output = torch.nn.Linear(D_K + D_Q, HIDDEN, **DOUBLE), torch.nn.Linear(HIDDEN, 1, **DOUBLE)
    hidden.load_state_dict({"weight": torch.cat([w_k, w_q], 1), "bias": normal(HIDDEN)})
    output.load_state_dict({"weight": v[None], "bias": normal(1)})
    both = torch.cat([k.expand(N, M, D_K), q[:, None].expand(N, M, D_Q)], -1)
    alpha = output(torch.tanh(hidden(both))).squeeze(-1)
    exact(rg.attention_weights(q, k, score=rg.Additive(w_q.T, w_k.T, v, hidden.bias)), softmax(alpha))


# 003


def copied(theirs: SelfAttentionAISummer) -> rg.nn.Attention:
    """Row 3 d + k of to_qvk's weight is feature d of q (k = 0), k (1) or v (2)."""
    width = theirs.to_qvk.in_features
    ours = rg.nn.Attention(width, width, width, bias=False, **DOUBLE)
    rows = theirs.to_qvk.weight.unflatten(0, (width, 3))
    ours.load_state_dict({f"{name}_proj.weight": rows[:, k] for k, name in enumerate("qkv")})
    return ours


def copied_heads(theirs: MultiHeadSelfAttentionAISummer) -> rg.nn.MultiHeadAttention:
    """Row (3 d + k) h + i of to_qvk's weight is feature d of head i; regard's projections have row i d_h + d there."""
    width, d, h = theirs.to_qvk.in_features, theirs.dim_head, theirs.heads
    ours = rg.nn.MultiHeadAttention(width, h, d_k=d, d_v=d, bias=False, **DOUBLE)
    rows = theirs.to_qvk.weight.unflatten(0, (d, 3, h)).permute(1, 2, 0, 3).flatten(1, 2)
    weights = {f"{name}_proj.weight": rows[k] for k, name in enumerate("qkv")}
    ours.load_state_dict({**weights, "out_proj.weight": theirs.W_0.weight})
    return ours


def blocked() -> Tensor:
    """A mask as note 003 reads it: True = may not attend. Every query keeps a key: there a row without one is NaN."""
    return (torch.rand(N, N) < 0.5) & ~torch.eye(N, dtype=torch.bool)


def test_003_projections() -> None:
    layer, X = rg.nn.Attention(WIDTH, D_K, D_V, bias=False, **DOUBLE), normal(BATCH, N, WIDTH)
    for found, w in zip(layer.project(X), matrices(layer), strict=True):
        exact(found[:, 0], X @ w)


def test_003_attention_and_output() -> None:
    layer, X = multi_head(), normal(BATCH, N, WIDTH)
    Q, K, V = layer.project(X)
    attention = softmax(Q @ K.mT / math.sqrt(D_K)) @ V
    exact(rg.attention(Q, K, V), attention)
    exact(layer(X), attention.transpose(1, 2).flatten(2) @ matrices(layer)[3])


def test_003_single_head_class() -> None:
    theirs, x = SelfAttentionAISummer(WIDTH).double(), normal(BATCH, N, WIDTH)
    exact(copied(theirs)(x), theirs(x))


def test_003_fused_projection() -> None:
    theirs, x = SelfAttentionAISummer(WIDTH).double(), normal(BATCH, N, WIDTH)
    qkv = theirs.to_qvk(x)
    for k, found in enumerate(copied(theirs).project(x)):
        exact(found[:, 0], torch.stack([qkv[..., 3 * d + k] for d in range(WIDTH)], -1))


def test_003_scores() -> None:
    q, k = normal(BATCH, N, D_K), normal(BATCH, M, D_K)
    scaled_dot_prod = torch.einsum("b i d , b j d -> b i j", q, k) * D_K**-0.5
    exact(rg.attention_scores(q, k), scaled_dot_prod)


def test_003_true_means_masked() -> None:
    theirs, x, mask = SelfAttentionAISummer(WIDTH).double(), normal(BATCH, N, WIDTH), blocked()
    ours = copied(theirs)
    exact(ours(x, mask=from_blocked(mask)), theirs(x, mask))
    assert bool((ours.weights(x, mask=from_blocked(mask))[:, mask] == 0).all())


def test_003_weights_times_values() -> None:
    q, k, v = normal(BATCH, N, D_K), normal(BATCH, M, D_K), normal(BATCH, M, D_V)
    attention = torch.softmax(torch.einsum("b i d , b j d -> b i j", q, k) * D_K**-0.5, dim=-1)
    exact(rg.attention(q, k, v), torch.einsum("b i j , b j d -> b i d", attention, v))


def test_003_heads_concatenated() -> None:
    layer, X = multi_head(), normal(BATCH, N, WIDTH)
    heads = [rg.attention(X @ w_q, X @ w_k, X @ w_v) for w_q, w_k, w_v, _ in of_heads(layer)]
    for i, head in enumerate(heads):
        exact(layer.attend(X)[:, i], head)
    exact(layer(X), torch.cat(heads, -1) @ matrices(layer)[3])


@pytest.mark.parametrize("dim_head", [None, 7])
def test_003_multi_head_class(dim_head: int | None) -> None:
    theirs, x = MultiHeadSelfAttentionAISummer(WIDTH, HEADS, dim_head).double(), normal(BATCH, N, WIDTH)
    exact(copied_heads(theirs)(x), theirs(x))


def test_003_fused_projection_of_heads() -> None:
    theirs, x = MultiHeadSelfAttentionAISummer(WIDTH, HEADS).double(), normal(BATCH, N, WIDTH)
    qkv, d_h = theirs.to_qvk(x), theirs.dim_head
    for k, found in enumerate(copied_heads(theirs).project(x)):
        for i in range(HEADS):
            exact(found[:, i], torch.stack([qkv[..., (3 * d + k) * HEADS + i] for d in range(d_h)], -1))


def test_003_dim_head() -> None:
    for width, heads, dim_head in ((WIDTH, HEADS, None), (WIDTH, 4, None), (WIDTH, 4, 11)):
        theirs = MultiHeadSelfAttentionAISummer(width, heads, dim_head).double()
        ours, x = copied_heads(theirs), normal(BATCH, N, width)
        assert theirs.dim_head == ours.d_k == ours.d_v == (dim_head or width // heads)
        exact(ours(x), theirs(x))


def test_003_one_mask_for_all_heads() -> None:
    theirs, x = MultiHeadSelfAttentionAISummer(WIDTH, HEADS).double(), normal(BATCH, N, WIDTH)
    mask = blocked()
    exact(copied_heads(theirs)(x, mask=from_blocked(mask)), theirs(x, mask))


# 004: one head of H, without the others, is rg.nn.Attention


def head_of_004() -> tuple[rg.nn.Attention, list[Tensor], Tensor]:
    layer = rg.nn.Attention(WIDTH, D_K, D_K, bias=False, **DOUBLE)
    return layer, matrices(layer), normal(BATCH, N, WIDTH)


def test_004_sizes() -> None:
    layer, (w_q, w_k, w_v), X = head_of_004()
    assert X.shape == (BATCH, N, WIDTH) and layer(X).shape == (BATCH, N, D_K)
    assert w_q.shape == w_k.shape == w_v.shape == (WIDTH, D_K)


def test_004_projections() -> None:
    layer, ws, X = head_of_004()
    for found, w in zip(layer.project(X), ws, strict=True):
        assert found.shape == (BATCH, 1, N, D_K)
        exact(found[:, 0], X @ w)
        exact(found[1, 0, 3], X[1, 3] @ w)  # a row: q_i = x_i W_Q, v_i = x_i W_V


def test_004_score_is_bilinear_in_the_tokens() -> None:
    layer, (w_q, w_k, _), X = head_of_004()
    q, k, _ = (t[:, 0] for t in layer.project(X))
    m, x = w_q @ w_k.T, X[1]
    score = (q @ k.mT)[1] / math.sqrt(D_K)
    for i, j in ((0, 0), (2, 5), (6, 1)):
        exact(q[1, i] @ k[1, j] / math.sqrt(D_K), score[i, j])
        exact((x[i] @ w_q) @ (x[j] @ w_k) / math.sqrt(D_K), score[i, j])
        exact(x[i] @ m @ x[j] / math.sqrt(D_K), score[i, j])
    whole = rg.nn.MultiHeadAttention(WIDTH, 1, d_k=D_K, d_v=D_K, bias=False, **DOUBLE)
    whole.load_state_dict({**layer.state_dict(), "out_proj.weight": normal(WIDTH, D_K)})
    exact(whole.qk_circuit(0), m)
    exact(rg.attention_weights(X, X, score=rg.Bilinear(m / math.sqrt(D_K))), layer.weights(X))
    assert score.shape == (N, N)


def test_004_rows_sum_to_1() -> None:
    layer, _, X = head_of_004()
    A = layer.weights(X)
    exact(A.sum(-1), torch.ones(BATCH, N, **DOUBLE))
    assert bool(((A > 0) & (A < 1)).all())


def test_004_weights() -> None:
    layer, (w_q, w_k, _), X = head_of_004()
    exact(layer.weights(X), softmax((X @ w_q) @ (X @ w_k).mT / math.sqrt(D_K)))


def test_004_a_row_is_a_distribution_over_keys() -> None:
    layer, _, X = head_of_004()
    A = layer.weights(X)  # A_ij is P(j | i): its sum over j is 1, its sum over i is not
    exact(A.sum(-1), torch.ones(BATCH, N, **DOUBLE))
    assert bool(((A.sum(-2) - 1).abs() > 1e-3).any())


def test_004_output() -> None:
    layer, (_, _, w_v), X = head_of_004()
    A, V = layer.weights(X), X @ w_v
    exact(layer(X), A @ V)
    exact(layer(X)[1, 4], sum(A[1, 4, k] * V[1, k] for k in range(N)))


def test_004_multiple_heads() -> None:
    layer, X = rg.nn.MultiHeadAttention(WIDTH, HEADS, bias=False, **DOUBLE), normal(BATCH, N, WIDTH)
    assert layer.d_k == layer.d_v == WIDTH // HEADS
    outputs = [softmax((X @ a) @ (X @ b).mT / math.sqrt(WIDTH // HEADS)) @ (X @ c) for a, b, c, _ in of_heads(layer)]
    exact(layer(X), torch.cat(outputs, -1) @ matrices(layer)[3])
