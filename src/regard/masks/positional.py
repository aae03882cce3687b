"""Masks over absolute positions: Causal, Window, Prefix, Dilated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.core.arrays import as_int64, plain_tensor
from regard.core.region import Frame, Region, Tiling
from regard.core.shapes import FARTHEST, broadcast_shape, listed
from regard.core.tracing import data_unavailable
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.masks.algebra import Cover, Mask, cover_of
from regard.masks.intervals import Interval, IntervalRule
from regard.masks.picture import Extent


def _check_near(mask: str, name: str, n: int) -> None:
    """ValueError for a number so large that a position plus it may be no int64."""
    if not -FARTHEST <= n <= FARTHEST:
        raise ValueError(f"{mask}({name}={n}): expected a number from -2^62 to 2^62.")


def _interval(
    frame: Frame, least: Tensor | None = None, largest: Tensor | None = None, end: Tensor | None = None
) -> Interval | None:
    """Keys whose position p satisfies least ≤ p ≤ largest, or p < end, one bound a query (None: none), as indices."""
    if not frame.keys_sorted:
        return None
    q = frame.positions.q
    start = torch.zeros_like(q) if least is None else _below(frame, least)
    if largest is not None:
        stop = _up_to(frame, largest)
    else:
        stop = torch.full_like(q, frame.nk) if end is None else _below(frame, end)
    if start.shape != stop.shape:
        start, stop = torch.broadcast_tensors(start, stop)
    return Interval(start[..., None, :], torch.maximum(start, stop)[..., None, :])


def _below(frame: Frame, bound: Tensor) -> Tensor:
    """How many keys stand below each bound (..., nq), one a query."""
    k = frame.positions.k
    if frame.positions.consecutive and frame.nk:
        return bound.clamp(k[0], k[-1]) - k[0] + (bound > k[-1])  # no difference that is no int64
    return torch.searchsorted(*_alike(k, bound))


def _up_to(frame: Frame, bound: Tensor) -> Tensor:
    """How many keys stand at each bound or below."""
    k = frame.positions.k
    if frame.positions.consecutive and frame.nk:
        return bound.clamp(k[0], k[-1]) - k[0] + (bound >= k[0])
    return torch.searchsorted(*_alike(k, bound), right=True)


def _alike(k: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    lead = broadcast_shape(k.shape[:-1], bound.shape[:-1])
    return k.expand(*lead, k.shape[-1]).contiguous(), bound.expand(*lead, bound.shape[-1]).contiguous()


@answers_wrong_calls(
    dict.fromkeys(("offset", "diagonal"), "leave it out"),
    "It compares positions: where the numbers of queries and keys differ, pass positions=tail(nq, nk) beside it.",
)
@dataclass(frozen=True)
class Causal(Mask):
    """Keys at or before the query: position of the key ≤ position of the query.

    By absolute positions, so it is right with a cache: pass positions=tail(nq, nk) when the queries are the last.

    >>> Causal().draw(4)
    ■···
    ■■··
    ■■■·
    ■■■■
    """

    indexed: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    states_pattern: ClassVar[bool] = True

    def visible(self, at: Region) -> Tensor:
        return at.j <= at.i

    def cover(self, at: Tiling) -> Tensor:
        (i_least, i_largest), (j_least, j_largest) = at.i, at.j
        return cover_of(none=j_least > i_largest, all_=j_largest <= i_least)

    def rows(self, frame: Frame) -> Interval | None:
        return _interval(frame, largest=frame.positions.q)

    def rule(self) -> IntervalRule:
        return IntervalRule(after=0)

    def starts_at_first_key(self) -> bool:
        return True

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        return (cls(),)


_WIDTH = "a sliding window of w keys, the query's own included, is Window(before=w - 1, after=0)"


@answers_wrong_calls(
    {
        **dict.fromkeys(("size", "window", "width", "w", "sliding_window"), _WIDTH),
        "window_size": f"of flash-attention's (left, right), Window(before=left, after=right); {_WIDTH}",
        "left": "write before=left",
        "right": "write after=right",
    },
    f"None is unbounded; {_WIDTH}, and w keys on either side are Window(before=w, after=w).",
)
@dataclass(frozen=True)
class Window(Mask):
    """Keys at most `before` positions behind and `after` positions ahead of the query; None, or more than 2^62, is
    unbounded.

    A "sliding window of w" (Mistral) is Window(before=w - 1, after=0): w keys, the query's own included.
    Raises ValueError for a negative bound.

    >>> Window(before=2, after=0).draw(5)
    ■····
    ■■···
    ■■■··
    ·■■■·
    ··■■■
    """

    indexed: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    states_pattern: ClassVar[bool] = True

    before: int | None
    after: int | None

    def __post_init__(self) -> None:
        for name, bound in (("before", self.before), ("after", self.after)):
            if bound is not None and not isinstance(bound, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"Window.{name} is {kind_of(bound)}; expected an integer, or None (unbounded).")
            if bound is not None and bound < 0:
                raise ValueError(
                    f"Window({name}={bound}): expected a count of keys besides the query's own, or None (unbounded)."
                )
            if bound is not None and bound > FARTHEST:  # a position plus it may be no int64
                object.__setattr__(self, name, None)

    def visible(self, at: Region) -> Tensor:
        i, j = at.i, at.j
        near = torch.ones_like(i >= j) if self.before is None else j >= i - self.before
        return near if self.after is None else near & (j <= i + self.after)

    def cover(self, at: Tiling) -> Tensor:
        (i_least, i_largest), (j_least, j_largest) = at.i, at.j
        none, all_ = torch.zeros_like(i_least > j_least), torch.ones_like(i_least > j_least)
        if self.before is not None:
            none, all_ = none | (j_largest < i_least - self.before), all_ & (j_least >= i_largest - self.before)
        if self.after is not None:
            none, all_ = none | (j_least > i_largest + self.after), all_ & (j_largest <= i_least + self.after)
        return cover_of(none=none, all_=all_)

    def rows(self, frame: Frame) -> Interval | None:
        q = frame.positions.q
        return _interval(
            frame,
            None if self.before is None else q - self.before,
            None if self.after is None else q + self.after,
        )

    def rule(self) -> IntervalRule:
        return IntervalRule(before=self.before, after=self.after)

    def starts_at_first_key(self) -> bool:
        return self.before is None

    def extent(self) -> Extent:
        return Extent(tokens=2 * ((self.before or 0) + (self.after or 0) + 1))

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        return cls(before=3, after=0), cls(before=None, after=2)


@answers_wrong_calls(
    dict.fromkeys(("prefix_length", "length", "prefix", "size"), "write Prefix(n)"),
    "With Prefix(4) every query sees the first 4 positions.",
)
@dataclass(frozen=True)
class Prefix(Mask):
    """Keys among the first n positions: position of the key < n. n may be an integer tensor (*batch).

    Causal() | Prefix(n) is the prefix language model; Causal() & (Window(w, 0) | Prefix(4)) keeps attention sinks.

    >>> Prefix(2).draw(3)
    ■■·
    ■■·
    ■■·
    """

    indexed: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    states_pattern: ClassVar[bool] = True

    n: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.n, int):
            _check_near("Prefix", "n", self.n)
        else:
            if isinstance(self.n, float):
                raise TypeError(f"Prefix.n is {self.n}, a float; expected an integer, or an integer tensor (*batch).")
            n = plain_tensor(self.n, "Prefix.n")
            if n.dtype.is_floating_point or n.dtype == torch.bool:
                raise TypeError(f"Prefix.n has dtype {n.dtype}; expected an integer, or an integer tensor (*batch).")
            object.__setattr__(self, "n", as_int64(n, "Prefix.n"))

    def visible(self, at: Region) -> Tensor:
        return at.j < (at.sequences(self.n) if isinstance(self.n, Tensor) else self.n)

    def cover(self, at: Tiling) -> Tensor:
        n = at.sequences(self.n) if isinstance(self.n, Tensor) else self.n
        j_least, j_largest = at.j
        return cover_of(none=j_least >= n, all_=j_largest < n)

    def rows(self, frame: Frame) -> Interval | None:
        q = frame.positions.q
        n = self.n[..., None] if isinstance(self.n, Tensor) else torch.full_like(q, self.n)
        return _interval(frame, end=n.expand(*broadcast_shape(n.shape, q.shape)))

    def starts_at_first_key(self) -> bool:
        return True

    def shape_error(self, frame: Frame) -> str | None:
        if isinstance(self.n, Tensor) and self.n.dim() and tuple(self.n.shape) != frame.batch:
            return f"Prefix.n has shape {listed(self.n.shape)}; expected the batch axes {frame.batch}."
        return None

    def batch(self) -> tuple[int, ...]:
        return tuple(self.n.shape) if isinstance(self.n, Tensor) else ()

    def extent(self) -> Extent:
        if isinstance(self.n, int):
            return Extent(tokens=2 * self.n)
        return Extent(tokens=2 * int(self.n.amax()) if self.n.numel() and not data_unavailable(self.n) else 0)

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        count = math.prod(frame.batch)
        return cls(3), cls(
            (torch.arange(count, device=frame.device, dtype=torch.int64) * 5 % (frame.nk + 1)).reshape(frame.batch)
        )


@answers_wrong_calls(
    dict.fromkeys(("dilation", "rate", "stride"), "write Dilated(step)"),
    "With Dilated(2) a query sees every second key, itself included.",
)
@dataclass(frozen=True)
class Dilated(Mask):
    """Keys whose distance from the query is a multiple of `step`: (i - j) mod step = 0.

    A dilated window of w keys is Window(before=(w - 1) * step, after=0) & Dilated(step). Raises ValueError for step <
    1. Source: Beltagy et al. 2020, Longformer (arXiv 2004.05150).

    >>> Dilated(2).draw(4)
    ■·■·
    ·■·■
    ■·■·
    ·■·■
    """

    indexed: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    states_pattern: ClassVar[bool] = True

    step: int

    def __post_init__(self) -> None:
        if not isinstance(self.step, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Dilated.step is {kind_of(self.step)}; expected an integer.")
        if self.step < 1:
            raise ValueError(f"Dilated(step={self.step}): expected a step of 1 or more.")
        _check_near("Dilated", "step", self.step)

    def visible(self, at: Region) -> Tensor:
        return (at.i - at.j) % self.step == 0

    def cover(self, at: Tiling) -> Tensor:
        whole = Cover.ALL if self.step == 1 else Cover.SOME
        return torch.full((1, 1), whole, dtype=torch.int8, device=at.frame.device)

    def rows(self, frame: Frame) -> Interval | None:
        return _interval(frame) if self.step == 1 else None

    def extent(self) -> Extent:
        return Extent(tokens=2 * self.step)

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        return (cls(3),)
