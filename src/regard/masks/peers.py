"""Masks from the conventions of other libraries: JAX, Keras, ONNX, xFormers, FlashInfer, x-transformers, transformers.

regard.masks.convert has torch's, flash-attention's, fairseq's and ESPnet's; regard.masks.to_peers goes the other way.
Results are for tensors (batch, heads, n, d). A boolean True = may attend in all of these; Equinox' masks, (nq, nk) or
(heads, nq, nk), are Dense(mask) as they are. Arrays of NumPy are taken as tensors are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.core.arrays import integers, plain_tensor
from regard.core.errors import ShapeError, Unsupported
from regard.core.positions import Positions, head, tail
from regard.core.shapes import listed
from regard.masks.algebra import Everything, Mask
from regard.masks.convert import (
    Converted,
    cu_seqlens_positions,
    from_cu_seqlens,
    from_flash_window,
    from_key_padding,
    split,
)
from regard.masks.dense import Dense
from regard.masks.positional import Causal, Window
from regard.masks.ragged import Lengths


def from_jax(
    nq: int,
    nk: int,
    *,
    bias: Any | None = None,
    masks: tuple[Any, ...] = (),
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    query_seq_lengths: Any | None = None,
    key_value_seq_lengths: Any | None = None,
) -> Converted:
    """The masks of jax.nn.dot_product_attention, and of keras.ops'.

    bias and masks broadcast to (batch, heads, nq, nk) with at most four axes; any number of masks. is_causal and the
    window (left, right), or one number for both, compare indices (aligned top-left). A row that sees nothing gives 0
    here, and the mean of all values there. Raises TypeError for masks that are not boolean, ShapeError for more axes.
    Source: jax.nn.dot_product_attention, JAX 0.10.

    >>> from_jax(2, 4, is_causal=True, local_window_size=1).mask
    Causal() & Window(before=1, after=1)
    """
    seen: Mask = Causal() if is_causal else Everything()
    if local_window_size is not None:
        both = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        seen = seen & Window(*both)
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        seen = seen & Lengths(keys=key_value_seq_lengths, queries=query_seq_lengths)
    for mask in masks:
        seen = seen & Dense(four_axes(mask, "mask"))
    allowed, adds = (None, None) if bias is None else split(four_axes(bias, "bias"))
    seen = seen if allowed is None else seen & Dense(allowed)
    return Converted(seen, adds, head(nq, nk))


def from_keras(
    nq: int,
    nk: int,
    *,
    query_mask: Any | None = None,
    value_mask: Any | None = None,
    key_mask: Any | None = None,
    attention_mask: Any | None = None,
    use_causal_mask: bool = False,
    sliding_window: int | None = None,
) -> Converted:
    """The masks of keras.layers.MultiHeadAttention, boolean or 0 and 1; causal masks are aligned top-left.

    query_mask (batch, nq), value_mask and key_mask (batch, nk), attention_mask (nq, nk), (batch, nq, nk) or (batch,
    heads, nq, nk). sliding_window counts the query's own key on both sides: w is Window(w - 1, w - 1).
    Source: keras.layers.MultiHeadAttention, Keras 3.15.

    >>> from_keras(3, 3, use_causal_mask=True, sliding_window=2).mask.draw(3)
    ■··
    ■■·
    ·■■
    """
    seen: Mask = Causal() if use_causal_mask else Everything()
    if sliding_window is not None:
        seen = seen & Window(sliding_window - 1, sliding_window - 1)
    if query_mask is not None:
        seen = seen & Dense(_truth(query_mask, "query_mask")[:, None, :, None])
    for name, real in (("value_mask", value_mask), ("key_mask", key_mask)):
        if real is not None:
            seen = seen & Dense(_truth(real, name)[:, None, None, :])
    if attention_mask is not None:
        allowed = _truth(attention_mask, "attention_mask")
        seen = seen & Dense(allowed[:, None] if allowed.dim() == 3 else four_axes(allowed, "attention_mask"))
    return Converted(seen, positions=head(nq, nk))


def from_onnx(
    nq: int,
    nk: int,
    *,
    attn_mask: Any | None = None,
    is_causal: bool = False,
    past: int = 0,
    nonpad_kv_seqlen: Any | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Converted:
    """The masks of ONNX's Attention, opset 23 to 25; nk counts the `past` keys too.

    attn_mask broadcasts to (batch, heads, nq, nk), right-aligned; boolean: True = may attend, floating point: added; a
    shorter last axis hides the keys after it. Queries come after the past, or with nonpad_kv_seqlen (batch,) are the
    last of that many real keys. Windows count keys besides the query's own, -1 = unbounded.
    Source: onnx/defs/nn, onnx 1.23.

    >>> from_onnx(2, 4, is_causal=True, past=2).mask.draw(2, 4, positions=from_onnx(2, 4, past=2).positions)
    ■■■·
    ■■■■
    """
    seen: Mask = Causal() if is_causal else Everything()
    if (left_window_size, right_window_size) != (-1, -1):
        seen = seen & from_flash_window(left_window_size, right_window_size)
    positions = Positions(
        torch.arange(past, past + nq, dtype=torch.int64, device="cpu"),
        torch.arange(nk, dtype=torch.int64, device="cpu"),
    )
    if nonpad_kv_seqlen is not None:
        real = integers(nonpad_kv_seqlen, "nonpad_kv_seqlen")
        seen = seen & Lengths(keys=real)
        positions = Positions(
            real[:, None] - nq + torch.arange(nq, dtype=torch.int64, device="cpu"),
            torch.arange(nk, dtype=torch.int64, device="cpu"),
        )
    bias = None
    if attn_mask is not None:
        t = four_axes(attn_mask, "attn_mask")
        if t.dtype == torch.bool:
            allowed: Tensor | None = pad(t, (0, nk - t.shape[-1]))
        else:
            allowed, bias = split(pad(t, (0, nk - t.shape[-1]), value=-torch.inf))
        seen = seen if allowed is None else seen & Dense(allowed)
    return Converted(seen, bias, positions)


def from_flashinfer(
    nq: int, nk: int, *, causal: bool = False, window_left: int = -1, custom_mask: Any | None = None
) -> Converted:
    """The masks of FlashInfer's prefill: the queries are the last ones; window_left counts besides the query's own.

    custom_mask (nq, nk), True = may attend, takes the place of causal. The log-sum-exp has base 2:
    State.of_lse(out, lse, base=2).
    Source: flashinfer.single_prefill_with_kv_cache.

    >>> from_flashinfer(2, 4, causal=True, window_left=1).mask
    Causal() & Window(before=1, after=None)
    """
    seen: Mask = Causal() if causal and custom_mask is None else Everything()
    seen = seen if window_left == -1 else seen & from_flash_window(window_left, -1)
    seen = seen if custom_mask is None else seen & Dense(four_axes(custom_mask, "custom_mask"))
    return Converted(seen, positions=tail(nq, nk))


def from_x_transformers(
    nq: int, nk: int, *, mask: Any | None = None, causal: bool = False, max_attend_past: int | None = None
) -> Converted:
    """The masks of x-transformers: mask (batch, nk) or four axes, True = may attend; the queries are the last ones.

    max_attend_past counts keys besides the query's own. Of grouped heads, head h reads key head h % hk there: repeat
    the keys by k.repeat(1, heads // hk, 1, 1). A row that sees nothing gives 0 here; in x-transformers it depends on
    the path.
    Source: x_transformers.Attention, x-transformers 2.31.

    >>> from_x_transformers(3, 3, causal=True, max_attend_past=1).mask
    Causal() & Window(before=1, after=None)
    """
    seen: Mask = Causal() if causal else Everything()
    seen = seen if max_attend_past is None else seen & Window(before=max_attend_past, after=None)
    if mask is not None:
        t = plain_tensor(mask, "mask")
        seen = seen & Dense(t[:, None, None, :] if t.dim() == 2 else four_axes(t, "mask"))
    return Converted(seen, positions=tail(nq, nk))


def from_transformers(
    nq: int,
    nk: int,
    *,
    attention_mask: Any | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
) -> Converted:
    """The masks of transformers' models: a tokenizer's attention_mask (batch, nk), 1 or True = a real token.

    The queries are the last ones. sliding_window: of causal models w keys, the query's own included; of others |i - j|
    up to w. Masks that are added (eager paths) are regard.masks.convert.from_additive.
    Source: transformers.masking_utils, transformers 5.23.

    >>> from_transformers(4, 4, sliding_window=2).mask
    Causal() & Window(before=1, after=0)
    """
    seen: Mask = Causal() if is_causal else Everything()
    if sliding_window is not None:
        seen = seen & (Window(sliding_window - 1, 0) if is_causal else Window(sliding_window, sliding_window))
    if attention_mask is not None:
        seen = seen & from_key_padding(~_truth(attention_mask, "attention_mask"))
    return Converted(seen, positions=tail(nq, nk))


def from_xformers(attn_bias: Any, nq: int, nk: int) -> Converted:
    """xformers.ops.fmha.attn_bias: its causal, local and block-diagonal classes, a tensor that is added, or None.

    Sequences of a block-diagonal mask are one after another, as in xFormers. Raises Unsupported for the classes with
    padded, gappy or paged keys. Source: xformers/ops/fmha/attn_bias.py, xFormers 0.0.35.
    """
    name = type(attn_bias).__name__
    known = name in _XFORMERS | _XFORMERS_BLOCKS  # of which some are tensors too, by class
    if attn_bias is None or (not known and issubclass(type(attn_bias), Tensor)):
        allowed, adds = (None, None) if attn_bias is None else split(attn_bias)
        return Converted(Everything() if allowed is None else Dense(allowed), adds)
    last = "FromBottomRight" in name
    window = getattr(attn_bias, "_window_size", None)
    seen: Mask = Everything() if window is None else Window(before=window - 1, after=0)
    if name.startswith("LocalAttention"):
        seen = Window(attn_bias.window_left, attn_bias.window_right)
    elif "Causal" in name or "LowerTriangular" in name:
        seen = Causal() & seen
    if name in _XFORMERS:
        added = attn_bias._bias if name.endswith("TensorBias") else None
        return Converted(seen, added, tail(nq, nk) if last else head(nq, nk))
    if name not in _XFORMERS_BLOCKS:
        raise Unsupported(
            f"attn_bias is a {name}; expected one of {', '.join(sorted(_XFORMERS | _XFORMERS_BLOCKS))}. "
            "Any other one is Dense(attn_bias.materialize((nq, nk)) == 0), in memory nq · nk."
        )
    q, k = (
        torch.tensor(info.seqstart_py, dtype=torch.int64, device="cpu")
        for info in (attn_bias.q_seqinfo, attn_bias.k_seqinfo)
    )
    positions = cu_seqlens_positions(q, k)
    if not last:
        behind = (k[1:] - k[:-1] - q[1:] + q[:-1]).repeat_interleave(q.diff())
        positions = Positions(positions.q - behind, positions.k)
    return Converted(from_cu_seqlens(q, k) & seen, positions=positions)


_XFORMERS = frozenset(
    (
        *("LowerTriangularMask", "LowerTriangularMaskWithTensorBias", "LowerTriangularFromBottomRightMask"),
        *("LowerTriangularFromBottomRightLocalAttentionMask", "LocalAttentionFromBottomRightMask"),
    )
)
_XFORMERS_BLOCKS = frozenset(
    (
        *("BlockDiagonalMask", "BlockDiagonalCausalMask", "BlockDiagonalCausalFromBottomRightMask"),
        *("BlockDiagonalCausalLocalAttentionMask", "BlockDiagonalCausalLocalAttentionFromBottomRightMask"),
    )
)


def four_axes(x: Any, name: str) -> Tensor:
    """A mask or bias (..., nq, nk) with all of (batch, heads, nq, nk), the missing ones 1. ShapeError for more axes."""
    t = plain_tensor(x, name)
    if t.dim() > 4:
        raise ShapeError(f"{name} has shape {listed(t.shape)}; expected one that broadcasts to (batch, heads, nq, nk).")
    return t[(None,) * (4 - t.dim())]


def _truth(x: Any, name: str) -> Tensor:
    """Booleans, or integers that are 0 and 1."""
    t = plain_tensor(x, name)
    if t.dtype == torch.bool:
        return t
    if t.dtype.is_floating_point or bool(((t != 0) & (t != 1)).any()):
        raise TypeError(f"{name} has dtype {t.dtype}; expected torch.bool, or integers 0 and 1 (1 = may attend).")
    return t == 1
