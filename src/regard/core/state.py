"""State: the softmax sums of queries over a set of keys, and their merge, on which the whole library is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.core.cotangents import linear_in
from regard.core.dtypes import widen
from regard.core.errors import ShapeError
from regard.core.shapes import broadcast_shape, listed
from regard.core.tracing import data_unavailable, finite
from regard.core.value import with_shapes
from regard.core.wrong_calls import kind_of


@dataclass(frozen=True, eq=False)
class RowStats:
    """What turns the scores of a row into weights: p_ij = exp(s_ij - m_i) / l_i, with l_i = Σ_j exp(s_ij - m_i).

    m is any finite reference near the row's largest score, l the sum relative to it, a sink included: (*batch, h, nq),
    float32 or float64; -inf and 0 for a row that sees nothing. The log-sum-exp m + ln l says the same in exact
    arithmetic, but where all scores of a row share a large offset its last digit is larger than ln l, so weights are
    never taken from it.
    """

    m: Tensor
    l: Tensor

    @staticmethod
    def of_lse(lse: Tensor) -> RowStats:
        """From a log-sum-exp, with the digits that it has."""
        empty = lse == -math.inf
        m = lse.detach()
        return RowStats(m, torch.exp(lse.masked_fill(empty, 0) - m.masked_fill(empty, 0)).masked_fill(empty, 0))

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp m + ln l; -inf for a row that sees nothing."""
        empty = self.empty
        return (self.m + self.l.masked_fill(empty, 1).log()).masked_fill(empty, -math.inf)

    @property
    def empty(self) -> Tensor:
        """True for the rows that see nothing."""
        return self.l == 0

    def rows(self, index: slice | Tensor) -> RowStats:
        """The statistics of some rows."""
        return RowStats(self.m[..., index], self.l[..., index])

    def weights(self, s: Tensor) -> Tensor:
        """The weights of scores s (*batch, h, nq, n), 0 where a score is -inf, also in a row that sees a NaN."""
        p = torch.exp(s - _finite_shift(self.m)[..., None]) / self.l.masked_fill(self.empty, 1)[..., None]
        return p if finite(self.l) else p.masked_fill(s == -math.inf, 0)

    @staticmethod
    def of_rows(s: Tensor, p: Tensor, sink: Tensor | None = None) -> RowStats | None:
        """The statistics of whole rows of scores s (*batch, h, nq, n), whose weights are written into p; p may be s.

        sink: logits (*batch, h), in the dtype of s. None, and nothing is written, if n is 0 or a row has NaN or +inf,
        for which `weights` says what is 0. Weights below 8 times the dtype's smallest normal number (float32: 1e-37)
        may become 0. Not differentiable.
        """
        if s.shape[-1] == 0:
            return None
        m = s.amax(-1) if sink is None else torch.maximum(s.amax(-1), sink[..., None])
        shift = _finite_shift(m)
        if not finite(shift):
            return None
        least = math.log(torch.finfo(s.dtype).tiny) + 1
        far = bool((s.amin(-1) - shift < least).any())
        torch.sub(s, shift[..., None], out=p)
        if far:  # exp is ten times slower where it underflows: what would be nearly subnormal is 0
            p.clamp_(min=least).exp_()
            torch.threshold_(p, math.exp(least + 1), 0)
        else:
            p.exp_()
        l = p.sum(-1)
        stats = RowStats(m, l if sink is None else l + torch.exp(sink[..., None] - shift))
        p.div_(stats.l.masked_fill(stats.empty, 1)[..., None])
        return stats

    def log_weights(self, s: Tensor) -> Tensor:
        """Their logarithms: the large numbers are subtracted first, which is exact where they are close."""
        log_p = (s - _finite_shift(self.m)[..., None]) - self.l.masked_fill(self.empty, 1).log()[..., None]
        return log_p if finite(self.l) else log_p.masked_fill(s == -math.inf, -math.inf)

    def weight_of(self, logit: Tensor) -> Tensor:
        """The weight of one logit (*batch, h, nq) in each row: 0 where that is -inf, and in a row that sees nothing."""
        p = torch.exp(logit - _finite_shift(self.m)) / self.l.masked_fill(self.empty, 1)
        return p.masked_fill(self.empty | (logit == -math.inf), 0)

    def sink_weights(self, sink: Tensor) -> Tensor:
        """The weight of a sink with logits (*batch, h) in every row: (*batch, h, nq)."""
        return self.weight_of(sink[..., None])


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

    def __repr__(self) -> str:
        return with_shapes("State", vars(self))

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

        `visible` (boolean, broadcastable to s) says which keys count; the others have no effect, whatever s and v hold
        there. `keep` (broadcastable to s) multiplies the terms of o, not of l: dropout.

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
        """The state of another kernel's result: out (..., dv) normalised, lse (...) its log-sum-exp.

        `base` is the base of its logarithm: e, or 2 (FlashInfer). A row with lse -inf is empty whatever `out` holds; so
        is a row with lse +inf and out 0, flash-attention's encoding of an empty row. (ATen's CPU flash operator returns
        lse 0.0 instead, which looks like a real lse: correct it before this call.) Gradients flow to both arguments.

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
        if not isinstance(other, State):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"| merges two States; one side is {kind_of(other)}: attention_state(q, k, v) makes a State."
            )
        if self.o.shape != other.o.shape:
            self._check_merges(other)
        m = torch.maximum(self.m, other.m)
        shift = _finite_shift(m)
        mine, theirs = torch.exp(self.m - shift), torch.exp(other.m - shift)
        return State(
            m,
            self.l * mine + other.l * theirs,
            self.o * mine[..., None] + other.o * theirs[..., None],
        )

    def _check_merges(self, other: State) -> None:
        """ShapeError unless one shape broadcasts to the other."""
        mine, theirs = self.o.shape, other.o.shape
        try:
            broadcast_shape(mine, theirs)
        except ShapeError:
            shapes = f"{listed(mine)} and {listed(theirs)}"
            raise ShapeError(
                f"| merges States of the same queries and other keys; their o have shapes {shapes}."
            ) from None

    def __add__(self, other: object) -> NoReturn:
        raise TypeError("States are merged by | alone: write a | b.")

    def finish(self) -> tuple[Tensor, Tensor]:
        """(out, lse): out = o / l and lse = m + ln l; for an empty row 0 and -inf, with gradients 0."""
        stats = self.stats
        out = self.o.masked_fill(stats.empty[..., None], 0) / self.l.masked_fill(stats.empty, 1)[..., None]
        return out, stats.lse

    @property
    def stats(self) -> RowStats:
        """m and l, which turn the scores of these keys into weights."""
        return RowStats(self.m, self.l)


def _finite_shift(m: Tensor) -> Tensor:
    # exp(-inf - -inf) is NaN; shifting empty rows by 0 keeps values and gradients zero
    return m.masked_fill(m == -math.inf, 0)


def weigh(p: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Σ_j p_ij v_j over the visible keys: p (..., r, c) with zeros where hidden, v (..., c, d).

    0 · NaN is NaN, so a product alone would let a hidden value through, and its backward a hidden cotangent.
    """
    if visible is None:
        return p @ v
    recorded = torch.is_grad_enabled() and (p.requires_grad or v.requires_grad)
    if not recorded or data_unavailable(p, v) or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return _weigh_visible(p, v, visible)
    return _WeighVisible.apply(p, v, visible.expand(p.shape))


def _weigh_visible(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Where v is not finite, its finite part is summed; what is not finite is added for the rows that may see it."""
    if finite(v):
        return p @ v
    out = p @ v.masked_fill(~v.isfinite(), 0)
    seen = visible.to(p.dtype).expand(p.shape)
    for what, found in ((math.nan, v.isnan()), (math.inf, v == math.inf), (-math.inf, v == -math.inf)):
        out = torch.where(seen @ found.to(p.dtype) > 0, out + what, out)
    return out


class _WeighVisible(torch.autograd.Function):
    """The same, differentiable: a cotangent that is not finite reaches only the values that its row may see."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        ctx.save_for_backward(p, v, visible)
        return _weigh_visible(p, v, visible)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        p, v, visible = ctx.saved_tensors
        need_p, need_v, _ = ctx.needs_input_grad

        def gradients(cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
            (g,) = cotangents
            g_p = (g @ v.mT).masked_fill(~visible, 0).sum_to_size(p.shape) if need_p else None
            return g_p, weigh(p.mT, g, visible.mT).sum_to_size(v.shape) if need_v else None

        return *linear_in((g,), gradients), None
