"""The checks of a call's arguments, and the sentences for what is written as another library has it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from regard.core.dropout import Dropout
from regard.core.dtypes import FLOATING
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.shapes import listed
from regard.core.value import written
from regard.masks.algebra import Mask
from regard.masks.causal_bias import is_causal_bias
from regard.scores.algebra import Pipeline, Score
from regard.scores.similarity import ScaledDot

MANY_HEADS = 32  # below, a call with fewer tokens than heads is as likely a short text

# What other libraries' functions take, and what to write here.
ELSEWHERE = {
    "attn_mask": "write mask=Dense(attn_mask) for booleans, True = may attend (nn.MultiheadAttention means the "
    "opposite: Dense(~attn_mask)), and score=ScaledDot() >> Bias(attn_mask) for numbers that are added",
    "key_padding_mask": "write mask=Dense(~key_padding_mask[:, None, None, :]): there True = padding, here True = may "
    "attend; or mask=Lengths(keys=lengths)",
    "attention_mask": "write mask=Dense(attention_mask.bool()[:, None, None, :]) where 1 = may attend",
    "is_causal": "write mask=Causal()",
    "causal": "write mask=Causal()",
    "window_size": "write mask=Window(before=left, after=right)",
    "scale": "write score=ScaledDot(scale)",
    "softmax_scale": "write score=ScaledDot(softmax_scale)",
    "softcap": "write score=ScaledDot() >> SoftCap(softcap)",
    "alibi_slopes": "write score=ScaledDot() >> Alibi(alibi_slopes)",
    "attn_bias": "write score=ScaledDot() >> Bias(attn_bias)",
    "dropout_p": "write dropout=Dropout(dropout_p)",
    "enable_gqa": "leave it out: k and v may have fewer heads than q wherever these divide q's",
    "num_heads": "heads are an axis of q, k and v: (batch, n, h * d) becomes (batch, h, n, d) by "
    "x.unflatten(-1, (num_heads, -1)).transpose(1, 2); or use regard.nn.MultiHeadAttention(width, heads)",
    "need_weights": "call attention_weights(q, k, ...) for them",
    "return_lse": "call attention_state(q, k, v, ...).finish() for (out, lse)",
    "block_mask": "write mask=Where(mask_mod)",
    "score_mod": "write it as a Modifier, or call regard.compat.torch.flex_attention",
}


def unexpected_arguments(positional: tuple[Any, ...], named: dict[str, Any]) -> TypeError:
    """The error for arguments that `attention` does not have, with what to write for them."""
    if positional:
        return TypeError(
            f"attention takes q, k and v by position; the fourth is {_kind(positional[0])}: "
            f"{_way_to_name(positional[0])}."
        )
    name = next(iter(named))
    if name not in ELSEWHERE:
        return TypeError(
            f"attention has no argument {name!r}; it has score, mask, positions, sink, dropout and backend."
        )
    return TypeError(
        f"attention has no argument {name!r}; {ELSEWHERE[name]}. regard.compat has functions with the arguments of "
        "torch, flash-attention, Keras and JAX."
    )


def _way_to_name(x: Any) -> str:
    if hasattr(x, "dtype"):
        return _way_to_mask(x, "mask=")
    for kind, name in ((Mask, "mask"), (Score, "score"), (Positions, "positions"), (Dropout, "dropout")):
        if isinstance(x, kind):
            return f"write {name}={x!r}"
    return "name what follows: score=, mask=, positions=, sink=, dropout=, backend="


def check_kinds(score: Any, mask: Any, positions: Any, dropout: Any) -> None:
    """TypeError where one of them is no value of its kind."""
    if not isinstance(score, Score):
        way = _way_to_value(score, Score) or "expected a Score, such as ScaledDot(), or Custom(fn)"
        raise TypeError(f"score is {_kind(score)}; {way}.")
    if not isinstance(mask, Mask):
        way = _way_to_value(mask, Mask) or "expected a Mask, such as Causal() or Where(fn)"
        way = _way_to_mask(mask) if hasattr(mask, "dtype") else way
        raise TypeError(f"mask is {_kind(mask)}; {way}.")
    if positions is not None and not isinstance(positions, Positions):
        way = "expected head(nq, nk), tail(nq, nk) or Positions(q, k)"
        raise TypeError(f"positions is {_kind(positions)}; {way}.")
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(f"dropout is {_kind(dropout)}; expected Dropout(p), or None.")


def _kind(x: Any) -> str:
    """What was given instead, as messages say it."""
    if isinstance(x, type):
        return f"the class {x.__name__}, not one of its values"
    dtype = f" of {str(x.dtype).removeprefix('torch.')}" if hasattr(x, "dtype") else ""
    return f"a {type(x).__name__}{dtype}"


def _way_to_value(x: Any, kind: type) -> str | None:
    """What to write where a class of that kind is given for one of its values."""
    return f"write {written(x)}" if isinstance(x, type) and issubclass(x, kind) else None


def _way_to_mask(array: Any, name: str = "") -> str:
    if is_causal_bias(array):
        return (
            "write mask=Causal(), at positions=head(nq, nk) for causal_upper_left, tail(nq, nk) for causal_lower_right"
        )
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype == "bool":
        return f"write {name}Dense(mask), True = may attend"
    if dtype.startswith(("float", "bfloat")):
        return (
            "write score=ScaledDot() >> Bias(mask) if it is added to the scores, Dense(mask != 0) if 1 means may attend"
        )
    return f"write {name}Dense(mask != 0) if 1 means may attend, Dense(mask == 0) if 1 means masked"


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Errors for tensors of other dtypes, devices or numbers of axes."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() < 2:
            raise ShapeError(
                f"{name} has shape {listed(t.shape)}; expected (*batch, heads, n, d), (batch, n, d) or (n, d)."
            )
        if t.dtype not in FLOATING:
            raise TypeError(
                f"{name} has dtype {t.dtype}; expected float16, bfloat16, float32 or float64: convert with .to(...)."
            )
        if t.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {t.dtype}, q has {q.dtype}; expected one dtype: convert with .to(...).")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q on {q.device}; expected one device: move with .to(...).")
        if t.dim() != q.dim():
            raise ShapeError(
                f"{name} has shape {listed(t.shape)}, q {listed(q.shape)}; expected as many axes: "
                "(*batch, heads, n, d), or (batch, n, d), or (n, d), for all three."
            )


def batch_axes(q: Tensor, k: Tensor, v: Tensor, headed: bool) -> tuple[int, ...]:
    """The batch axes that q, k and v share; ShapeError where they differ."""
    lead = 3 if headed else 2
    if q.shape[:-lead] == k.shape[:-lead] == v.shape[:-lead]:
        return tuple(q.shape[:-lead])
    try:
        return tuple(torch.broadcast_shapes(*(t.shape[:-lead] for t in (q, k, v))))
    except RuntimeError:
        shown = ", ".join(f"{n} {listed(t.shape[:-lead])}" for n, t in (("q", q), ("k", k), ("v", v)))
        hint = (
            ""
            if headed
            else " Three axes are (batch, n, d); heads need four, (batch, heads, n, d): add one by q[None]."
        )
        raise ShapeError(
            f"the batch axes differ: {shown}; expected equal ones, or 1 where they are shared.{hint}"
        ) from None


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ShapeError where the heads, or the numbers of keys and values, do not fit: (*batch, h, n, d) each."""
    heads, key_heads = q.shape[-3], k.shape[-3]
    if v.shape[-3] != key_heads:
        raise ShapeError(f"v has {v.shape[-3]} heads, k has {key_heads}; expected as many.{_if_swapped(q, k, v)}")
    if v.shape[-2] != k.shape[-2]:
        raise ShapeError(f"v has {v.shape[-2]} values, k has {k.shape[-2]} keys; expected one value a key.")
    if heads != key_heads and (key_heads == 0 or heads % key_heads):
        raise ShapeError(
            f"k has {key_heads} heads, q has {heads}; q's heads must be a multiple of k's (grouped queries)."
            f"{_if_swapped(q, k, v)}"
        )


def _if_swapped(q: Tensor, k: Tensor, v: Tensor) -> str:
    """A hint where the tensors would fit if their axes were (*batch, n, heads, d)."""
    heads, key_heads = q.shape[-2], k.shape[-2]
    fits = k.shape[-3] == v.shape[-3] and key_heads == v.shape[-2] and key_heads > 0 and heads % key_heads == 0
    if not fits:
        return ""
    return (
        f" If the axes are (batch, n, heads, d), with {heads} heads, as flash-attention has them, write "
        "q.transpose(-3, -2), and k's and v's too."
    )


def warn_of_swapped_axes(q: Tensor, k: Tensor, v: Tensor, score: Pipeline) -> None:
    """A UserWarning where (*batch, n, heads, d) seems to be given for (*batch, heads, n, d), which the shapes allow.

    Not where v lies in memory as a transposed projection does, and not where the scale is given: both are those of
    models that are known to work.
    """
    if torch.compiler.is_compiling():  # what a graph compares becomes a condition of it
        return
    first = score.parts[0]
    plain = len(score.parts) == 1 and isinstance(first, ScaledDot) and first.scale is None
    heads, nq, nk = q.shape[-3], q.shape[-2], k.shape[-2]
    swapped = heads == k.shape[-3] and heads > nq >= nk > 1 and nq % nk == 0
    if not (swapped and plain and heads >= MANY_HEADS):
        return
    if v.stride(-3) > v.stride(-2):
        # no number in it and no stacklevel: so Python's filters show it once a process
        warnings.warn(
            "q, k and v are read as (batch, heads, n, d), and have more heads than tokens. If they are "
            "(batch, n, heads, d), write q.transpose(1, 2), and k's and v's too. If they are right, pass "
            "positions=head(nq, nk), and this warning goes.",
            stacklevel=1,
        )
