"""Mask, Cover, and the operations of the algebra: & | ~ and Everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

import regard.core.html as html
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.region import Frame, Region, Tiling
from regard.core.shapes import blocks, broadcast_shape, broadcasts, listed
from regard.core.tracing import data_unavailable
from regard.core.value import Value
from regard.core.wrong_calls import kind_of
from regard.masks.intervals import Interval, IntervalRule
from regard.masks.picture import Extent, picture
from regard.masks.ways import way_to_mask


class Cover(IntEnum):
    """How many pairs of a tile are visible. `&` is min, `|` is max, `~` swaps the ends; SOME is always correct.

    >>> min(Cover.ALL, Cover.SOME), max(Cover.NONE, Cover.SOME)
    (<Cover.SOME: 1>, <Cover.SOME: 1>)
    """

    NONE = 0
    SOME = 1
    ALL = 2


@dataclass(frozen=True)
class Mask(Value):
    """Which keys a query may see. A value: it compares, hashes, prints, and combines by & | ~.

    To write your own, subclass as a frozen dataclass and define `visible`; add `cover` so that tiles can be skipped and
    `rows` if each query sees one interval of keys. Set `positional = False` if it reads indices (at.row, at.col) alone,
    `indexed = False` if it reads positions (at.i, at.j) alone, `per_head = False` if it sees the same in all heads. A
    subclass of another mask that defines `visible` anew inherits these, but no `cover` and no `rows`.

    >>> from regard.masks.positional import Causal, Prefix
    >>> (Causal() | Prefix(2)).draw(4)
    ■■··
    ■■··
    ■■■·
    ■■■■
    """

    argument: ClassVar[str] = "mask"
    _follow: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "visible": ("of_pair", "cover", "rows", "rule", "starts_at_first_key")
    }
    positional: ClassVar[bool] = True
    per_token: ClassVar[bool] = False  # whether the last axis of its tensors is one number a query, or a key
    indexed: ClassVar[bool] = True  # whether it reads indices of queries or keys, not their positions alone
    per_head: ClassVar[bool] = True  # whether what it sees may differ between heads
    states_pattern: ClassVar[bool] = False  # whether its class says what is meant, so that `lint` looks for no pattern

    def visible(self, at: Region) -> Tensor:
        """True where the query may see the key: boolean, broadcastable to (*batch, heads, r, c)."""
        raise NotImplementedError(f"{type(self).__name__} does not define visible(at).")

    def of_pair(self) -> Callable[..., Tensor] | None:
        """The function fn(b, h, i, j) of single pairs from which `visible` is computed, i and j as indices, or None."""
        return None

    def cover(self, at: Tiling) -> Tensor:
        """A Cover for each tile: integers, broadcastable to (*batch, heads, R, C)."""
        return torch.full((1, 1), Cover.SOME, dtype=torch.int8, device=at.frame.device)

    def rows(self, frame: Frame) -> Interval | None:
        """The interval of keys that each query sees, or None if it is not always one interval."""
        return None

    def rule(self) -> IntervalRule | None:
        """The intervals as a rule, without reading a frame or a tensor; None if it has none."""
        return None

    def starts_at_first_key(self) -> bool:
        """Whether all intervals of `rows`, if there are any, have start 0, and empty ones stop 0 too."""
        return False

    def compares_positions(self) -> bool:
        """Whether an answer depends on absolute positions."""
        return self.positional

    def reads_indices(self) -> bool:
        """Whether an answer depends on the index of a query or a key: a part of a call then has to know the whole."""
        return self.indexed

    def differs_by_head(self) -> bool:
        """Whether an answer may depend on the head."""
        return self.per_head

    def shape_error(self, frame: Frame) -> str | None:
        """Why this mask does not fit a call of that size, as a sentence; None if it does."""
        return None

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        """Small instances that fit a call of that frame: regard.testing tries each of them on every backend."""
        return ()

    def __and__(self, other: Mask) -> Mask:
        return self if type(other) is Everything else And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return other if type(other) is Everything else Or(self, other)

    def __invert__(self) -> Mask:
        return Not(self)

    def _refuse(self, other: object) -> NoReturn:
        raise TypeError(
            f"masks are joined by &, | and ~ alone; {self!r} meets {kind_of(other)}: write a & b for the keys that "
            "both let through, a | b for those of either, a & ~b for those of a alone; a score is passed as score=."
        )

    __add__ = __radd__ = __sub__ = __mul__ = __xor__ = __rshift__ = __rrshift__ = _refuse

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is neither true nor false, so `and`, `or` and `not` would take one side; write &, | and ~."
        )

    def batch(self) -> tuple[int, ...]:
        """The batch axes of this mask's own tensors."""
        return ()

    def extent(self) -> Extent:
        """The numbers of queries and keys that this mask's own numbers suggest, for its picture in a notebook."""
        return Extent()

    def on(
        self,
        nq: int,
        nk: int | None = None,
        *,
        positions: Positions | None = None,
        batch: tuple[int, ...] | None = None,
        heads: int = 1,
    ) -> View:
        """This mask for nq queries and nk keys (default: nq), to look at it: dense, additive, rows, cover, ...

        Raises ShapeError where it does not fit, or where nq differs from nk and a positional mask has no positions.

        >>> from regard.masks.positional import Causal
        >>> Causal().on(4).density()
        0.625
        """
        device = next((t.device for t in self.tensors()), None)
        positional = self if self.compares_positions() else None
        stands = () if positions is None else (positions.q.shape[:-1], positions.k.shape[:-1])
        lead = _joined(self.batch(), *stands) if batch is None else batch
        frame = Frame.of(nq, nk, batch=lead, heads=heads, positions=positions, positional=positional, device=device)
        problem = self.shape_error(frame)
        if problem is not None:
            raise ShapeError(problem)
        return View(self, frame)

    def dense(self, nq: int, nk: int | None = None, *, positions: Positions | None = None) -> Tensor:
        """The whole mask as booleans, True = may attend: on(...).dense(), for as many heads as its tensors have."""
        return self.on(nq, nk, positions=positions, heads=self.extent().sizes()[0]).dense()

    def draw(self, nq: int, nk: int | None = None, *, positions: Positions | None = None) -> None:
        """Prints the mask: one line per query, ■ for a key that it sees, · for one that it does not.

        Several batch elements or heads are drawn one after another, with a blank line between them.
        """
        dense = self.dense(nq, nk, positions=positions)
        maps = dense.reshape(-1, *dense.shape[-2:]).tolist()
        print("\n\n".join("\n".join("".join("·■"[seen] for seen in row) for row in one) for one in maps))

    def _repr_html_(self) -> str | None:
        """Its picture for a notebook; the text alone where it cannot be drawn without knowing the call."""
        heads, nq, nk = self.extent().sizes()
        try:
            return html.panel(repr(self), picture(self.on(nq, nk, heads=heads)))
        except Exception:  # of positions that nobody gave, or of a user's function that fits one size
            return None


@dataclass(frozen=True, eq=False)
class View:
    """A mask for one size of call: what it looks like there. Made by Mask.on."""

    mask: Mask
    frame: Frame

    def dense(self) -> Tensor:
        """The whole mask: boolean, True = may attend, broadcastable to (*batch, heads, nq, nk)."""
        visible = self.mask.visible(self.frame.region())
        return visible.expand(broadcast_shape(visible.shape, (self.frame.nq, self.frame.nk)))

    def additive(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole mask as numbers to add to scores: 0 where visible, -inf where hidden."""
        dense = self.dense()
        return torch.zeros(dense.shape, dtype=dtype, device=dense.device).masked_fill(~dense, -math.inf)

    def rows(self) -> Interval | None:
        """The interval of keys that each query sees, or None where it is not known to be one."""
        return self.mask.rows(self.frame)

    def cover(self, r: int, c: int) -> Tensor:
        """NONE, SOME or ALL for each tile of r × c pairs: int8 (*batch, heads, ceil(nq / r), ceil(nk / c))."""
        tiling = self.frame.tiling(r, c)
        return self.mask.cover(tiling).expand(*self.frame.batch, self.frame.heads, *tiling.shape)

    def counts(self) -> Tensor:
        """How many keys each query may see: int64 (*batch, heads, nq). Linear memory."""
        frame, interval = self.frame, self.mask.rows(self.frame)
        if interval is not None:
            return (interval.stop - interval.start).expand(*frame.batch, frame.heads, frame.nq)
        full = (*frame.batch, frame.heads)
        strips = [
            self.mask.visible(frame.region(rows)).expand(*full, rows.stop - rows.start, frame.nk).sum(-1)
            for rows in blocks(frame.nq, 64)
        ]
        return torch.cat([torch.zeros(*full, 0, dtype=torch.int64, device=frame.device), *strips], -1)

    def empty_rows(self) -> Tensor:
        """True for each query that may see nothing: boolean (*batch, heads, nq). Linear memory."""
        return self.counts() == 0

    def density(self) -> float:
        """The share of all pairs that may attend, from 0 to 1 (of no pairs at all: 0). Linear memory."""
        return float(self.counts().sum()) / max(math.prod(self.frame.shape), 1)

    def _repr_html_(self) -> str:
        """Its picture for a notebook."""
        return html.panel(repr(self.mask), picture(self))


def _joined(*axes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return broadcast_shape(*axes)
    except ShapeError:
        shown = " and ".join(str(tuple(each)) for each in axes if each)
        raise ShapeError(f"the batch axes of one mask and its positions are {shown}; expected equal ones.") from None


def cover_of(none: Tensor, all_: Tensor) -> Tensor:
    """Covers from where a tile is surely hidden and where it is surely visible."""
    some = torch.full_like(none, Cover.SOME, dtype=torch.int8)
    return some.masked_fill(all_, Cover.ALL).masked_fill(none, Cover.NONE)


@dataclass(frozen=True)
class Everything(Mask):
    """Every query sees every key. The identity of `&`.

    >>> Everything().draw(2, 3)
    ■■■
    ■■■
    """

    positional: ClassVar[bool] = False
    indexed: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    states_pattern: ClassVar[bool] = True

    def visible(self, at: Region) -> Tensor:
        return torch.ones_like(at.row >= at.col)

    def cover(self, at: Tiling) -> Tensor:
        return torch.full((1, 1), Cover.ALL, dtype=torch.int8, device=at.frame.device)

    def rows(self, frame: Frame) -> Interval:
        stop = torch.full((1, frame.nq), frame.nk, device=frame.device, dtype=torch.int64)
        return Interval(torch.zeros_like(stop), stop)

    def rule(self) -> IntervalRule:
        return IntervalRule()

    def starts_at_first_key(self) -> bool:
        return True

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        return (cls(),)

    def __and__(self, other: Mask) -> Mask:
        return And(self, other).b if type(self) is Everything else super().__and__(other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other).a if type(self) is Everything else super().__or__(other)


def seen_by(mask: Mask, at: Region, size: tuple[int, int]) -> Tensor:
    """mask.visible(at), which a person may have written: checked. size: how many queries and keys there are in `at`.

    Raises TypeError for what is no boolean, ShapeError for what does not broadcast to (*batch, heads, r, c).
    """
    seen = _booleans(mask, at)
    full = *at.frame.batch, at.frame.heads, *size
    if not torch.compiler.is_compiling() and not broadcasts(seen.shape, full):
        raise ShapeError(
            f"mask {mask!r}: visible(at) returned shape {listed(seen.shape)} for pairs of shape {listed(full)}, "
            f"(*batch, heads, queries, keys); expected one that broadcasts to it. {_PAIRS_AT_A_TIME}"
        )
    return seen


_PAIRS_AT_A_TIME = (
    "A mask is asked about some of the pairs at a time: index tensors by i and j, or by at.heads(t), at.queries(t), "
    "at.keys(t), at.pairs(t); a whole tensor of booleans is Dense(t)."
)


def _booleans(mask: Mask, at: Region) -> Tensor:
    seen: Any = mask.visible(at)  # a person may return anything
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        what = str(seen.dtype) if isinstance(seen, Tensor) else type(seen).__name__
        raise TypeError(f"mask {mask!r}: visible(at) returned {what}; expected a boolean tensor, True = may attend.")
    return seen


@dataclass(frozen=True)
class _Pair(Mask):
    a: Mask
    b: Mask

    def __post_init__(self) -> None:
        for side in (self.a, self.b):
            if not isinstance(side, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
                way = way_to_mask(side) or "expected a Mask, such as Causal() or Where(fn)"
                raise TypeError(f"& and | join masks; one side is {kind_of(side)}: {way}.")

    def compares_positions(self) -> bool:
        return self.a.compares_positions() or self.b.compares_positions()

    def reads_indices(self) -> bool:
        return self.a.reads_indices() or self.b.reads_indices()

    def differs_by_head(self) -> bool:
        return self.a.differs_by_head() or self.b.differs_by_head()

    def shape_error(self, frame: Frame) -> str | None:
        return self.a.shape_error(frame) or self.b.shape_error(frame)

    def batch(self) -> tuple[int, ...]:
        return _joined(self.a.batch(), self.b.batch())

    def extent(self) -> Extent:
        return self.a.extent().both(self.b.extent())

    def both(self, at: Region) -> tuple[Tensor, Tensor]:
        """What each side answers; ShapeError where the two answers do not broadcast to each other."""
        a, b = _booleans(self.a, at), _booleans(self.b, at)
        axes = zip(reversed(a.shape), reversed(b.shape), strict=False)
        if not torch.compiler.is_compiling() and not all(n == m or 1 in (n, m) for n, m in axes):
            raise ShapeError(
                f"masks {self.a!r} and {self.b!r}: visible(at) returned shapes {listed(a.shape)} and "
                f"{listed(b.shape)}; expected two that broadcast to (*batch, heads, queries, keys). {_PAIRS_AT_A_TIME}"
            )
        return a, b


@dataclass(frozen=True)
class And(_Pair):
    """What both masks let through; `a & b`.

    >>> from regard.masks.positional import Causal, Window
    >>> Causal() & Window(before=1, after=0)
    Causal() & Window(before=1, after=0)
    """

    def visible(self, at: Region) -> Tensor:
        a, b = self.both(at)
        return a & b

    def cover(self, at: Tiling) -> Tensor:
        return torch.minimum(self.a.cover(at), self.b.cover(at))

    def rows(self, frame: Frame) -> Interval | None:
        a, b = self.a.rows(frame), self.b.rows(frame)
        if a is None or b is None:
            return None
        start = torch.maximum(a.start, b.start)
        return Interval(start, torch.maximum(start, torch.minimum(a.stop, b.stop)))

    def starts_at_first_key(self) -> bool:
        return self.a.starts_at_first_key() and self.b.starts_at_first_key()

    def rule(self) -> IntervalRule | None:
        a, b = self.a.rule(), self.b.rule()
        return None if a is None or b is None else a.both(b)

    def __repr__(self) -> str:
        return " & ".join(f"({m!r})" if isinstance(m, Or) else repr(m) for m in (self.a, self.b))


@dataclass(frozen=True)
class Or(_Pair):
    """What either mask lets through; `a | b`.

    >>> from regard.masks.positional import Causal, Prefix
    >>> Causal() | Prefix(2)
    Causal() | Prefix(n=2)
    """

    def visible(self, at: Region) -> Tensor:
        a, b = self.both(at)
        return a | b

    def cover(self, at: Tiling) -> Tensor:
        return torch.maximum(self.a.cover(at), self.b.cover(at))

    def rows(self, frame: Frame) -> Interval | None:
        a, b = self.a.rows(frame), self.b.rows(frame)
        if a is None or b is None:
            return None
        if self.starts_at_first_key():  # known without looking, in a graph too
            stop = torch.maximum(a.stop, b.stop)
            return Interval(torch.zeros_like(stop), stop)
        a_empty, b_empty = a.start >= a.stop, b.start >= b.stop
        apart = (torch.maximum(a.start, b.start) > torch.minimum(a.stop, b.stop)) & ~a_empty & ~b_empty
        if data_unavailable(apart) or bool(apart.any()):
            return None
        start = torch.where(a_empty, b.start, torch.where(b_empty, a.start, torch.minimum(a.start, b.start)))
        stop = torch.where(a_empty, b.stop, torch.where(b_empty, a.stop, torch.maximum(a.stop, b.stop)))
        return Interval(start, stop)

    def starts_at_first_key(self) -> bool:
        return self.a.starts_at_first_key() and self.b.starts_at_first_key()

    def __repr__(self) -> str:
        return f"{self.a!r} | {self.b!r}"


@dataclass(frozen=True)
class Not(Mask):
    """What the mask hides; `~a`.

    >>> from regard.masks.positional import Causal
    >>> (~Causal()).draw(3)
    ·■■
    ··■
    ···
    """

    a: Mask

    def visible(self, at: Region) -> Tensor:
        return ~_booleans(self.a, at)

    def cover(self, at: Tiling) -> Tensor:
        return Cover.ALL - self.a.cover(at)

    def rows(self, frame: Frame) -> Interval | None:
        inner = self.a.rows(frame)
        if inner is None:
            return None
        if self.a.starts_at_first_key():  # known without looking
            return Interval(inner.stop, torch.full_like(inner.stop, frame.nk))
        empty = inner.start >= inner.stop
        inside = (inner.start > 0) & (inner.stop < frame.nk) & ~empty
        if data_unavailable(inside) or bool(inside.any()):
            return None
        leads = (inner.start <= 0) & ~empty  # hidden keys come first, so the visible ones follow
        start = torch.where(leads, inner.stop, 0)
        return Interval(start, torch.where(leads | empty, frame.nk, inner.start))

    def compares_positions(self) -> bool:
        return self.a.compares_positions()

    def reads_indices(self) -> bool:
        return self.a.reads_indices()

    def differs_by_head(self) -> bool:
        return self.a.differs_by_head()

    def shape_error(self, frame: Frame) -> str | None:
        return self.a.shape_error(frame)

    def batch(self) -> tuple[int, ...]:
        return self.a.batch()

    def extent(self) -> Extent:
        return self.a.extent()

    def __invert__(self) -> Mask:
        return self.a

    def __repr__(self) -> str:
        return f"~({self.a!r})" if isinstance(self.a, (And, Or)) else f"~{self.a!r}"
