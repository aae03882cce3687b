"""The arguments of a call: checked, and made a Problem; and the sentences for what another library writes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.call.problem import Problem
from regard.core.dropout import Dropout
from regard.core.dtypes import FLOATING
from regard.core.elsewhere import ARGUMENTS, COMPAT
from regard.core.errors import ShapeError
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged
from regard.core.positions import Positions, resolve_positions
from regard.core.region import Frame
from regard.core.shapes import broadcast_shape, count_of, listed
from regard.core.wrong_calls import answers_wrong_calls, kind_of, no_argument
from regard.masks.algebra import Mask
from regard.masks.ragged import numbers_on
from regard.masks.ways import way_to_mask
from regard.scores.algebra import Pipeline, Score, Similarity, as_pipeline
from regard.scores.similarity import ScaledDot
from regard.scores.ways import way_to_score

MANY_HEADS = 32  # below, a call with fewer tokens than heads is as likely a short text


def unexpected_arguments(positional: tuple[Any, ...], named: dict[str, Any]) -> TypeError:
    """The error for arguments that `attention` does not have, with what to write for them."""
    if positional:
        return TypeError(
            f"attention takes q, k and v by position; the fourth is {kind_of(positional[0])}: "
            f"{way_to_name(positional[0])}."
        )
    known = ["score", "mask", "positions", "sink", "dropout", "backend"]
    return TypeError(no_argument("attention", list(named), known, ARGUMENTS, f" {COMPAT}"))


def missing_tensors(**given: Any) -> TypeError:
    """The error for a call of `attention` in which some of q, k and v are None, or are left out."""
    *first, last = [name for name, x in given.items() if x is None]
    names = f"{', '.join(first)} and {last}" if first else last
    return TypeError(f"attention needs {names}; write attention(q, k, v), or attention(x, x, x) for self-attention.")


def way_to_name(x: Any) -> str:
    """How what was passed by position is passed by name."""
    if hasattr(x, "dtype"):
        return way_to_mask(x, "mask=") or "name what follows"
    for kind, name in ((Mask, "mask"), (Score, "score"), (Positions, "positions"), (Dropout, "dropout")):
        if isinstance(x, kind):
            return f"write {name}={x!r}"
    return "name what follows: score=, mask=, positions=, sink=, dropout=, backend="


def _beyond_keys(x: Any) -> str:
    if isinstance(x, Tensor) and x.is_floating_point():
        return "leave v out, if that is it: scores and weights come from q and k alone"
    return way_to_name(x)


_BEFORE_DROPOUT = "leave it out: scores and weights are those before dropout"
_PAIRS = {
    "v": "leave it out: scores and weights come from q and k alone",
    "dropout": _BEFORE_DROPOUT,
    "dropout_p": _BEFORE_DROPOUT,
    "need_weights": "leave it out: attention_weights gives nothing else",
    "backend": "leave it out: the scores or weights are written out as they are defined",
    "sink": "attention_weights and attention_state take it; it changes no score",
}
answers_calls = answers_wrong_calls(ARGUMENTS, COMPAT, beyond=way_to_name)
answers_calls_over = answers_wrong_calls(
    {**ARGUMENTS, **dict.fromkeys(("k", "v", "keys"), "write source=[(k, v)], the parts that keys and values come in")},
    beyond=lambda x: "keys and values come together, as one source: [(k, v), ...]",
)
answers_calls_of_pairs = answers_wrong_calls({**ARGUMENTS, **_PAIRS}, beyond=_beyond_keys)


def check_mask(mask: Any, name: str) -> None:
    """TypeError, naming the argument, where it is no mask."""
    if not isinstance(mask, Mask):
        way = way_to_mask(mask) or "expected a Mask, such as Causal() or Where(fn)"
        raise TypeError(f"{name} is {kind_of(mask)}; {way}.")


def check_kinds(score: Any, mask: Any, positions: Any, dropout: Any) -> None:
    """TypeError where one of them is no value of its kind."""
    if not isinstance(score, Score):
        way = way_to_score(score) or "expected a Score, such as ScaledDot(), or Custom(fn)"
        raise TypeError(f"score is {kind_of(score)}; {way}.")
    check_mask(mask, "mask")
    if positions is not None and not isinstance(positions, Positions):
        way = "expected head(nq, nk), tail(nq, nk) or Positions(q, k)"
        raise TypeError(f"positions is {kind_of(positions)}; {way}.")
    if dropout is not None and not isinstance(dropout, Dropout):
        way = f"write Dropout({dropout})" if isinstance(dropout, float) else "expected Dropout(p), or None"
        raise TypeError(f"dropout is {kind_of(dropout)}; {way}.")


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
        return broadcast_shape(*(t.shape[:-lead] for t in (q, k, v)))
    except ShapeError:
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
        raise ShapeError(
            f"v has {count_of(v.shape[-3], 'head')}, k has {key_heads}; expected as many.{_if_swapped(q, k, v)}"
        )
    if v.shape[-2] != k.shape[-2]:
        raise ShapeError(
            f"v has {count_of(v.shape[-2], 'value')}, k has {count_of(k.shape[-2], 'key')}; expected one value a key."
        )
    if heads != key_heads and (key_heads == 0 or heads % key_heads):
        raise ShapeError(
            f"k has {count_of(key_heads, 'head')}, q has {heads}; q's heads must be a multiple of k's "
            "(grouped queries)."
            f"{_if_swapped(q, k, v)}"
        )


def _if_swapped(q: Tensor, k: Tensor, v: Tensor) -> str:
    """A hint where the tensors would fit if their axes were (*batch, n, heads, d)."""
    heads, key_heads = q.shape[-2], k.shape[-2]
    fits = k.shape[-3] == v.shape[-3] and key_heads == v.shape[-2] and key_heads > 0 and heads % key_heads == 0
    if not fits:
        return ""
    return (
        f" If the axes are (batch, n, heads, d), with {count_of(heads, 'head')}, as flash-attention has them, write "
        "q.transpose(-3, -2), and k's and v's too."
    )


def more_heads_than_tokens(q: Tensor, k: Tensor) -> bool:
    """Whether (*batch, heads, n, d) has more heads than tokens, and could be (*batch, n, heads, d)."""
    heads, nq, nk = q.shape[-3], q.shape[-2], k.shape[-2]
    return heads == k.shape[-3] and heads > nq >= nk > 1 and nq % nk == 0


def warn_of_swapped_axes(q: Tensor, k: Tensor, v: Tensor, score: Pipeline) -> None:
    """A UserWarning where (*batch, n, heads, d) seems to be given for (*batch, heads, n, d), which the shapes allow.

    Not where v lies in memory as a transposed projection does, and not where the scale is given: both are those of
    models that are known to work.
    """
    if torch.compiler.is_compiling():  # what a graph compares becomes a condition of it
        return
    if q.shape[-3] < MANY_HEADS or not more_heads_than_tokens(q, k):
        return
    first = score.parts[0]
    if len(score.parts) > 1 or not isinstance(first, ScaledDot) or first.scale is not None:
        return
    if v.stride(-3) > v.stride(-2):
        # no number in it and no stacklevel: so Python's filters show it once a process
        warnings.warn(
            "q, k and v are read as (batch, heads, n, d), and have more heads than tokens. If they are "
            "(batch, n, heads, d), write q.transpose(1, 2), and k's and v's too. If they are right, pass "
            "positions=head(nq, nk), which this warning asks for, or hide it by warnings.filterwarnings where the call "
            "is torch's.",
            stacklevel=1,
        )


@dataclass(frozen=True)
class Layout:
    """How the caller's axes map to (*batch, h, n, d), and back."""

    headed: bool
    batch: tuple[int, ...]

    def restore(self, t: Tensor, trailing: int) -> Tensor:
        """(*batch, h, ...) in the caller's axes; `trailing` axes follow the head axis."""
        return t if self.headed else t.squeeze(-trailing - 1)


def build_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    dropout: Dropout | None,
) -> tuple[Problem, Layout]:
    """A validated problem; ShapeError, TypeError or ValueError with the argument, the expectation and the way out."""
    check_kinds(score, mask, positions, dropout)
    pipeline = as_pipeline(score)
    check_tensors(q, k, v)
    if not q.is_cpu:
        mask = numbers_on(mask, q.device)
    headed = q.dim() >= 4
    batch = batch_axes(q, k, v, headed)
    if not headed or not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        q, k, v = (_lift(t, batch, headed) for t in (q, k, v))
    heads, nq, nk = q.shape[-3], q.shape[-2], k.shape[-2]
    check_heads(q, k, v)
    if headed and positions is None:
        warn_of_swapped_axes(q, k, v, pipeline)
    similarity = pipeline.parts[0]
    assert isinstance(similarity, Similarity)
    complaint = similarity.widths(q.shape[-1], k.shape[-1])
    if complaint:
        raise ShapeError(f"{complaint}.")
    positional: Any = mask if mask.compares_positions() else None
    positional = pipeline if positional is None and pipeline.compares_positions() else positional
    frame = Frame(batch, heads, nq, nk, resolve_positions(positions, nq, nk, batch, positional, q.device), headed)
    complaint = pipeline.shape_error(frame) or mask.shape_error(frame)
    if complaint:
        raise ShapeError(complaint)
    problem = Problem(q, k, v, pipeline, mask, frame, None, q.dtype)
    for t in problem.tensors():
        if t.device != q.device:
            raise _on_another_device(problem, t)
    if similarity.prepares():
        q, k = similarity.prepare(q, k)
        problem = replace(problem, q=q, k=k)
    if dropout is not None and dropout.p > 0:  # a call that is refused draws no seed
        problem = replace(problem, dropout=dropout.seeded())
    return problem, Layout(headed, batch)


def _lift(t: Tensor, batch: tuple[int, ...], headed: bool) -> Tensor:
    if isinstance(t, Int8Rows):
        return t.lifted(batch, headed)
    if isinstance(t, Paged):
        return t if t.shape[:-3] == batch else t.shared_by(*batch)
    t = t if headed else t.unsqueeze(-3)
    return t.expand(*batch, *t.shape[-3:])


def _on_another_device(problem: Problem, t: Tensor) -> ValueError:
    name, value = ("mask", problem.mask)
    if any(t is own for own in problem.score_tensors):
        name, value = ("score", problem.score)
    return ValueError(
        f"{name} {value!r} holds a tensor on {t.device}, q is on {problem.q.device}; move it with .to(...)."
    )
