"""Round trips between masks here and those of torch's own attentions, and the conventions of the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard as rg
from regard.masks.convert import (
    Converted,
    cu_seqlens_positions,
    from_additive,
    from_blocked,
    from_cu_seqlens,
    from_flash_causal,
    from_flash_window,
    from_key_padding,
    from_mha,
    from_sdpa,
    to_additive,
    to_blocked,
)
from regard.masks.to_peers import to_allowed, to_mha

BATCH, HEADS, L, S, WIDTH = 3, 2, 5, 7, 12
INF = math.inf
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(BATCH, HEADS, n, WIDTH // HEADS, dtype=torch.float64) for n in (L, S, S))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, given: Converted) -> Tensor:
    score = rg.ScaledDot() if given.bias is None else rg.ScaledDot() >> rg.Bias(given.bias)
    return rg.attention(q, k, v, score=score, mask=given.mask, positions=given.positions)


def hiding(*shape: int) -> Tensor:
    """Booleans, True = hidden, that leave every row its first key."""
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    return hidden


def adding(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).masked_fill(hiding(*shape), -INF)


def to_numbers(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -INF)


@pytest.mark.parametrize("padding", [None, hiding, adding], ids=["no padding", "bool padding", "float padding"])
@pytest.mark.parametrize("kind", [None, hiding, adding], ids=["none", "bool", "float"])
@pytest.mark.parametrize("shape", [(L, S), (BATCH * HEADS, L, S)], ids=str)
def test_nn_multihead_attention(
    padding: Callable[..., Tensor] | None, kind: Callable[..., Tensor] | None, shape: tuple[int, ...]
) -> None:
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True, dtype=torch.float64)
    x, y = torch.randn(BATCH, L, WIDTH, dtype=torch.float64), torch.randn(BATCH, S, WIDTH, dtype=torch.float64)
    attn_mask, key_padding_mask = kind and kind(*shape), padding and padding(BATCH, S)
    masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    if {kind, padding} == {hiding, adding}:  # torch warns of the mix; the same as numbers
        masks = {name: m if m.is_floating_point() else to_numbers(m) for name, m in masks.items()}
    expected, _ = module(x, y, y, **masks, need_weights=False)

    weights = module.in_proj_weight.chunk(3)
    q, k, v = ((t @ w.T).unflatten(-1, (HEADS, -1)).transpose(1, 2) for t, w in zip((x, y, y), weights, strict=True))
    out = attend(q, k, v, from_mha(attn_mask, key_padding_mask, HEADS))
    out = out.transpose(1, 2).flatten(-2) @ module.out_proj.weight.T
    torch.testing.assert_close(out, expected, **CLOSE)


def test_what_is_minus_infinity_becomes_a_mask() -> None:
    causal = torch.nn.Transformer.generate_square_subsequent_mask(L)
    given = from_mha(causal, torch.zeros(BATCH, L), HEADS)
    assert given.bias is None and torch.equal(given.mask.dense(L)[0, 0], rg.Causal().dense(L)[0])
    given = from_mha(None, None, HEADS)
    assert given == Converted(rg.Everything())
    learned = torch.zeros(L, S, requires_grad=True)
    assert from_mha(learned, None, HEADS).bias is not None


@pytest.mark.parametrize("shape", [(L, S), (HEADS, 1, S), (BATCH, 1, L, S), (BATCH, HEADS, L, S), (1, S)], ids=str)
def test_sdpa_masks(shape: tuple[int, ...]) -> None:
    q, k, v = tensors()
    for attn_mask in (~hiding(*shape), adding(*shape)):
        torch.testing.assert_close(
            attend(q, k, v, from_sdpa(attn_mask, L, S)), sdpa(q, k, v, attn_mask=attn_mask), **CLOSE
        )


@pytest.mark.parametrize(("nq", "nk"), [(5, 7), (7, 5), (5, 5), (1, 7)])
def test_sdpa_causal_is_top_left(nq: int, nk: int) -> None:
    q, k = torch.randn(2, 3, nq, 5, dtype=torch.float64), torch.randn(2, 3, nk, 5, dtype=torch.float64)
    given = from_sdpa(None, nq, nk, is_causal=True)
    torch.testing.assert_close(attend(q, k, k, given), sdpa(q, k, k, is_causal=True), **CLOSE)
    assert from_sdpa(None, nq, nk) == Converted(rg.Everything())


def test_sdpa_padding_is_read_as_rows_and_warns() -> None:
    q, k = torch.randn(3, 2, 3, 5), torch.randn(3, 2, 7, 5)
    allowed = torch.arange(7) < torch.tensor([[1], [3], [5]])
    with pytest.warns(UserWarning, match="as many sequences as queries"):
        got = attend(q, k, k, from_sdpa(allowed, 3, 7))
    torch.testing.assert_close(got, sdpa(q, k, k, attn_mask=allowed))
    with pytest.raises(ValueError, match="attn_mask and is_causal are both given"):
        from_sdpa(torch.ones(3, 7).bool(), 3, 7, is_causal=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, i, j: i >= j,
        lambda b, h, i, j: (i - j).abs() <= 2,
        lambda b, h, i, j: (j < 3 + b) | (i * 3 + j + h) % 4 == 1,
    ],
    ids=["causal", "window", "mixed"],
)
def test_flex_attention_takes_the_same_functions(mask_mod: Callable[..., Tensor]) -> None:
    q, k, v = (torch.randn(BATCH, HEADS, 11, 8) for _ in range(3))
    block = create_block_mask(mask_mod, BATCH, HEADS, 11, 11, device="cpu")
    expected = flex_attention(q, k, v, block_mask=block)
    torch.testing.assert_close(rg.attention(q, k, v, mask=rg.Where(mask_mod)), expected)


def test_flash_attention_aligns_bottom_right() -> None:
    """The tables of flash-attention's README, 2.1."""
    for nq, nk, table in ((2, 5, ["■■■■·", "■■■■■"]), (5, 2, ["··", "··", "··", "■·", "■■"])):
        mask, bias, positions = from_flash_causal(nq, nk)
        dense = mask.dense(nq, nk, positions=positions)[0]
        assert bias is None and ["".join("·■"[x] for x in row) for row in dense.tolist()] == table


@pytest.mark.parametrize("left", [-1, 0, 2])
@pytest.mark.parametrize("right", [-1, 0, 3])
def test_flash_attention_window(left: int, right: int) -> None:
    # flash_attn's own reference: construct_local_mask
    i, j = torch.arange(L)[:, None], torch.arange(S)
    hidden = torch.zeros(L, S, dtype=torch.bool)
    hidden |= (j > i + S - L + right) if right >= 0 else hidden
    hidden |= (j < i + S - L - left) if left >= 0 else hidden
    assert torch.equal(from_flash_window(left, right).dense(L, S, positions=rg.tail(L, S))[0], ~hidden)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_equal_attention_one_by_one(causal: bool) -> None:
    cu_q, cu_k = torch.tensor([0, 2, 2, 7, 8]), torch.tensor([0, 5, 6, 11, 11], dtype=torch.int32)
    q, k = torch.randn(8, 3, dtype=torch.float64), torch.randn(11, 3, dtype=torch.float64)
    mask: rg.Mask = from_cu_seqlens(cu_q, cu_k)
    at = cu_seqlens_positions(cu_q, cu_k)
    mask = mask & rg.Causal() if causal else mask
    assert mask.on(8, 11, positions=at).rows() is not None
    got = rg.attention(q, k, k, mask=mask, positions=at)
    for b in range(4):
        one, keys = q[cu_q[b] : cu_q[b + 1]], k[cu_k[b] : cu_k[b + 1]]
        alone = from_flash_causal(len(one), len(keys)) if causal else Converted(rg.Everything())
        expected = rg.attention(one, keys, keys, mask=alone.mask, positions=alone.positions)
        torch.testing.assert_close(got[cu_q[b] : cu_q[b + 1]], expected, **CLOSE)


def test_packed_sequences_of_one_kind() -> None:
    assert from_cu_seqlens(torch.tensor([0, 2, 5])) == rg.Documents(torch.tensor([0, 0, 1, 1, 1]))
    assert cu_seqlens_positions(torch.tensor([0, 2, 5])) == rg.head(5, 5)


def test_true_means_masked_becomes_true_means_kept() -> None:
    hidden = hiding(L, S)
    assert from_blocked(hidden) == rg.Dense(~hidden)
    assert torch.equal(to_blocked(from_blocked(hidden), L, S), hidden)
    padding = hiding(BATCH, S)
    dense = from_key_padding(padding).on(L, S, batch=(BATCH,), heads=HEADS).dense()
    assert torch.equal(dense.expand(BATCH, HEADS, L, S), ~padding[:, None, None].expand(BATCH, HEADS, L, S))
    assert to_blocked(rg.Causal() & rg.Lengths(keys=torch.tensor([1, 3])), 4).shape == (2, 1, 4, 4)


def test_masks_that_differ_by_indices_of_sequences_and_heads() -> None:
    """They have no tensors with these axes: the caller says how many there are."""
    lengths = torch.tensor([1, 3])
    by_sequence, by_head = rg.Where(lambda b, h, i, j: j < lengths[b]), rg.Where(lambda b, h, i, j: (h == 0) | (j <= i))
    kept = torch.arange(3) < lengths[:, None, None, None]
    assert torch.equal(to_blocked(by_sequence, 3, batch=2), ~kept.expand(2, 1, 3, 3))
    assert torch.equal(to_additive(by_sequence, 3, batch=2) == 0, kept.expand(2, 1, 3, 3))
    assert torch.equal(to_mha(by_sequence, 3, 3, batch=2, heads=4), ~kept.expand(2, 4, 3, 3).flatten(0, 1))
    assert torch.equal(to_allowed(by_sequence, 3, batch=2), kept.expand(2, 1, 3, 3))
    causal = torch.ones(3, 3).tril().bool()
    assert torch.equal(to_blocked(by_head, 3, heads=2), ~torch.stack([torch.ones(3, 3).bool(), causal]))
    assert torch.equal(to_mha(by_head, 3, 3, batch=1, heads=2)[1], ~causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_additive_masks_go_both_ways(dtype: torch.dtype) -> None:
    mask, least = rg.Window(before=1, after=1), torch.finfo(dtype).min
    for hidden in (-INF, least):
        added = to_additive(mask, 5, dtype=dtype, hidden=hidden)
        assert added.dtype == dtype and added.shape == (5, 5) and set(added.unique().tolist()) == {hidden, 0.0}
        assert torch.equal(from_additive(added).dense(5), mask.dense(5)[0])
    twice = torch.tensor([[0.0, least * 2]], dtype=dtype)
    assert from_additive(twice).allowed.tolist() == [[True, False]]


INTEGERS = torch.ones(L, S, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: from_blocked(INTEGERS), TypeError, r"mask has dtype torch.int64; expected .* write mask.bool\(\)"),
        (lambda: from_blocked(INTEGERS.float()), TypeError, "expected torch.bool, True = may not attend"),
        (lambda: from_key_padding(INTEGERS.byte()), TypeError, "torch.uint8; expected torch.bool, True = padding"),
        (lambda: from_mha(INTEGERS, None, 2), TypeError, "attn_mask has dtype torch.int64.* or floating point, added"),
        (lambda: from_mha(None, INTEGERS, 2), TypeError, r"key_padding_mask == 0 if 0 does"),
        (lambda: from_sdpa(INTEGERS, L, S), TypeError, "expected torch.bool, True = may attend, or floating point"),
        (lambda: from_mha(torch.zeros(5, L, S), None, 2), rg.ShapeError, r"expected \(L, S\) or \(batch \* 2, L, S\)"),
        (lambda: from_mha(None, torch.zeros(1, 2, S), 2), rg.ShapeError, r"expected \(batch, S\), or \(S,\)"),
        (lambda: from_additive(INTEGERS == 1), TypeError, r"Dense\(mask\) if True = may attend, or from_blocked"),
        (lambda: from_additive(INTEGERS.float()), ValueError, "mask holds 1.0; expected 0"),
        (lambda: from_additive(torch.tensor([[0.0, -1e4]])), ValueError, r"mask holds -10000.0.*>> Bias\(mask\)"),
        (lambda: from_additive(torch.tensor([[0.0, math.nan]])), ValueError, "mask holds nan"),
        (lambda: from_flash_window(-2, 0), ValueError, r"left=-2; expected .* or -1 \(unbounded\)"),
        (lambda: from_cu_seqlens(torch.tensor([0.0, 2.0])), TypeError, "cu_q has dtype torch.float32"),
        (lambda: from_cu_seqlens(torch.tensor([1, 2])), ValueError, r"cu_q is \[1, 2\]; expected running totals"),
        (lambda: from_cu_seqlens(torch.tensor([0, 2, 1])), ValueError, "never less than before"),
        (lambda: from_cu_seqlens(torch.tensor([[0, 2]])), rg.ShapeError, r"expected \(sequences \+ 1,\)"),
        (
            lambda: from_cu_seqlens(torch.tensor([0, 2]), torch.tensor([0, 2, 4])),
            rg.ShapeError,
            "cu_q has 1 sequence, cu_k 2; expected as many",
        ),
    ],
)
def test_refusals(make: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()
