"""Masks for sequences of unequal length: Lengths (padded) and Documents (packed). They read indices, not positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from regard.core.arrays import integers, labels, numbers
from regard.core.region import Frame, Region, Tiling
from regard.core.shapes import broadcast_shape, equal_shapes, listed
from regard.core.tracing import data_unavailable
from regard.core.value import names
from regard.core.wrong_calls import answers_wrong_calls
from regard.masks.algebra import Mask, cover_of
from regard.masks.intervals import Interval, IntervalRule
from regard.masks.picture import Extent

_REAL = " A padding mask (True = a real token) becomes lengths by mask.sum(-1)."
_IN_FRONT = " A padding mask (True = a real token) becomes numbers of padded tokens in front by (~mask).sum(-1)."


class _LazyTensor:
    """A field of Lengths whose tensor is made from numbers when it is first read, and kept in the instance.

    The numbers (`_numbers`) are removed last: where they are gone, the tensors are there.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, mask: Any, owner: type | None = None) -> Tensor | None:
        if mask is None:
            return None  # the default of the field
        own = mask.__dict__
        given = own.get("_numbers")
        if given is None:  # another thread has just made the tensors
            return own[self.name]
        if is_compiling():
            return _made(given[LENGTHS_FIELDS.index(self.name)])
        with torch.inference_mode(False):  # autograd saves no tensor that such a mode has made
            own.update({name: _made(x) for name, x in zip(LENGTHS_FIELDS, given, strict=True)})
        own.pop("_numbers", None)
        own["_of_numbers"] = True
        return own[self.name]


LENGTHS_FIELDS = "keys", "queries", "first"


def _checked(x: Any, name: str) -> Tensor | tuple[int, ...] | None:
    if type(x) in (list, tuple):
        return numbers(x, f"Lengths.{name}")
    if type(x) is int:
        way = f"[{x}, ...], or torch.full((batch,), {x})"
        raise TypeError(f"Lengths.{name} is an int; expected a number for each sequence: write {way}.")
    return None if x is None else integers(x, f"Lengths.{name}", _IN_FRONT if name == "first" else _REAL)


def _made(x: Tensor | tuple[int, ...] | None, device: torch.device | str = "cpu") -> Tensor | None:
    return torch.tensor(x, dtype=torch.int64, device=device) if isinstance(x, tuple) else x


@answers_wrong_calls(
    {
        **dict.fromkeys(("lengths", "seqlens", "seqused_k", "key_lengths"), "write keys=lengths"),
        **dict.fromkeys(
            ("key_padding_mask", "mask", "attention_mask", "padding_mask"),
            "write keys=mask.sum(-1) where True = a real token and the padding is at the end, first=(~mask).sum(-1) "
            "where it is in front; for padding elsewhere Dense(mask[:, None, None, :])",
        ),
        **dict.fromkeys(
            ("leftpad", "cache_leftpad", "left_padding", "left_pad", "start", "starts", "begin"),
            "padding in front is first=, the number of padded keys of each sequence",
        ),
    }
)
@dataclass(frozen=True)
class Lengths(Mask):
    """Padding: key j of batch element b is real if first[b] ≤ j < keys[b], query i if i < queries[b].

    keys, queries, first: integer tensors (*batch), or lists of numbers, one for each sequence; None = all real. `keys`
    and `queries` describe padding at the end. `first` describes padding in front (left padding), as tokenizers pad a
    batch for generation: Lengths(first=n - mask.sum(-1)). A query that `queries` makes padding sees nothing, so its
    output is 0; under Causal() the queries before `first` see nothing either. j and i are indices. For padding between
    real tokens use Dense(mask[:, None, None, :]).
    Lists become tensors, on the CPU, only when a field is read, so steps of decoding, whose lengths change, need no
    tensors.
    Raises TypeError for floats and booleans, ShapeError for another shape or a number outside 0..n.

    >>> Lengths(keys=torch.tensor([1, 3])).draw(2, 3)
    ■··
    ■··
    <BLANKLINE>
    ■■■
    ■■■
    >>> Lengths(first=[1]).draw(3)
    ·■■
    ·■■
    ·■■
    """

    positional: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    states_pattern: ClassVar[bool] = True
    keys: Tensor | None = cast(Any, _LazyTensor())
    queries: Tensor | None = cast(Any, _LazyTensor())
    first: Tensor | None = cast(Any, _LazyTensor())

    if TYPE_CHECKING:

        def __init__(
            self,
            keys: Tensor | Sequence[int] | None = None,
            queries: Tensor | Sequence[int] | None = None,
            first: Tensor | Sequence[int] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        given = _checked(self.keys, "keys"), _checked(self.queries, "queries"), _checked(self.first, "first")
        if not any(isinstance(x, tuple) for x in given) or any(isinstance(x, Tensor) for x in given) or is_compiling():
            places = [x.device for x in given if isinstance(x, Tensor)]
            for name, x in zip(LENGTHS_FIELDS, given, strict=True):
                object.__setattr__(self, name, _made(x, *places[:1]))
            if not places:
                object.__setattr__(self, "_of_numbers", True)
            return
        for name in LENGTHS_FIELDS:
            object.__delattr__(self, name)
        object.__setattr__(self, "_numbers", given)

    def visible(self, at: Region) -> Tensor:
        seen = torch.ones_like(at.row >= at.col)
        if self.keys is not None:
            seen = seen & (at.col < at.sequences(self.keys))
        if self.first is not None:
            seen = seen & (at.col >= at.sequences(self.first))
        return seen if self.queries is None else seen & (at.row < at.sequences(self.queries))

    def cover(self, at: Tiling) -> Tensor:
        (row, last_row), (col, last_col) = at.row, at.col
        none, all_ = torch.zeros_like(row > col), torch.ones_like(row > col)
        if self.keys is not None:
            n = at.sequences(self.keys)
            none, all_ = none | (col >= n), all_ & (last_col < n)
        if self.first is not None:
            n = at.sequences(self.first)
            none, all_ = none | (last_col < n), all_ & (col >= n)
        if self.queries is not None:
            n = at.sequences(self.queries)
            none, all_ = none | (row >= n), all_ & (last_row < n)
        return cover_of(none=none, all_=all_)

    def rows(self, frame: Frame) -> Interval:
        start, stop = (
            torch.tensor(bound, device=frame.device, dtype=torch.int64) if own is None else own
            for bound, own in ((0, self.first), (frame.nk, self.keys))
        )
        start, stop = (n[..., None].expand(*n.shape, frame.nq) for n in (start, stop))
        if self.queries is not None:
            row = torch.arange(frame.nq, device=frame.device, dtype=torch.int64)
            stop = torch.where(row < self.queries[..., None], stop, 0)
        if self.first is not None:
            stop = torch.maximum(start, stop)
        return Interval(start[..., None, :], stop[..., None, :])

    def rule(self) -> IntervalRule:
        return IntervalRule(keys=self.keys, queries=self.queries, first=self.first)

    def starts_at_first_key(self) -> bool:
        return self.first is None

    def shape_error(self, frame: Frame) -> str | None:
        for name in LENGTHS_FIELDS:
            n, most = getattr(self, name), frame.nq if name == "queries" else frame.nk
            if n is None:
                continue
            if n.dim() and tuple(n.shape) != frame.batch:
                return (
                    f"Lengths.{name} has shape {listed(n.shape)}; expected a number a sequence, {listed(frame.batch)}."
                )
            if n.numel() and not data_unavailable(n):
                least, largest = (int(bound) for bound in n.aminmax())
                if least < 0 or largest > most:
                    return f"Lengths.{name} holds {least} to {largest}; expected numbers from 0 to {most}."
        return None

    def batch(self) -> tuple[int, ...]:
        return broadcast_shape(*(n.shape for n in self.tensors()))

    def extent(self) -> Extent:
        return Extent(
            tokens=max((int(n.amax()) for n in self.tensors() if n.numel() and not data_unavailable(n)), default=0)
        )

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        index = torch.arange(math.prod(frame.batch), device=frame.device, dtype=torch.int64).reshape(frame.batch)
        keys, queries = index * 7 % (frame.nk + 1), (index + 1) * 5 % (frame.nq + 1)
        first = index * 3 % (frame.nk + 1)
        return cls(keys=keys), cls(keys=frame.nk - keys, queries=queries), cls(first=first)


def numbers_on(mask: Mask, device: torch.device) -> Mask:
    """The mask with the lengths that were given as numbers, which have no device, on this one."""
    if isinstance(mask, Lengths):
        if not mask.__dict__.keys() & {"_numbers", "_of_numbers"}:
            return mask
        return Lengths(*(None if t is None else t.to(device) for t in (mask.keys, mask.queries, mask.first)))
    parts = {name: part for name in names(type(mask)) if isinstance(part := getattr(mask, name), Mask)}
    moved = {name: numbers_on(part, device) for name, part in parts.items()}
    return mask if all(moved[name] is part for name, part in parts.items()) else replace(mask, **moved)


def lengths_of_keys(keys: tuple[int, ...]) -> Lengths:
    """Lengths(keys=keys), of numbers that are known to be integers."""
    made = object.__new__(Lengths)
    object.__setattr__(made, "_numbers", (keys, None, None))
    return made


_OFFSETS = "offsets from 0 to the number of tokens become a mask by pack(x, cu_seqlens=offsets).mask"


@answers_wrong_calls(
    {
        **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "offsets"), _OFFSETS),
        **dict.fromkeys(("lengths", "seqlens"), "write pack(sequences).mask, or Documents(ids)"),
        "ids": "write q_ids=ids",
    },
    "ids hold the number of its document for each token; pack(sequences).mask makes them.",
)
@dataclass(frozen=True)
class Documents(Mask):
    """Packed sequences: a query sees the keys with the number of its own document.

    q_ids (nq,) or (*batch, nq), k_ids (nk,) or (*batch, nk), integers; k_ids None = the same as q_ids. Documents may be
    in any order, in pieces or mixed; if the numbers of the keys never decrease, each query sees one interval. With
    Causal(), documents stay causal: Documents(ids) & Causal().

    >>> Documents(torch.tensor([0, 0, 1])).draw(3)
    ■■·
    ■■·
    ··■
    """

    positional: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    states_pattern: ClassVar[bool] = True
    per_token: ClassVar[bool] = True
    q_ids: Tensor
    k_ids: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_ids", labels(self.q_ids, "Documents.q_ids", _REAL))
        if self.k_ids is not None:
            object.__setattr__(self, "k_ids", labels(self.k_ids, "Documents.k_ids", _REAL))

    @property
    def keys(self) -> Tensor:
        return self.q_ids if self.k_ids is None else self.k_ids

    def visible(self, at: Region) -> Tensor:
        return at.queries(self.q_ids) == at.keys(self.keys)

    def cover(self, at: Tiling) -> Tensor:
        (q, q_largest), (k, k_largest) = at.queries(self.q_ids), at.keys(self.keys)
        one = (q == q_largest) & (k == k_largest) & (q == k)
        return cover_of(none=(q_largest < k) | (q > k_largest), all_=one)

    def rows(self, frame: Frame) -> Interval | None:
        k = self.keys
        if data_unavailable(k) or not bool((k[..., 1:] >= k[..., :-1]).all()):
            return None
        lead = broadcast_shape(k.shape[:-1], self.q_ids.shape[:-1])
        k = k.expand(*lead, frame.nk).contiguous()
        q = self.q_ids.expand(*lead, frame.nq).contiguous()
        start, stop = torch.searchsorted(k, q), torch.searchsorted(k, q, right=True)
        return Interval(start[..., None, :], stop[..., None, :])

    def rule(self) -> IntervalRule:
        return IntervalRule(q_ids=self.q_ids, k_ids=self.keys)

    def shape_error(self, frame: Frame) -> str | None:
        for name, ids, n in (("q_ids", self.q_ids, frame.nq), ("k_ids", self.keys, frame.nk)):
            lead = ids.shape[:-1]
            if ids.shape[-1:] != (n,) or (len(lead) and not equal_shapes(lead, frame.batch)):
                fits = f"({n},)" + (f" or {listed((*frame.batch, n))}" if frame.batch else "")
                hint = (
                    ", and k_ids, which defaults to q_ids, must be given"
                    if self.k_ids is None and name == "k_ids"
                    else ""
                )
                hint += f"; {_OFFSETS}" if _are_offsets(ids, n) else ""
                return f"Documents.{name} has shape {listed(ids.shape)}; expected {fits}{hint}."
        return None

    def batch(self) -> tuple[int, ...]:
        return broadcast_shape(self.q_ids.shape[:-1], self.keys.shape[:-1])

    def extent(self) -> Extent:
        nq, nk = (ids.shape[-1] if ids.dim() else None for ids in (self.q_ids, self.keys))
        return Extent(nq=nq, nk=nk)

    @classmethod
    def examples(cls, frame: Frame) -> tuple[Mask, ...]:
        q, k = (torch.arange(n, device=frame.device, dtype=torch.int64) for n in (frame.nq, frame.nk))
        batch = torch.arange(math.prod(frame.batch), device=frame.device, dtype=torch.int64).reshape(*frame.batch, 1)
        return cls(q // 5, k // 7), cls((q + batch) % 3, (k * k + batch) % 5)


def _are_offsets(ids: Tensor, n: int) -> bool:
    """Whether numbers that should name a document a token look like cu_seqlens: they rise from 0 to n."""
    if ids.dim() != 1 or len(ids) < 2 or data_unavailable(ids):
        return False
    return int(ids[0]) == 0 and int(ids[-1]) == n and bool((ids[1:] >= ids[:-1]).all())
