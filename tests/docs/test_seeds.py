"""The five notes on attention, formula by formula: docs/seeds.md has a row for each, which names its test.

A test sets the note's own formula or code, in float64, against what regard calls it; they agree to 1e-12. Here stand
the page's own tests and notes 000 and 001; test_seeds_002_to_004 has the others.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from torch import Tensor

import regard as rg
from note_layers import (
    BATCH,
    CONTEXT,
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

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "seeds.md"
ROW = re.compile(
    r"^\| (?P<note>\d{3})\.(?P<number>\d+) \| (?P<formula>.+?) \| (?P<name>.+?) \| `(?P<test>test_\w+)` \|$", re.M
)

# How many formulas and code samples each note holds.
COUNTS = {"000": 10, "001": 27, "002": 9, "003": 15, "004": 15}


def rows() -> list[dict[str, str]]:
    return [found.groupdict() for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def test_no_formula_is_lost() -> None:
    numbers = {note: [int(r["number"]) for r in rows() if r["note"] == note] for note in COUNTS}
    assert numbers == {note: list(range(1, count + 1)) for note, count in COUNTS.items()}
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(rows()) == len([line for line in lines if re.match(r"\| \d", line)]), (
        "a row that the pattern does not read"
    )


def test_every_row_names_a_test_and_every_test_has_a_row() -> None:
    named = {row["test"] for row in rows()}
    sources = [file.read_text(encoding="utf-8") for file in HERE.glob("test_seeds*.py")]
    here = {name for source in sources for name in re.findall(r"^def (test_\d{3}_\w+)", source, re.M)}
    assert named == here
    assert [row for row in rows() if not row["test"].startswith(f"test_{row['note']}_")] == []


# 000


def test_000_scaled_dot_product() -> None:
    q, k, v = normal(BATCH, N, D_K), normal(BATCH, M, D_K), normal(BATCH, M, D_V)
    exact(rg.attention(q, k, v), softmax(q @ k.mT / math.sqrt(D_K)) @ v)


def test_000_projections() -> None:
    layer, x = rg.nn.Attention(WIDTH, D_K, D_V, bias=False, **DOUBLE), normal(N, WIDTH)
    w_q, w_k, w_v = matrices(layer)
    for found, true in zip(layer.project(x), (x @ w_q, x @ w_k, x @ w_v), strict=True):
        exact(found[0], true)
    exact(layer(x), rg.attention(x @ w_q, x @ w_k, x @ w_v))


def test_000_size() -> None:
    assert rg.nn.Attention(WIDTH, D_K, D_V)(torch.zeros(N, WIDTH)).shape == (N, D_V)
    assert rg.nn.Attention(WIDTH, WIDTH, WIDTH)(torch.zeros(N, WIDTH)).shape == (N, WIDTH)


def test_000_projections_of_heads() -> None:
    layer, x = multi_head(), normal(BATCH, N, WIDTH)
    for i, (w_q, w_k, w_v, _) in enumerate(of_heads(layer)):
        for found, true in zip(layer.project(x), (x @ w_q, x @ w_k, x @ w_v), strict=True):
            exact(found[:, i], true)


def test_000_sizes_of_heads() -> None:
    layer = multi_head(d_k=None, d_v=None)
    assert (layer.heads, layer.d_k, layer.d_v) == (HEADS, WIDTH // HEADS, WIDTH // HEADS)
    assert [tuple(w.shape) for w in of_heads(layer)[0][:3]] == 3 * [(WIDTH, WIDTH // HEADS)]
    assert layer.project(torch.zeros(N, WIDTH, **DOUBLE))[0].shape == (HEADS, N, WIDTH // HEADS)


def test_000_a_head() -> None:
    layer, x = multi_head(), normal(BATCH, N, WIDTH)
    heads = layer.attend(x)
    assert heads.shape == (BATCH, HEADS, N, D_V)
    for i, (w_q, w_k, w_v, _) in enumerate(of_heads(layer)):
        exact(heads[:, i], softmax((x @ w_q) @ (x @ w_k).mT / math.sqrt(D_K)) @ (x @ w_v))


def test_000_concatenation_is_a_sum() -> None:
    layer, x = multi_head(), normal(BATCH, N, WIDTH)
    a = layer.attend(x)
    w_o = [parts[3] for parts in of_heads(layer)]
    concatenated = torch.cat([a[:, i] for i in range(HEADS)], -1) @ torch.cat(w_o, 0)
    summed = a[:, 0] @ w_o[0] + a[:, 1] @ w_o[1] + a[:, 2] @ w_o[2]
    exact(layer(x), concatenated)
    exact(layer(x), summed)


def test_000_code_sum() -> None:
    layer, x = multi_head(), normal(BATCH, N, WIDTH)
    As, WOs, h = layer.attend(x).unbind(1), [parts[3] for parts in of_heads(layer)], HEADS
    Attention = 0
    for i in range(h):
        Attention += As[i] @ WOs[i]
        exact(layer.per_head(x)[:, i], As[i] @ WOs[i])
    exact(layer(x), Attention)
    exact(layer.per_head(x).sum(1), Attention)


def as_tensors(layer: rg.nn.MultiHeadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The note's A (n_batch, query, d_k, h) and WO (h, d_k, d_model)."""
    return layer.attend(x).movedim(1, -1), torch.stack([parts[3] for parts in of_heads(layer)])


def test_000_tensor_product() -> None:
    layer, x = multi_head(d_v=2), normal(BATCH, N, WIDTH)
    A, WO = as_tensors(layer, x)
    out = layer(x)
    for n, m, out_feature in ((0, 0, 0), (1, 4, 7), (1, N - 1, WIDTH - 1)):
        total = sum(A[n, m, k, i] * WO[i, k, out_feature] for i in range(HEADS) for k in range(2))
        exact(out[n, m, out_feature], total)


def test_000_code_einsum() -> None:
    layer, x = multi_head(), normal(BATCH, N, WIDTH)
    A, WO = as_tensors(layer, x)
    Attention = torch.einsum('nmki,ikM->nmM', A, WO)  # fmt: skip
    exact(layer(x), Attention)


# 001


def single(**options: object) -> tuple[rg.nn.Attention, list[Tensor]]:
    """The note's single head: scores without a scale, and an up-projection."""
    layer = rg.nn.Attention(WIDTH, D_K, D_V, d_out=WIDTH, bias=False, score=rg.Dot(), **DOUBLE, **options)  # type: ignore[arg-type]
    return layer, matrices(layer)


def test_001_queries() -> None:
    (layer, (w_q, _, _, _)), a = single(), normal(N, WIDTH)
    exact(torch.stack([a[i] @ w_q for i in range(N)]), layer.project(a)[0][0])


def test_001_keys() -> None:
    (layer, (_, w_k, _, _)), a = single(), normal(N, WIDTH)
    exact(torch.stack([a[i] @ w_k for i in range(N)]), layer.project(a)[1][0])


def test_001_values() -> None:
    (layer, (_, _, w_v, _)), a = single(), normal(N, WIDTH)
    exact(torch.stack([a[i] @ w_v for i in range(N)]), layer.project(a)[2][0])


def test_001_scores() -> None:
    q, k = normal(N, D_K), normal(M, D_K)
    s = torch.stack([torch.stack([q[i] @ k[j] for j in range(M)]) for i in range(N)])
    exact(rg.attention_scores(q, k, score=rg.Dot()), s)


def test_001_weights() -> None:
    q, k = normal(N, D_K), normal(M, D_K)
    w = rg.attention_weights(q, k, score=rg.Dot())
    for i in range(N):
        total = sum(torch.exp(q[i] @ k[j]) for j in range(M))
        exact(w[i], torch.stack([torch.exp(q[i] @ k[j]) / total for j in range(M)]))


def test_001_contextualised_embedding() -> None:
    q, k, v = normal(N, D_K), normal(M, D_K), normal(M, D_V)
    w, out = rg.attention_weights(q, k, score=rg.Dot()), rg.attention(q, k, v, score=rg.Dot())
    for i in range(N):
        exact(out[i], sum(w[i, j] * v[j] for j in range(M)))


def test_001_up_projection() -> None:
    (layer, (_, _, _, w_o)), a = single(), normal(N, WIDTH)
    contextualised = layer.attend(a)
    exact(layer(a), torch.stack([contextualised[i] @ w_o for i in range(N)]))
    exact(layer(a), contextualised @ w_o)


def test_001_matrix_form() -> None:
    (layer, (w_q, w_k, w_v, _)), a = single(), normal(N, WIDTH)
    Q, K, V = a @ w_q, a @ w_k, a @ w_v
    S = Q @ K.T
    w = softmax(S)
    exact(layer.weights(a), w)
    exact(layer.attend(a), w @ V)
    exact(rg.attention(Q, K, V, score=rg.Dot()), softmax(Q @ K.T) @ V)


def test_001_dimension_analysis() -> None:
    (layer, (w_q, w_k, w_v, w_o)), a = single(), normal(N, WIDTH)
    n, m = a.shape
    assert [tuple(w.shape) for w in (w_q, w_k, w_v, w_o)] == [(m, D_K), (m, D_K), (m, D_V), (D_V, m)]
    assert [tuple(t[0].shape) for t in layer.project(a)] == [(n, D_K), (n, D_K), (n, D_V)]
    assert layer.weights(a).shape == (n, n), "w, and S of which it is the softmax"
    assert layer.attend(a).shape == (n, D_V) and layer(a).shape == (n, m)


def test_001_cross_attention() -> None:
    layer, (w_q, w_k, w_v, w_o) = single(d_context=CONTEXT)
    b, a = normal(N, WIDTH), normal(M, CONTEXT)
    Q, K, V = b @ w_q, a @ w_k, a @ w_v
    for found, true in zip(layer.project(b, a), (Q, K, V), strict=True):
        exact(found[0], true)
    exact(layer(b, a), softmax(Q @ K.T) @ V @ w_o)


def test_001_scaled() -> None:
    q, k, v = normal(N, D_K), normal(M, D_K), normal(M, D_V)
    exact(rg.attention(q, k, v), softmax(q @ k.T / math.sqrt(D_K)) @ v)
    exact(rg.attention(q, k, v, score=rg.ScaledDot(1.0)), rg.attention(q, k, v, score=rg.Dot()))


def test_001_multi_head() -> None:
    layer = multi_head(d_context=CONTEXT)
    x, c = normal(BATCH, N, WIDTH), normal(BATCH, M, CONTEXT)
    heads = [rg.attention(x @ w_q, c @ w_k, c @ w_v) for w_q, w_k, w_v, _ in of_heads(layer)]
    w_o = matrices(layer)[3]
    assert w_o.shape == (HEADS * D_V, WIDTH)
    exact(layer(x, c), torch.cat(heads, -1) @ w_o)


def test_001_a_head_of_three_sequences() -> None:
    layer = multi_head()
    Q, K, V = normal(BATCH, N, WIDTH), normal(BATCH, M, WIDTH), normal(BATCH, M, WIDTH)
    q, k, v = layer.project(Q)[0], layer.project(K)[1], layer.project(V)[2]
    heads = rg.attention(q, k, v)
    for i, (w_q, w_k, w_v, _) in enumerate(of_heads(layer)):
        exact(heads[:, i], softmax((Q @ w_q) @ (K @ w_k).mT / math.sqrt(D_K)) @ (V @ w_v))
