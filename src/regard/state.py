"""State: what is left of a set of keys for a query, and the one merge that the library rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.shapes import finite, listed, widen


@dataclass(frozen=True)
class State:
    """The mergeable triple (m, l, o) of the online softmax over a set of keys.

    For scores s_j and values v_j:  m ≥ max_j s_j (any finite reference),  l = Σ_j exp(s_j - m),
    o = Σ_j exp(s_j - m) v_j.  Then attention over those keys is o / l, and its log-sum-exp is m + ln l.
    States of disjoint key sets merge with `|`; merging is commutative and associative, and `State.empty` is neutral,
    in values and in gradients.

    m, l: (*shape), o: (*shape, dv), float32 or float64. m is a constant to autograd: the result does not depend on it.
    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867); Dao et al. 2022 (arXiv 2205.14135).

    >>> s, v = torch.tensor([[1.0, 2.0, 3.0]]), torch.eye(3)
    >>> whole = State.of(s, v)
    >>> parts = State.of(s[:, :1], v[:1]) | State.of(s[:, 1:], v[1:])
    >>> torch.allclose(whole.finish()[0], parts.finish()[0])
    True
    """

    m: Tensor
    l: Tensor
    o: Tensor

    @staticmethod
    def empty(
        shape: Sequence[int], dv: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> State:
        """No keys at all: (-inf, 0, 0). The identity of `|`.

        >>> State.empty((2,), 3).finish()[1]
        tensor([-inf, -inf])
        """
        m = torch.full(tuple(shape), -math.inf, dtype=dtype, device=device)
        return State(m, torch.zeros_like(m), m.new_zeros((*shape, dv)))

    @staticmethod
    def of(s: Tensor, v: Tensor, visible: Tensor | None = None, keep: Tensor | None = None) -> State:
        """The state of keys with scores s (..., nq, nk) and values v (..., nk, dv).

        `visible` (boolean, broadcastable to s) says which keys count; the others leave no trace, whatever s and v hold
        there. `keep` (broadcastable to s) multiplies what is summed into o, not l: dropout.

        >>> State.of(torch.zeros(1, 2), torch.tensor([[1.0], [3.0]])).finish()[0]
        tensor([[2.]])
        """
        s, v = widen(s), widen(v)
        if s.shape[-1] == 0:
            return State.empty(s.shape[:-1], v.shape[-1], dtype=s.dtype, device=s.device)
        if visible is not None:
            s = s.masked_fill(~visible, -math.inf)
        m = s.detach().amax(-1)
        p = torch.exp(s - _finite_shift(m)[..., None])
        return State(m, p.sum(-1), weigh(p if keep is None else p * keep, v, visible))

    @staticmethod
    def of_lse(out: Tensor, lse: Tensor, base: float = math.e) -> State:
        """The state behind another kernel's result: out (..., dv) normalised, lse (...) its log-sum-exp.

        `base` is the base of its logarithm: e, or 2 (FlashInfer). A row with lse -inf is empty whatever `out` holds; so
        is one with lse +inf and out 0, flash-attention's way to say so. (ATen's CPU flash operator says 0.0 instead,
        which cannot be told from a real lse: repair it where you call it.) Gradients flow to both arguments.

        >>> out, lse = torch.tensor([[4.0]]), torch.tensor([2.0])
        >>> (State.of_lse(out, lse) | State.of_lse(out, lse)).finish()[1] - 2.0  # twice the keys: ln 2 more
        tensor([0.6931])
        """
        if out.shape[:-1] != lse.shape:
            raise ShapeError(
                f"lse has shape {listed(lse.shape)}; out {listed(out.shape)} needs {listed(out.shape[:-1])}."
            )
        out, lse = widen(out), widen(lse) if base == math.e else widen(lse) * math.log(base)
        gone = (lse == -math.inf) | ((lse == math.inf) & (out == 0).all(-1))
        m = lse.detach().masked_fill(gone, -math.inf)
        l = torch.exp(lse.masked_fill(gone, -math.inf) - _finite_shift(m))
        return State(m, l, out.masked_fill(gone[..., None], 0) * l[..., None])

    @staticmethod
    def of_sink(logit: Tensor, dv: int) -> State:
        """The state of one key with a logit (...) and no value: a learned attention sink.

        >>> seen = State.of(torch.zeros(1, 1), torch.ones(1, 1))
        >>> (seen | State.of_sink(torch.zeros(1), 1)).finish()[0]   # half the mass goes nowhere
        tensor([[0.5000]])
        """
        logit = widen(logit)
        return State.of_lse(logit.new_zeros((*logit.shape, dv)), logit)

    def __or__(self, other: State) -> State:
        m = torch.maximum(self.m, other.m)
        shift = _finite_shift(m)
        mine, theirs = torch.exp(self.m - shift), torch.exp(other.m - shift)
        return State(
            m,
            self.l * mine + other.l * theirs,
            self.o * mine[..., None] + other.o * theirs[..., None],
        )

    def finish(self) -> tuple[Tensor, Tensor]:
        """(out, lse): out = o / l and lse = m + ln l; for an empty row 0 and -inf, with gradients 0."""
        empty = self.l == 0
        l = self.l.masked_fill(empty, 1)
        out = self.o.masked_fill(empty[..., None], 0) / l[..., None]
        return out, (self.m + l.log()).masked_fill(empty, -math.inf)


def _finite_shift(m: Tensor) -> Tensor:
    # exp(-inf - -inf) is NaN; shifting empty rows by 0 keeps values and gradients zero
    return m.masked_fill(m == -math.inf, 0)


def weigh(p: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Σ_j p_ij v_j over the visible keys: p (..., r, c) with zeros where hidden, v (..., c, d).

    0 · NaN is NaN, so a product alone would let a hidden value through. Where v is not finite, its finite part is
    summed and what is not finite is added for exactly the rows that may see it.
    """
    if visible is None or finite(v):
        return p @ v
    out = p @ v.masked_fill(~v.isfinite(), 0)
    seen = visible.to(p.dtype).expand(p.shape)
    for what, found in ((math.nan, v.isnan()), (math.inf, v == math.inf), (-math.inf, v == -math.inf)):
        out = torch.where(seen @ found.to(p.dtype) > 0, out + what, out)
    return out
