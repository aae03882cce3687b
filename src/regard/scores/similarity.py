"""Similarities of a query and a key: Dot, ScaledDot, Bilinear, Additive, Cosine, Distance, Custom.

Where two tensors are shown with a head axis, they may also lack it and are then shared by all heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.region import Frame, Region
from regard.scores.algebra import Pull, Score, Similarity, by_head, misfit_by_head, number, parameter
from regard.shapes import branchless, finite, listed, widen

# exp(±2 · 30) and their products stay within float32, but for those whose tanh is ±1
EXPONENT = 30.0


@dataclass(frozen=True)
class Dot(Similarity):
    """s_ij = q_i · k_j. Source: Luong et al. 2015 (arXiv 1508.04025).

    >>> import regard as rg
    >>> rg.attention_weights(torch.zeros(1, 2), torch.ones(4, 2), score=Dot())
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return q @ k.mT

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return (cls(),)


@dataclass(frozen=True)
class ScaledDot(Similarity):
    """s_ij = scale · q_i · k_j, scale = 1 / sqrt(dk) by default; a learned scale is a tensor () or (heads,).

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.

    >>> q, k = torch.eye(4)[:1], 2 * torch.eye(4)
    >>> import regard as rg
    >>> rg.attention_weights(q, k, score=ScaledDot()).argmax()
    tensor(0)
    """

    scale: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            object.__setattr__(self, "scale", number(self.scale, "ScaledDot.scale"))

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        scale = 1 / math.sqrt(max(q.shape[-1], 1)) if self.scale is None else self.scale
        return (q * by_head(scale, q)) @ k.mT

    def misfit(self, frame: Frame) -> str | None:
        return None if self.scale is None else misfit_by_head(self.scale, "ScaledDot.scale", frame.heads)

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(), cls(_draw(frame, frame.heads))


@dataclass(frozen=True)
class Bilinear(Similarity):
    """s_ij = q_i^T M k_j, M (dq, dk) or (heads, dq, dk): queries and keys may differ in width.

    Source: Luong et al. 2015, "general"; d2l.ai §11.3.

    >>> import regard as rg
    >>> m = torch.ones(3, 2)
    >>> rg.attention_weights(torch.ones(1, 3), torch.eye(2), score=Bilinear(m))
    tensor([[0.5000, 0.5000]])
    """

    m: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "m", parameter(self.m, "Bilinear.m"))

    def widths(self, dq: int, dk: int) -> str | None:
        fits = tuple(self.m.shape[-2:]) == (dq, dk)
        return None if fits else f"Bilinear.m has shape {listed(self.m.shape)}; q and k need (..., {dq}, {dk})"

    def misfit(self, frame: Frame) -> str | None:
        if self.m.dim() == 2 or (self.m.dim() == 3 and self.m.shape[0] in (1, frame.heads)):
            return None
        return f"Bilinear.m has shape {listed(self.m.shape)}; expected (dq, dk) or ({frame.heads}, dq, dk)."

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q = widen(q)
        return _by_row(q, lambda x: x @ self.m.to(x.dtype)), k

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return q @ k.mT

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(_draw(frame, width, width)), cls(_draw(frame, frame.heads, width, width))


@dataclass(frozen=True)
class Additive(Similarity):
    """s_ij = w · tanh(q_i w_q + k_j w_k + b): a perceptron with one hidden layer of width h.

    w_q (dq, h) or (heads, dq, h), w_k (dk, h) or (key heads, dk, h), w and b (h,) or (heads, h).
    w_q or w_k None: that side is projected already. Memory is linear in the sequence; no (nq, nk, h) is made.
    Source: Bahdanau et al. 2014 (arXiv 1409.0473); d2l.ai §11.3, whose W_q is the transpose of w_q.

    >>> import regard as rg
    >>> score = Additive(torch.ones(3, 5), torch.ones(2, 5), torch.ones(5))
    >>> rg.attention_weights(torch.ones(1, 3), torch.zeros(2, 2), score=score)
    tensor([[0.5000, 0.5000]])
    """

    w_q: Tensor | None
    w_k: Tensor | None
    w: Tensor
    b: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("w_q", "w_k", "w", "b"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parameter(getattr(self, name), f"Additive.{name}"))

    @property
    def footprint(self) -> int:
        return self.w.shape[-1]

    def widths(self, dq: int, dk: int) -> str | None:
        if 0 in (self.w.dim(), 1 if self.b is None else self.b.dim()):
            return "Additive.w or b has no axes; expected (h,) or (heads, h)"
        hidden = self.w.shape[-1]
        for name, side, weight, width in (("w_q", "q", self.w_q, dq), ("w_k", "k", self.w_k, dk)):
            if weight is None and width != hidden:
                return f"{side} has width {width}; with {name} None it must be projected to w's {hidden} already"
            if weight is not None and (weight.dim() > 3 or tuple(weight.shape[-2:]) != (width, hidden)):
                return f"Additive.{name} has shape {listed(weight.shape)}; expected (..., {width}, {hidden})"
        if self.b is not None and self.b.shape[-1] != hidden:
            return f"Additive.b has shape {listed(self.b.shape)}; expected (..., {hidden}), as w"
        return None

    def misfit(self, frame: Frame) -> str | None:
        for name, t, core in (("w_q", self.w_q, 2), ("w", self.w, 1), ("b", self.b, 1)):
            if t is not None and t.dim() != core and (t.dim() != core + 1 or t.shape[0] not in (1, frame.heads)):
                return f"Additive.{name} has shape {listed(t.shape)}; expected {core} axes, or heads before them."
        return None

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = widen(q), widen(k)
        if self.w_k is not None and self.w_k.dim() > 2 and self.w_k.shape[0] not in (1, k.shape[-3]):
            raise ShapeError(f"Additive.w_k has shape {listed(self.w_k.shape)}; k has {k.shape[-3]} heads.")
        q = _projected(q, self.w_q)
        k = _projected(k, self.w_k)
        return q if self.b is None else q + self.b.to(q.dtype).unsqueeze(-2), k

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        hidden = torch.tanh(q[..., :, None, :] + k[..., None, :, :])
        return (hidden @ self.w.to(q.dtype)[..., None, :, None]).squeeze(-1)

    def quick(self, q: Tensor, k: Tensor, at: Region) -> tuple[Tensor, Pull] | None:
        hidden = _tanh_of_sums(q, k)
        if hidden is None:
            return None
        flat = hidden.flatten(-2)
        # with a head axis: torch would fold the many pairs under a w of one axis, which copies them
        w = self.w.to(q.dtype).expand(q.shape[-3], -1)
        s = (w[:, None, :] @ flat).squeeze(-2).unflatten(-1, hidden.shape[-2:])

        def pull(g: Tensor) -> tuple[Tensor | None, ...]:
            g_w = (g.flatten(-2)[..., None, :] @ flat.mT).squeeze(-2).sum_to_size(self.w.shape)
            slope = hidden.square_().neg_().add_(1).mul_(g[..., None, :, :])
            g_q, g_k = ((slope.sum(axis) * w[..., None]).mT for axis in (-1, -2))
            return g_q, g_k, *(g_w if t is self.w else None for t in self.tensors())

        return s, pull

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        hidden, heads = width + 2, frame.heads
        one = cls(_draw(frame, width, hidden), _draw(frame, width, hidden), _draw(frame, hidden), _draw(frame, hidden))
        each = cls(_draw(frame, heads, width, width), None, _draw(frame, heads, width), _draw(frame, heads, width))
        return one, each, cls(None, None, _draw(frame, width))


@dataclass(frozen=True)
class Cosine(Similarity):
    """s_ij = scale · cos(q_i, k_j); the cosine with a zero vector is 0. scale: a number, or a tensor () or (heads,).

    Source: Liu et al. 2022, Swin v2 (arXiv 2111.09883), where scale is learned and positive.

    >>> import regard as rg
    >>> rg.attention_weights(torch.tensor([[9.0, 0.0]]), torch.eye(2), score=Cosine(torch.tensor(3.0).log()))
    tensor([[0.7500, 0.2500]])
    """

    scale: float | Tensor = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", number(self.scale, "Cosine.scale"))

    def misfit(self, frame: Frame) -> str | None:
        return misfit_by_head(self.scale, "Cosine.scale", frame.heads)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return _by_row(widen(q), lambda x: _unit(x) * by_head(self.scale, x)), _by_row(widen(k), _unit)

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return q @ k.mT

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(), cls(_draw(frame, frame.heads))


@dataclass(frozen=True)
class Distance(Similarity):
    """s_ij = -gamma · |q_i - k_j|²: weights are a Gaussian (RBF) kernel, 1 / (2 sigma²) = gamma.

    gamma: a number, or a tensor () or (heads,). Evaluated about a centre of the tile's queries, which is exact and
    keeps the
    digits that |q|² - 2 q·k + |k|² loses when both share an offset. Source: Nadaraya 1964, Watson 1964; d2l.ai §11.2.

    >>> import regard as rg
    >>> q, k = torch.tensor([[1000.0]]), torch.tensor([[1000.0], [1001.0]])
    >>> rg.attention_weights(q, k, score=Distance(torch.tensor(3.0).log()))
    tensor([[0.7500, 0.2500]])
    """

    gamma: float | Tensor = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", number(self.gamma, "Distance.gamma"))

    def misfit(self, frame: Frame) -> str | None:
        return misfit_by_head(self.gamma, "Distance.gamma", frame.heads)

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        gamma = by_head(self.gamma, q)
        # no square overflows: 0 · inf is NaN, so a hidden one would spoil the gradient of gamma
        most = math.sqrt(torch.finfo(q.dtype).max / (8 * max(q.shape[-1], 1)))
        q, k = q.clamp(-most, most), k.clamp(-most, most)
        centre = _centre(q)
        s = -gamma * _squares(q - centre, k - centre)
        far = (gamma * (q - centre).square().sum(-1, keepdim=True)).detach().abs() > _FAR
        if not branchless(q) and not bool(far.any()):
            return s
        # most of the tile may be padding, and its centre there: the rest gets a centre of its own
        centre = _centre(q.masked_fill(~far, math.nan))
        return torch.where(far, -gamma * _squares(q - centre, k - centre), s)

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(), cls(_draw(frame, frame.heads).abs())


@dataclass(frozen=True)
class Custom(Similarity):
    """s_ij = fn(q, k, *tensors): any similarity of one's own.

    fn gets a tile of queries (*batch, h, r, dq), of keys (*batch, h, c, dk) and the tensors whole, and returns
    (*batch, h, r, c), by differentiable operations that treat every pair alike. It is called once a tile, forward and
    backward. Whatever needs a gradient must be in `tensors`; a fn that hides such a tensor is refused.
    `footprint`: numbers that fn holds for each pair, so that tiles shrink accordingly.

    >>> import regard as rg
    >>> manhattan = Custom(lambda q, k: -torch.cdist(q, k, p=1))
    >>> rg.attention_weights(torch.zeros(1, 2), torch.ones(2, 2), score=manhattan)
    tensor([[0.5000, 0.5000]])
    """

    fn: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] = ()
    size: int = 1

    def __init__(self, fn: Callable[..., Tensor], tensors: tuple[Any, ...] = (), *, footprint: int = 1) -> None:
        for name, value in (
            ("fn", fn),
            ("inputs", tuple(parameter(t, "Custom.tensors") for t in tensors)),
            ("size", footprint),
        ):
            object.__setattr__(self, name, value)

    @property
    def footprint(self) -> int:
        return self.size

    def widths(self, dq: int, dk: int) -> str | None:
        return None

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        s = self.fn(q, k, *self.inputs)
        expected = (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
        if not isinstance(s, Tensor) or tuple(s.shape) != expected:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = listed(s.shape) if isinstance(s, Tensor) else type(s).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Custom.fn returned {got} for q {listed(q.shape)} and k {listed(k.shape)}; expected {expected}."
            )
        return s

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return (
            cls(lambda q, k, w: (q * w).sin() @ k.mT - (k * w).sum(-1)[..., None, :], tensors=(_draw(frame, width),)),
        )


def _tanh_of_sums(q: Tensor, k: Tensor) -> Tensor | None:
    """tanh(q_i + k_j), features first: (*batch, h, f, r, c) of q (..., r, f), k (..., c, f). None if not finite."""
    # contiguous, or the pairs would be laid out in the order of q's strides
    q, k = q.mT.contiguous()[..., None], k.mT.contiguous()[..., None, :]
    largest = [float(t.abs().amax()) for t in (q, k) if t.numel()]
    if not all(size < math.inf for size in largest):  # NaN is not less either
        return None
    if any(size > EXPONENT for size in largest):
        return (q + k).tanh_()
    # tanh x = 1 - 2 / (exp 2x + 1), and exp(2q + 2k) is a product: no exponential a pair
    return ((2 * q).exp() * (2 * k).exp()).add_(1).reciprocal_().mul_(-2).add_(1)


def _draw(frame: Frame, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device=frame.device)


def _by_row(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """fn(x), where each row of the answer comes from that row of x alone; a row that is not finite passes no gradient.

    0 · NaN is NaN: the zero gradient of a padded token would leak, multiplied by what stands there.
    """
    if finite(x):
        return fn(x)
    fine = x.isfinite().all(-1, keepdim=True)
    return torch.where(fine, fn(x.masked_fill(~fine, 0)), fn(x.detach()).detach())


def _projected(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else _by_row(x, lambda row: row @ weight.to(row.dtype))


def _unit(x: Tensor) -> Tensor:
    """x over its length; where that is 0, 0 with gradient 0."""
    if x.shape[-1] == 0:
        return x
    # the direction does not depend on this scale, so it is a constant; squares then neither overflow nor vanish
    scale = x.detach().abs().amax(-1, keepdim=True)
    zero = scale == 0
    x = x / scale.masked_fill(zero, 1)
    return x.masked_fill(zero, 0) * (x * x).sum(-1, keepdim=True).masked_fill(zero, 1).rsqrt()


# In units of the score: farther from the centre, rounding costs more than 12 bits of it.
_FAR = 2.0**12


def _centre(q: Tensor) -> Tensor:
    """The median of the rows, a constant: what stands in less than half of them does not move it."""
    if 0 in q.shape:
        return q.new_zeros(())
    return q.detach().nanmedian(-2, keepdim=True).values.nan_to_num()


def _squares(q: Tensor, k: Tensor) -> Tensor:
    """|q_i - k_j|² of rows that lie near 0."""
    return (q * q).sum(-1)[..., :, None] - 2 * (q @ k.mT) + (k * k).sum(-1)[..., None, :]
