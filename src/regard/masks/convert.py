"""Masks from and to the conventions of other libraries, where True, "causal" and "window" mean other things.

Results are for tensors (batch, heads, n, d). Integer masks are refused: their 1 may mean either.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.core.arrays import integers, plain_tensor
from regard.core.errors import ShapeError
from regard.core.positions import Positions, head, tail
from regard.core.shapes import count_of, listed
from regard.core.tracing import data_unavailable
from regard.masks.algebra import Everything, Mask
from regard.masks.causal_bias import causal_bias_positions, is_causal_bias
from regard.masks.dense import Dense
from regard.masks.positional import Causal, Window
from regard.masks.ragged import Documents


class Converted(NamedTuple):
    """The mask arguments of another library, as regard's arguments.

    mask       for mask=
    bias       the numbers that the library adds to the scores, for score=ScaledDot() >> Bias(bias); None if none
    positions  for positions=; None if nothing compares them
    """

    mask: Mask
    bias: Tensor | None = None
    positions: Positions | None = None


def from_blocked(mask: Any) -> Dense:
    """A boolean mask in which True means may NOT attend: (nq, nk), or any shape that Dense takes.

    This is the convention of nn.MultiheadAttention's attn_mask, fairseq and ESPnet. Raises TypeError for other dtypes.

    >>> from_blocked(torch.tensor([[False, True], [False, False]])).draw(2)
    ■·
    ■■
    """
    return Dense(~_boolean(mask, "mask", "True = may not attend"))


def from_key_padding(mask: Any) -> Dense:
    """A boolean padding mask (*batch, nk) in which True means padding: no query sees that key.

    This is the convention of nn.MultiheadAttention's key_padding_mask. If all padding is at the end,
    Lengths(keys=(~mask).sum(-1)) is smaller and faster, and if all is in front, Lengths(first=mask.sum(-1)).
    A tokenizer's attention_mask (1 = a real token) is from_key_padding(mask == 0).
    Raises TypeError for other dtypes.

    >>> from_key_padding(torch.tensor([[False, False, True]])).draw(2, 3)
    ■■·
    ■■·
    """
    return Dense(~_boolean(mask, "mask", "True = padding")[..., None, None, :])


def from_mha(attn_mask: Any | None, key_padding_mask: Any | None, heads: int, *, appended: int = 0) -> Converted:
    """The masks of torch.nn.MultiheadAttention, for q (batch, heads, L, d) and k (batch, heads, S, d).

    attn_mask (L, S) or (batch * heads, L, S), key_padding_mask (batch, S), or (S,) without batch; boolean: True = may
    NOT attend; floating point: added to the scores. What is -inf there becomes part of the mask, the rest the bias.
    appended: how many keys the module adds behind those (add_bias_kv, add_zero_attn); every query sees them. A fully
    masked row gives 0 here, where that module gives NaN on some paths.
    Raises TypeError for other dtypes, ShapeError for other shapes. Source: torch.nn.MultiheadAttention, torch 2.13.

    >>> from_mha(torch.ones(2, 2).triu(1).bool(), None, heads=4).mask.draw(2)
    ■·
    ■■
    """
    mask: Mask = Everything()
    biases: list[Tensor] = []
    for name, given in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if given is None:
            continue
        t = _boolean_or_float(given, name, "True = may not attend")
        t = pad(t, (0, appended)) if appended else t
        t = _by_pair(t, heads) if name == "attn_mask" else _by_key(t)
        allowed, bias = (~t, None) if t.dtype == torch.bool else split(t)
        mask = mask if allowed is None else mask & Dense(allowed)
        biases += [] if bias is None else [bias]
    return Converted(mask, sum(biases[1:], biases[0]) if biases else None)


def from_sdpa(attn_mask: Any | None, nq: int, nk: int, *, is_causal: bool = False) -> Converted:
    """The masks of torch.nn.functional.scaled_dot_product_attention.

    attn_mask broadcasts to (batch, heads, nq, nk); boolean: True = may attend; floating point: added to the scores.
    What is -inf there becomes part of the mask, the rest the bias. is_causal compares indices (aligned top-left), so
    its positions are head(nq, nk), also where the queries are the last ones and tail(nq, nk) was meant.
    torch.nn.attention.bias.causal_upper_left(nq, nk) and causal_lower_right(nq, nk) are Causal() at head and tail. If
    batch == nq, a (batch, nk) padding mask is read as (nq, nk), as that function does; Dense then warns.
    Raises TypeError for other dtypes, ValueError for both arguments at once. Source: torch 2.13.

    >>> from_sdpa(None, 2, 4, is_causal=True).positions
    Positions(q=int64[2], k=int64[4])
    """
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal are both given; write Dense(mask) & Causal(), or one of them.")
    if is_causal:
        return Converted(Causal(), positions=head(nq, nk))
    if attn_mask is None:
        return Converted(Everything())
    if is_causal_bias(attn_mask):
        return Converted(Causal(), positions=causal_bias_positions(attn_mask, nq, nk))
    t = _boolean_or_float(attn_mask, "attn_mask", "True = may attend")
    allowed, bias = (t, None) if t.dtype == torch.bool else split(t)
    return Converted(Everything() if allowed is None else Dense(allowed), bias)


def from_flash_causal(nq: int, nk: int) -> Converted:
    """causal=True of flash-attention from 2.1 on, xFormers' FromBottomRight, FlashInfer: the queries are the last ones.

    Source: flash-attention's README, "2.1: Change behavior of causal flag".

    >>> causal = from_flash_causal(2, 4)
    >>> causal.mask.draw(2, 4, positions=causal.positions)
    ■■■·
    ■■■■
    """
    return Converted(Causal(), positions=tail(nq, nk))


def from_flash_window(left: int, right: int) -> Window:
    """window_size=(left, right) of flash-attention: keys besides the query's own, -1 = unbounded.

    Its queries are the last ones: pass positions=tail(nq, nk). causal=True is right = 0.
    Raises ValueError below -1. Source: flash_attn_func, flash-attention 2.

    >>> from_flash_window(1, -1)
    Window(before=1, after=None)
    """
    for name, bound in (("left", left), ("right", right)):
        if bound < -1:
            raise ValueError(f"{name}={bound}; expected how many keys besides the query's own, or -1 (unbounded).")
    return Window(before=None if left == -1 else left, after=None if right == -1 else right)


def from_cu_seqlens(cu_q: Any, cu_k: Any | None = None) -> Documents:
    """Packed sequences from the running totals of their lengths, (sequences + 1,) from 0; cu_k None = the same.

    This is the convention of flash_attn_varlen_func and torch's varlen_attn. With their causal=True the queries are the
    last ones of each sequence: Documents & Causal() with positions=cu_seqlens_positions(cu_q, cu_k).
    Raises TypeError for non-integers, ShapeError for other shapes, ValueError where totals begin above 0 or decrease.

    >>> from_cu_seqlens(torch.tensor([0, 1, 3])).draw(3)
    ■··
    ·■■
    ·■■
    """
    q = running_totals(cu_q, "cu_q")
    k = q if cu_k is None else running_totals(cu_k, "cu_k")
    check_as_many(q, k)
    q_ids, k_ids = (
        torch.arange(len(cu) - 1, device=cu.device, dtype=torch.int64).repeat_interleave(cu.diff()) for cu in (q, k)
    )
    return Documents(q_ids, None if cu_k is None else k_ids)


def cu_seqlens_positions(cu_q: Any, cu_k: Any | None = None) -> Positions:
    """Where packed queries stand among packed keys if they are the last ones of their sequence (flash-attention).

    Keys stand at their index. Arguments as from_cu_seqlens.

    >>> cu_seqlens_positions(torch.tensor([0, 1, 2]), torch.tensor([0, 3, 5])).q   # a token decoded in each
    tensor([2, 4])
    """
    q = running_totals(cu_q, "cu_q")
    k = q if cu_k is None else running_totals(cu_k, "cu_k")
    check_as_many(q, k)
    index = torch.arange(int(q[-1]), device=q.device, dtype=torch.int64)
    return Positions(
        index + (k[1:] - q[1:]).repeat_interleave(q.diff()),
        torch.arange(int(k[-1]), device=k.device, dtype=torch.int64),
    )


def from_additive(mask: Any) -> Dense:
    """A floating-point mask that is added to the scores: 0 = may attend, -inf or its dtype's least number = hidden.

    This is the convention of transformers' eager paths. Raises TypeError for other dtypes, ValueError for any other
    number: -10000 is a bias, since a row of such keys alone sees them all.

    >>> from_additive(torch.tensor([[0.0, float("-inf")], [0.0, torch.finfo(torch.float32).min]])).draw(2)
    ■·
    ■·
    """
    t = _boolean_or_float(mask, "mask", "True = may attend")
    if t.dtype == torch.bool:
        raise TypeError(
            "mask has dtype torch.bool; expected floating point: Dense(mask) if True = may attend, or from_blocked."
        )
    hidden = (t == -math.inf) | (t == torch.finfo(t.dtype).min)
    strange = t[~hidden & (t != 0)]
    if len(strange):
        raise ValueError(
            f"mask holds {float(strange[0])}; expected 0 (may attend) and -inf or {torch.finfo(t.dtype).min} (hidden). "
            "Numbers to add are score=... >> Bias(mask)."
        )
    return Dense(~hidden)


def to_blocked(
    mask: Mask,
    nq: int,
    nk: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    positions: Positions | None = None,
) -> Tensor:
    """The mask as booleans, True = may NOT attend; (nq, nk) where all batch elements and heads are alike.

    batch, heads: those of the call, if the mask differs between sequences or heads by at.b or at.h, and not by tensors
    of its own.

    >>> to_blocked(Causal(), 2)
    tensor([[False,  True],
            [False, False]])
    """
    return ~_allowed(mask, nq, nk, batch, heads, positions)


def to_additive(
    mask: Mask,
    nq: int,
    nk: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    positions: Positions | None = None,
    dtype: torch.dtype = torch.float32,
    hidden: float = -math.inf,
) -> Tensor:
    """The mask as numbers to add to scores: 0 where visible, `hidden` elsewhere; axes, batch and heads as to_blocked.

    transformers' eager paths expect hidden=torch.finfo(dtype).min.

    >>> to_additive(Causal(), 2)
    tensor([[0., -inf],
            [0., 0.]])
    """
    dense = _allowed(mask, nq, nk, batch, heads, positions)
    return torch.zeros(dense.shape, dtype=dtype, device=dense.device).masked_fill(~dense, hidden)


def _allowed(
    mask: Mask, nq: int, nk: int | None, batch: int | None, heads: int | None, positions: Positions | None
) -> Tensor:
    """True = may attend, with the axes that differ."""
    heads = mask.extent().sizes()[0] if heads is None else heads
    lead = None if batch is None else (batch,)
    return _least_axes(mask.on(nq, nk, batch=lead, heads=heads, positions=positions).dense())


def _boolean(x: Any, name: str, meaning: str) -> Tensor:
    t = plain_tensor(x, name)
    if t.dtype == torch.bool:
        return t
    way = f"write {name}.bool() if 1 means so, {name} == 0 if 0 does"
    raise TypeError(f"{name} has dtype {t.dtype}; expected torch.bool, {meaning}: {way}.")


def _boolean_or_float(x: Any, name: str, meaning: str) -> Tensor:
    t = plain_tensor(x, name)
    return t if t.dtype.is_floating_point else _boolean(t, name, f"{meaning}, or floating point, added to the scores")


def split(t: Tensor, hides: float = -math.inf) -> tuple[Tensor | None, Tensor | None]:
    """Splits numbers to add into a mask (None = all visible) and the bias of visible pairs (None = no bias).

    hides  the largest number that hides a pair: -inf; for transformers' masks, the smallest number of their dtype

    >>> split(torch.tensor([0.0, -torch.inf]))
    (tensor([ True, False]), None)
    """
    hidden = plain_tensor(t, "a mask that is added").detach() <= hides
    rest = t.masked_fill(hidden, 0)
    if data_unavailable(t):
        return ~hidden, rest
    adds = t.requires_grad or bool((rest != 0).any())
    return ~hidden if bool(hidden.any()) else None, rest if adds else None


def _by_pair(t: Tensor, heads: int) -> Tensor:
    """(L, S) or (batch * heads, L, S) as (batch or 1, heads or 1, L, S)."""
    if t.dim() == 3 and heads > 0 and t.shape[0] % heads == 0:
        return t.unflatten(0, (-1, heads))
    if t.dim() == 2:
        return t[None, None]
    raise ShapeError(f"attn_mask has shape {listed(t.shape)}; expected (L, S) or (batch * {heads}, L, S).")


def _by_key(t: Tensor) -> Tensor:
    if t.dim() in (1, 2):
        return t[..., None, None, :]
    raise ShapeError(f"key_padding_mask has shape {listed(t.shape)}; expected (batch, S), or (S,) without batch.")


def running_totals(x: Any, name: str) -> Tensor:
    """Running totals of lengths as int64 (sequences + 1,). Raises as from_cu_seqlens."""
    t = integers(x, name)
    if t.dim() != 1 or len(t) == 0:
        raise ShapeError(f"{name} has shape {listed(t.shape)}; expected (sequences + 1,).")
    if int(t[0]) != 0 or bool((t.diff() < 0).any()):
        raise ValueError(f"{name} is {t.tolist()}; expected running totals: 0 first, never less than before.")
    return t


def check_as_many(q: Tensor, k: Tensor) -> None:
    """ShapeError where running totals of queries and of keys are of other numbers of sequences."""
    if len(q) != len(k):
        raise ShapeError(f"cu_q has {count_of(len(q) - 1, 'sequence')}, cu_k {len(k) - 1}; expected as many.")


def _least_axes(dense: Tensor) -> Tensor:
    while dense.dim() > 2 and dense.shape[0] == 1:
        dense = dense[0]
    return dense
