"""Similarities of a query and a key: Dot, ScaledDot, Bilinear, Cosine, Distance, Custom.

Where two tensors are shown with a head axis, they may also lack it and are then shared by all heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core.dtypes import widen
from regard.core.region import Frame, Region
from regard.core.shapes import broadcast_shape, listed, one_or, repeat_heads
from regard.core.tracing import data_unavailable
from regard.core.wrong_calls import answers_wrong_calls, check_parameters, kind_of
from regard.scores.algebra import Score, Similarity
from regard.scores.fields import by_head, drawn, number, parameter, parameters, shape_error_by_head
from regard.scores.finite import by_row


@dataclass(frozen=True)
class Dot(Similarity):
    """s_ij = q_i · k_j. Source: Luong et al. 2015 (arXiv 1508.04025).

    >>> import regard as rg
    >>> rg.attention_weights(torch.zeros(1, 2), torch.ones(4, 2), score=Dot())
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    formula: ClassVar[str] = "s_ij = q_i · k_j"
    head_axes: ClassVar[Mapping[str, int] | None] = {}

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return q @ k.mT

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return (cls(),)


@answers_wrong_calls(dict.fromkeys(("softmax_scale", "sm_scale", "scaling", "factor"), "write ScaledDot(scale)"))
@dataclass(frozen=True)
class ScaledDot(Similarity):
    """s_ij = scale · q_i · k_j, scale = 1 / sqrt(dk) by default; a learned scale is a tensor () or (heads,).

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.

    >>> q, k = torch.eye(4)[:1], 2 * torch.eye(4)
    >>> import regard as rg
    >>> rg.attention_weights(q, k, score=ScaledDot()).argmax()
    tensor(0)
    """

    formula: ClassVar[str] = "s_ij = scale · q_i · k_j, scale = 1 / sqrt(dk) by default"
    head_axes: ClassVar[Mapping[str, int] | None] = {"scale": -1}
    scale: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            object.__setattr__(self, "scale", number(self.scale, "ScaledDot.scale"))

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        scale = 1 / math.sqrt(max(q.shape[-1], 1)) if self.scale is None else self.scale
        return (q * by_head(scale, q)) @ k.mT

    def shape_error(self, frame: Frame) -> str | None:
        return None if self.scale is None else shape_error_by_head(self.scale, "ScaledDot.scale", frame.heads)

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(), cls(drawn(frame, frame.heads))


@answers_wrong_calls(
    dict.fromkeys(("w", "W", "weight", "matrix", "M"), "write m=W, of shape (dq, dk)"),
    "m is (dq, dk), or (heads, dq, dk); regard.nn.BilinearScore(dq, dk) learns it.",
)
@dataclass(frozen=True)
class Bilinear(Similarity):
    """s_ij = q_i^T M k_j, M (dq, dk) or (heads, dq, dk): queries and keys may differ in width.

    Source: Luong et al. 2015, "general"; d2l.ai §11.3.

    >>> import regard as rg
    >>> m = torch.ones(3, 2)
    >>> rg.attention_weights(torch.ones(1, 3), torch.eye(2), score=Bilinear(m))
    tensor([[0.5000, 0.5000]])
    """

    formula: ClassVar[str] = "s_ij = q_i^T M k_j"
    head_axes: ClassVar[Mapping[str, int] | None] = {"m": -3}
    m: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "m", parameter(self.m, "Bilinear.m"))

    def widths(self, dq: int, dk: int) -> str | None:
        fits = tuple(self.m.shape[-2:]) == (dq, dk)
        turned = f"; write m.{'T' if self.m.dim() == 2 else 'mT'}" if tuple(self.m.shape[-2:]) == (dk, dq) else ""
        return None if fits else f"Bilinear.m has shape {listed(self.m.shape)}; q and k need (..., {dq}, {dk}){turned}"

    def shape_error(self, frame: Frame) -> str | None:
        if self.m.dim() == 2 or (self.m.dim() == 3 and one_or(self.m.shape[0], frame.heads)):
            return None
        return f"Bilinear.m has shape {listed(self.m.shape)}; expected (dq, dk) or ({frame.heads}, dq, dk)."

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q = widen(q)
        return by_row(q, lambda x: x @ self.m.to(x.dtype)), k

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return q @ k.mT

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(drawn(frame, width, width)), cls(drawn(frame, frame.heads, width, width))


@answers_wrong_calls(
    {"dim": "leave it out: features are the last axis", "temperature": "write Cosine(scale=1 / temperature)"}
)
@dataclass(frozen=True)
class Cosine(Similarity):
    """s_ij = scale · cos(q_i, k_j); the cosine with a zero vector is 0. scale: a number, or a tensor () or (heads,).

    Source: Liu et al. 2022, Swin v2 (arXiv 2111.09883), where scale is learned and positive.

    >>> import regard as rg
    >>> rg.attention_weights(torch.tensor([[9.0, 0.0]]), torch.eye(2), score=Cosine(torch.tensor(3.0).log()))
    tensor([[0.7500, 0.2500]])
    """

    formula: ClassVar[str] = "s_ij = scale · cos(q_i, k_j)"
    head_axes: ClassVar[Mapping[str, int] | None] = {"scale": -1}
    scale: float | Tensor = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", number(self.scale, "Cosine.scale"))

    def shape_error(self, frame: Frame) -> str | None:
        return shape_error_by_head(self.scale, "Cosine.scale", frame.heads)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return by_row(widen(q), lambda x: _unit(x) * by_head(self.scale, x)), by_row(widen(k), _unit)

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return q @ k.mT

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(), cls(drawn(frame, frame.heads))


@dataclass(frozen=True)
class Distance(Similarity):
    """s_ij = -gamma · |q_i - k_j|²: weights are a Gaussian (RBF) kernel, 1 / (2 sigma²) = gamma.

    gamma: a number, or a tensor () or (heads,). Evaluated as gamma (2 q·k - |q|² - |k|²) about a centre c of the
    queries or keys, which keeps the digits that an offset of both would cost: a score is exact to a few units in the
    last place of gamma (|q - c|² + |k - c|²). Where that is beyond 4096, so that 12 bits of a near pair's score would
    be lost, distances are taken feature by feature. Source: Nadaraya 1964, Watson 1964; d2l.ai §11.2.

    >>> import regard as rg
    >>> q, k = torch.tensor([[1000.0]]), torch.tensor([[1000.0], [1001.0]])
    >>> rg.attention_weights(q, k, score=Distance(torch.tensor(3.0).log()))
    tensor([[0.7500, 0.2500]])
    """

    formula: ClassVar[str] = "s_ij = -gamma · |q_i - k_j|²"
    head_axes: ClassVar[Mapping[str, int] | None] = {"gamma": -1}
    gamma: float | Tensor = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", number(self.gamma, "Distance.gamma"))

    def shape_error(self, frame: Frame) -> str | None:
        return shape_error_by_head(self.gamma, "Distance.gamma", frame.heads)

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        gamma = by_head(self.gamma, q)
        # no square overflows: 0 · inf is NaN, so a hidden one would spoil the gradient of gamma
        most = math.sqrt(torch.finfo(q.dtype).max / (8 * max(q.shape[-1], 1)))
        q, k = q.clamp(-most, most), k.clamp(-most, most)
        centre = _centre(q)
        s = -gamma * _squares(q - centre, k - centre)
        far = _far(gamma, q - centre)
        if not data_unavailable(q) and not bool(far.any()):
            return s
        # most of the tile may be padding, and its centre there: the rest gets a centre of its own
        centre = _centre(q.masked_fill(~far, math.nan))
        s = torch.where(far, -gamma * _squares(q - centre, k - centre), s)
        far = far & _far(gamma, q - centre)
        if data_unavailable(q) or not bool(far.any()):
            return s
        return torch.where(far, -gamma * _differences(q, k), s)  # no centre is near: the queries are spread widely

    def as_dot(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows (*batch, h, nq, d + 2), (*batch, hk, nk, d + 2) whose dot products are the scores; float32 or float64.

        They are relative to one centre for the call. None if rows may be so far from it that digits would be lost.
        """
        if data_unavailable(q, k) or 0 in (*q.shape, *k.shape):
            return None
        q, k = widen(q), widen(k)
        centre, gamma = _centre(k), by_head(self.gamma, q)
        q, k = q - repeat_heads(centre, q.shape[-3]), k - centre
        q_square, k_square = ((x * x).sum(-1, keepdim=True) for x in (q, k))
        if not all(bool((gamma * s).abs().amax() <= _FAR) for s in (q_square, repeat_heads(k_square, q.shape[-3]))):
            return None
        ones = torch.ones_like(q_square)
        return gamma * torch.cat([2 * q, -ones, -q_square], -1), torch.cat([k, k_square, torch.ones_like(k_square)], -1)

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(), cls(drawn(frame, frame.heads).abs())


@dataclass(frozen=True)
class Custom(Similarity):
    """s_ij = fn(q, k, *tensors): any similarity that you define.

    fn gets a tile of queries (*batch, h, r, dq), of keys (*batch, h, c, dk) and the tensors whole, and returns (*batch,
    h, r, c), by differentiable operations that treat every pair alike. It is called once per tile, forward and
    backward. Every tensor that needs a gradient must be in `tensors`; a fn that uses another such tensor raises an
    error. `footprint`: how many numbers fn holds for each pair; the more, the smaller the tiles. If fn reads q and k
    only in q @ k.mT, it runs on the native kernels, which trace it on stand-ins for q and k; both may first be gated
    (q * w), projected (q @ w) or changed by elementwise functions, a row by itself.

    >>> import regard as rg
    >>> manhattan = Custom(lambda q, k: -torch.cdist(q, k, p=1))
    >>> rg.attention_weights(torch.zeros(1, 2), torch.ones(2, 2), score=manhattan)
    tensor([[0.5000, 0.5000]])
    """

    formula: ClassVar[str] = "s_ij = fn(q, k, *tensors)"
    head_axes: ClassVar[Mapping[str, int] | None] = {}
    fn: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] = ()
    size: int = 1

    @answers_wrong_calls(
        {"inputs": "write tensors=", "score_mod": "call regard.compat.torch.flex_attention, which takes it"}
    )
    def __init__(self, fn: Callable[..., Tensor], tensors: tuple[Any, ...] = (), *, footprint: int = 1) -> None:
        if not callable(fn):
            raise TypeError(f"Custom.fn is {kind_of(fn)}; expected a function of q and k, which gives their scores.")
        for name, value in (
            ("fn", fn),
            ("inputs", parameters(tensors, "Custom.tensors")),
            ("size", footprint),
        ):
            object.__setattr__(self, name, value)

    @property
    def footprint(self) -> int:
        return self.size

    def widths(self, dq: int, dk: int) -> str | None:
        return None

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        try:
            s = self.fn(q, k, *self.inputs)
        except TypeError:
            names = ("q", "k", *("tensor" for _ in self.inputs))
            check_parameters(self.fn, "Custom.fn", names, "Custom(lambda q, k: q @ k.mT)")
            raise
        expected = (*broadcast_shape(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
        if not isinstance(s, Tensor) or tuple(s.shape) != expected:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = listed(s.shape) if isinstance(s, Tensor) else type(s).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Custom.fn returned {got} for q {listed(q.shape)} and k {listed(k.shape)}; expected {expected}."
            )
        return s

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return (
            cls(lambda q, k, w: (q * w).sin() @ k.mT - (k * w).sum(-1)[..., None, :], tensors=(drawn(frame, width),)),
        )


def _unit(x: Tensor) -> Tensor:
    """x over its length; where that is 0, 0 with gradient 0."""
    if x.shape[-1] == 0:
        return x
    # the direction does not depend on this scale, so it is a constant; squares then neither overflow nor vanish
    scale = x.detach().abs().amax(-1, keepdim=True)
    zero = scale == 0
    x = x / scale.masked_fill(zero, 1)
    # contiguous: along strided features torch sums in an order that depends on how many rows there are
    square = (x * x).contiguous().sum(-1, keepdim=True)
    return x.masked_fill(zero, 0) * square.masked_fill(zero, 1).rsqrt()


# In units of the score: farther from the centre, rounding costs more than 12 bits of it.
_FAR = 2.0**12


def _centre(q: Tensor) -> Tensor:
    """The median of the rows, a constant: what stands in less than half of them does not move it."""
    if 0 in q.shape:
        return q.new_zeros(())
    rows = q.detach().contiguous()  # of an expanded tensor, torch 2.13 takes numbers from elsewhere
    # torch has no median on a GPU that torch.use_deterministic_algorithms allows
    median = _sorted_median(rows) if rows.is_cuda else rows.nanmedian(-2, keepdim=True).values
    return median.nan_to_num()


def _sorted_median(rows: Tensor) -> Tensor:
    """The median of the rows that are not NaN, which comes behind all numbers."""
    last = (~rows.isnan()).sum(-2, keepdim=True) - 1
    return rows.sort(dim=-2, stable=True).values.gather(-2, last.clamp(min=0) // 2)


def _far(gamma: float | Tensor, q: Tensor) -> Tensor:
    """Which rows lie so far from 0 that `_squares` loses digits of the score, (..., r, 1)."""
    return (gamma * q.square().sum(-1, keepdim=True)).detach().abs() > _FAR


def _differences(q: Tensor, k: Tensor) -> Tensor:
    """|q_i - k_j|² feature by feature: slower than a product, but nothing cancels."""
    total = q.new_zeros((*broadcast_shape(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2]))
    for x, y in zip(q.unbind(-1), k.unbind(-1), strict=True):
        total = total + (x[..., :, None] - y[..., None, :]).square()
    return total


def _squares(q: Tensor, k: Tensor) -> Tensor:
    """|q_i - k_j|² of rows that lie near 0."""
    return (q * q).sum(-1)[..., :, None] - 2 * (q @ k.mT) + (k * k).sum(-1)[..., None, :]
