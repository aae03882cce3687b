"""Masks of other libraries, from and back, against these libraries where they are installed."""

from __future__ import annotations

import importlib
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard as rg
from regard.compat.flash_attention import flash_attn_func
from regard.masks.convert import Converted, from_cu_seqlens, from_mha
from regard.masks.peers import (
    from_flashinfer,
    from_jax,
    from_keras,
    from_onnx,
    from_transformers,
    from_x_transformers,
    from_xformers,
)
from regard.masks.to_peers import FlashMask, to_allowed, to_cu_seqlens, to_flash, to_mha

BATCH, HEADS, NQ, NK, WIDTH = 3, 2, 5, 7, 4
I, J = torch.arange(NQ)[:, None], torch.arange(NK)
ALLOWED = (torch.rand(BATCH, 1, NQ, NK) < 0.6) | (J == 0)
REAL = torch.tensor([[3], [7], [5]]) > J
BIAS = torch.randn(1, HEADS, NQ, NK)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(BATCH, HEADS, n, WIDTH) for n in (NQ, NK, NK))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, given: Converted) -> Tensor:
    score = rg.ScaledDot() if given.bias is None else rg.ScaledDot() >> rg.Bias(given.bias)
    return rg.attention(q, k, v, score=score, mask=given.mask, positions=given.positions)


def dense(given: Converted, nq: int = NQ, nk: int = NK) -> Tensor:
    return to_allowed(given.mask, nq, nk, heads=HEADS, positions=given.positions)


def close(found: Tensor, expected: Any) -> None:
    expected = expected if isinstance(expected, Tensor) else torch.from_numpy(np.array(expected))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


JAX: list[dict[str, Any]] = [
    {"is_causal": True},
    {"local_window_size": (2, 1)},
    {"local_window_size": 2, "is_causal": True},
    {"masks": (ALLOWED,), "bias": BIAS},
    {"key_value_seq_lengths": REAL.sum(-1).int(), "query_seq_lengths": torch.tensor([5, 1, 2]).int()},
]


@pytest.mark.parametrize("options", JAX)
def test_jax(options: dict[str, Any]) -> None:
    jax: Any = pytest.importorskip("jax")
    q, k, v = drawn()

    def call(**given: Any) -> Any:
        arrays = {name: jax.numpy.asarray(x.numpy()) if isinstance(x, Tensor) else x for name, x in given.items()}
        qkv = (jax.numpy.asarray(t.transpose(1, 2).numpy()) for t in (q, k, v))
        return jax.nn.dot_product_attention(*qkv, **arrays)

    given = from_jax(NQ, NK, **options)
    theirs = {name: x for name, x in options.items() if name != "masks"}
    close(attend(q, k, v, given).transpose(1, 2), call(**theirs, mask=options.get("masks", (None,))[0]))
    if "query_seq_lengths" not in options:  # back, as one mask; a row that sees nothing is another thing there
        back = call(mask=dense(given), bias=given.bias)
        close(attend(q, k, v, given).transpose(1, 2), back)


KERAS: list[dict[str, Any]] = [
    {"use_causal_mask": True},
    {"attention_mask": ALLOWED[:, 0], "value_mask": REAL},
    {"attention_mask": ALLOWED.expand(-1, HEADS, -1, -1), "use_causal_mask": True},
    {"attention_mask": ALLOWED[0, 0].int(), "key_mask": REAL.int()},
]


@pytest.mark.parametrize("options", KERAS)
def test_keras(options: dict[str, Any]) -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras: Any = pytest.importorskip("keras")
    q, k, v = drawn()
    layer = keras.layers.MultiHeadAttention(HEADS, WIDTH)
    mask = layer._compute_attention_mask(q.transpose(1, 2), v.transpose(1, 2), **options)
    given = from_keras(NQ, NK, **options)
    assert torch.equal(dense(given).expand(BATCH, HEADS, NQ, NK), layer_axes(mask).expand(BATCH, HEADS, NQ, NK))
    qkv = (t.transpose(1, 2) for t in (q, k, v))
    close(attend(q, k, v, given).transpose(1, 2), keras.ops.dot_product_attention(*qkv, mask=dense(given)))


def layer_axes(mask: Tensor) -> Tensor:
    return mask[:, None] if mask.dim() == 3 else mask


@pytest.mark.parametrize("window", [1, 3])
def test_keras_windows_and_padded_queries(window: int) -> None:
    given = from_keras(NQ, NK, sliding_window=window, query_mask=REAL[:, :NQ])
    seen = ((I - J).abs() < window) & REAL[:, None, :NQ, None]
    assert torch.equal(dense(given), seen)


ONNX: list[dict[str, Any]] = [
    {"is_causal": True},
    {"is_causal": True, "past": 2},
    {"is_causal": True, "nonpad_kv_seqlen": torch.tensor([5, 7, 6])},
    {"is_causal": True, "nonpad_kv_seqlen": torch.tensor([2, 7, 6])},
    {"left_window_size": 2, "right_window_size": 1, "past": 2},
    {"left_window_size": 2, "is_causal": True, "attn_mask": BIAS},
    {"attn_mask": ALLOWED},
    {"attn_mask": ALLOWED[..., :4]},
    {"attn_mask": BIAS[..., :4], "right_window_size": 1},
    {"attn_mask": ALLOWED[0, 0]},
]


@pytest.mark.parametrize("options", ONNX)
def test_onnx(options: dict[str, Any]) -> None:
    op: Any = pytest.importorskip("onnx.reference.ops.op_attention")
    q, k, v = (t.numpy() for t in drawn())
    past = options.get("past", 0)
    theirs = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items() if name != "past"}
    before = {"past_key": k[:, :, :past], "past_value": v[:, :, :past]} if past else {}
    expected = op._compute_attention(q, k[:, :, past:], v[:, :, past:], **theirs, **before)[0]
    given = from_onnx(NQ, NK, **options)
    close(attend(*map(torch.from_numpy, (q, k, v)), given), expected)
    if given.bias is None:
        mask = dense(given).numpy()
        expected = op._compute_attention(q, k, v, attn_mask=mask)[0]
        close(attend(*map(torch.from_numpy, (q, k, v)), given), np.nan_to_num(expected))


X_TRANSFORMERS: list[dict[str, Any]] = [{"mask": REAL}, {"causal": True}, {"mask": ALLOWED, "causal": True}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", X_TRANSFORMERS)
def test_x_transformers(options: dict[str, Any]) -> None:
    attend_module: Any = pytest.importorskip("x_transformers.attend").Attend
    q, k, v = drawn()
    q = q.repeat(1, 2, 1, 1)  # four heads on two key heads: head h reads h % 2
    causal = options.get("causal", False)
    expected, _ = attend_module(causal=causal, heads=4)(q, k, v, mask=options.get("mask"))
    keys, values = (t.repeat(1, 2, 1, 1) for t in (k, v))
    close(attend(q, keys, values, from_x_transformers(NQ, NK, **options)), expected.detach())


def test_x_transformers_window() -> None:
    given = from_x_transformers(NQ, NK, max_attend_past=2)
    assert torch.equal(dense(given)[0, 0], ~((I + NK - NQ) - J > 2))


@pytest.mark.parametrize("kind", ["", "sliding_window_"])
@pytest.mark.parametrize("causal", [True, False])
def test_transformers(kind: str, causal: bool) -> None:
    masking: Any = pytest.importorskip("transformers.masking_utils")
    names = masking.sliding_window_causal_mask_function, masking.sliding_window_bidirectional_mask_function
    plain = masking.causal_mask_function, masking.bidirectional_mask_function
    window = 3 if kind else None
    rule = (names if kind else plain)[not causal]
    rule = rule(window) if kind else rule
    at = I + NK - NQ
    seen = torch.as_tensor(rule(at, 0, at, J)).expand(NQ, NK)
    given = from_transformers(NQ, NK, attention_mask=REAL.int(), is_causal=causal, sliding_window=window)
    assert torch.equal(dense(given), seen & REAL[:, None, None])


def xformers_masks() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("xformers")
        return importlib.import_module("xformers.ops.fmha.attn_bias")


XFORMERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda a: None,
    "tensor": lambda a: BIAS[0].masked_fill(J > 4, -math.inf),
    "causal": lambda a: a.LowerTriangularMask(),
    "causal with bias": lambda a: a.LowerTriangularMask().add_bias(BIAS),
    "bottom right": lambda a: a.LowerTriangularFromBottomRightMask(),
    "bottom right, local": lambda a: a.LowerTriangularFromBottomRightLocalAttentionMask(3),
    "local": lambda a: a.LocalAttentionFromBottomRightMask(1, 2),
    "blocks": lambda a: a.BlockDiagonalMask.from_seqlens([1, 4], [3, 4]),
    "causal blocks": lambda a: a.BlockDiagonalCausalMask.from_seqlens([1, 4], [3, 4]),
    "bottom right blocks": lambda a: a.BlockDiagonalCausalFromBottomRightMask.from_seqlens([1, 4], [3, 4]),
    "local blocks": lambda a: a.BlockDiagonalCausalMask.from_seqlens([1, 4], [3, 4]).make_local_attention(2),
    "local bottom right blocks": lambda a: a.BlockDiagonalCausalFromBottomRightMask.from_seqlens(
        [1, 4], [3, 4]
    ).make_local_attention(2),
}


@pytest.mark.parametrize("make", XFORMERS.values(), ids=XFORMERS.keys())
def test_xformers(make: Callable[[Any], Any]) -> None:
    attn_bias = make(xformers_masks())
    added = torch.zeros(1)
    if attn_bias is not None:
        added = attn_bias if isinstance(attn_bias, Tensor) else attn_bias.materialize((BATCH, HEADS, NQ, NK))
    q, k, v = drawn()
    expected = ((q @ k.mT / WIDTH**0.5 + added).softmax(-1) @ v).nan_to_num(0)
    close(attend(q, k, v, from_xformers(attn_bias, NQ, NK)), expected)


def test_xformers_with_padded_keys_is_refused() -> None:
    padded = xformers_masks().BlockDiagonalPaddedKeysMask.from_seqlens([1, 4], 4, [3, 4])
    with pytest.raises(rg.Unsupported, match="attn_bias is a BlockDiagonalPaddedKeysMask; expected one of"):
        from_xformers(padded, 5, 8)


@pytest.mark.parametrize("shape", [(NQ, NK), (HEADS, NQ, NK)], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_equinox_takes_dense_masks(shape: tuple[int, ...]) -> None:
    jax: Any = pytest.importorskip("jax")
    attention: Any = pytest.importorskip("equinox").nn._attention.dot_product_attention
    q, k, v = (t[0] for t in drawn())
    allowed = (torch.rand(shape) < 0.6) | (J == 0)
    as_jax = [jax.numpy.asarray(t.numpy()) for t in (q, k, v)]
    mask = allowed.expand(HEADS, NQ, NK)
    expected = [attention(*(t[h] for t in as_jax), jax.numpy.asarray(mask[h].numpy())) for h in range(HEADS)]
    close(rg.attention(q[None], k[None], v[None], mask=rg.Dense(allowed))[0], np.stack(expected))


def test_flashinfer() -> None:
    """By its documentation: custom_mask or causal, window_left besides the query's own, base 2."""
    at = I + NK - NQ
    assert torch.equal(dense(from_flashinfer(NQ, NK, causal=True, window_left=2))[0, 0], (at >= J) & (at - 2 <= J))
    for causal in (False, True):  # FlashInfer reads causal where there is no custom_mask
        found = dense(from_flashinfer(NQ, NK, causal=causal, custom_mask=ALLOWED[0, 0]))
        assert torch.equal(found[0, 0], ALLOWED[0, 0])
    q, k, v = drawn()
    out, lse = rg.attention_state(q, k, v).finish()
    again = rg.State.of_lse(out, lse / math.log(2), base=2).finish()
    torch.testing.assert_close(again, (out, lse))


MASKS = [
    rg.Everything(),
    rg.Causal(),
    rg.Window(2, 1),
    rg.Window(None, 1),
    rg.Causal() & rg.Window(3, None) & rg.Window(2, 5),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_to_flash_attention(mask: rg.Mask) -> None:
    q, k, v = drawn()
    expected = rg.attention(q, k, v, mask=mask, positions=rg.tail(NQ, NK))
    causal, window = to_flash(mask)
    out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal, window_size=window)
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_to_flash_attention_refuses_and_packs() -> None:
    assert to_flash(rg.Causal() & rg.Window(3, None)) == FlashMask(True, (3, -1))
    with pytest.raises(rg.Unsupported, match="no argument for Prefix"):
        to_flash(rg.Causal() & rg.Prefix(2))
    cu_q, cu_k = torch.tensor([0, 2, 2, 5]).int(), torch.tensor([0, 1, 4, 4]).int()
    found = to_cu_seqlens(from_cu_seqlens(cu_q, cu_k))
    assert [t.tolist() for t in found] == [[0, 2, 2, 5], [0, 1, 4, 4]] and found[0].dtype == torch.int32
    with pytest.raises(ValueError, match="never decrease"):
        to_cu_seqlens(rg.Documents(torch.tensor([1, 0])))


@pytest.mark.parametrize("mask", [rg.Causal(), rg.Lengths(keys=torch.tensor([1, 3, 7]))], ids=repr)
def test_to_multihead_attention_and_back(mask: rg.Mask) -> None:
    x = torch.randn(BATCH, NK, HEADS * WIDTH)
    layer = torch.nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True)
    blocked = to_mha(mask, NK, NK, batch=BATCH, heads=HEADS)
    ours = rg.nn.MultiHeadAttention.from_torch(layer)
    torch.testing.assert_close(ours(x, mask=mask), layer(x, x, x, attn_mask=blocked)[0])
    again = dense(from_mha(blocked, None, HEADS), NK, NK)
    assert torch.equal(again.expand(BATCH, HEADS, NK, NK), mask.dense(NK).expand(BATCH, HEADS, NK, NK))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: from_keras(2, 2, query_mask=torch.tensor([[0, 2]])), TypeError, "query_mask has dtype torch.int64"),
        (lambda: from_keras(2, 2, value_mask=torch.zeros(1, 2)), TypeError, "integers 0 and 1"),
        (lambda: from_jax(2, 2, bias=torch.zeros(1, 1, 1, 2, 2)), rg.ShapeError, r"bias has shape \(1, 1, 1, 2, 2\)"),
        (lambda: from_onnx(2, 2, left_window_size=-2), ValueError, "left=-2"),
        (lambda: from_transformers(2, 2, attention_mask=torch.zeros(1, 2)), TypeError, "attention_mask has dtype"),
    ],
)
def test_refusals(make: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()
