"""Positions: where queries and keys stand in their sequence, and the error where it is not given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from regard.core.arrays import as_int64, integers, is_numpy, numbers, plain_tensor
from regard.core.errors import ShapeError
from regard.core.shapes import FARTHEST, count_of, listed, one_or
from regard.core.tracing import data_unavailable, scripted
from regard.core.value import Value
from regard.core.wrong_calls import kind_of

_UNSIGNED = torch.uint16, torch.uint32, torch.uint64  # of which torch computes no differences


@dataclass(frozen=True)
class Positions(Value):
    """Absolute positions of the queries and of the keys: integer tensors (n,) or (*batch, n).

    Positional masks and scores (Causal, Window, Prefix, Dilated, Where, Alibi, RelativeBias) compare these numbers, not
    indices. They need be neither sorted nor contiguous; where keys are sorted, masks reduce to intervals.

    Any dtype of integers will do. Distances are computed in int64, which numbers from -2^62 to 2^62 never leave;
    further ones may be compared (Causal), for example as the position of a key that no query sees.

    `head` and `tail` store numbers: each access to q and k makes new tensors from them, so that writing to such a
    tensor changes nothing.

    >>> Positions(q=torch.tensor([7]), k=torch.arange(9))   # one token decoded at position 7
    Positions(q=int64[1], k=int64[9])
    """

    q: Tensor
    k: Tensor

    def __post_init__(self) -> None:
        for name, x in (("q", self.q), ("k", self.k)):
            if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"Positions.{name} is {kind_of(x)}; expected an integer tensor (n,) or (*batch, n).")
            if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
                raise TypeError(f"Positions.{name} has dtype {x.dtype}; expected integers, such as torch.arange(n).")
            if x.dim() == 0:
                raise ShapeError(f"Positions.{name} has shape (); expected (n,) or (*batch, n).")
            plain_tensor(x, f"Positions.{name}")
            if x.dtype in _UNSIGNED:
                object.__setattr__(self, name, as_int64(x, f"Positions.{name}"))

    def __getattr__(self, name: str) -> Tensor:
        """The tensors of `head` and `tail`: a field that a value has never comes here."""
        span: Span | None = self.__dict__.get("_span")
        if span is None or name not in ("q", "k"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return counting(*(span.q if name == "q" else span.k), span.device)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.q, self.k

    @property
    def span(self) -> Span | None:
        """The positions as numbers if they are known without reading a tensor: those of `head` and `tail`.

        Positions that are inputs of a graph are tensors, since a graph would be compiled again for other numbers.
        """
        if torch.compiler.is_compiling() and "q" not in self.__dict__:
            return None
        return self.__dict__.get("_span")

    @property
    def counts(self) -> tuple[int, int]:
        """How many queries and how many keys they are."""
        span = self.span  # whose tensors would be made
        return (self.q.shape[-1], self.k.shape[-1]) if span is None else (span.q[1], span.k[1])

    @property
    def consecutive(self) -> bool:
        """Whether the positions of queries and of keys count up by one, the same in all sequences.

        Known for `head` and `tail`; otherwise the tensors are read. False where they cannot be read (while compiling,
        on the meta device).
        """
        if self.span is not None:
            return not self.span.by_sequence()
        if data_unavailable(self.q, self.k) or self.q.dim() != 1 or self.k.dim() != 1:
            return False
        return all(_counts_up(p.long()) for p in (self.q, self.k))  # differences of small types would wrap


def _counts_up(p: Tensor) -> bool:
    """Whether int64 numbers count up by one, to a number that has a next one."""
    return bool((p[1:] - p[:-1] == 1).all()) and (not len(p) or int(p[0]) < 2**63 - len(p))


class Span(NamedTuple):
    """Positions that count up by one: the first and how many, of the queries and of the keys.

    The first of the queries may be a tuple, a number for each sequence. device: where tensors of them are made.
    by_sequence and offset are methods, since torch.compile of torch 2.10 cannot read the properties of a named tuple.
    """

    q: tuple[int | tuple[int, ...], int]
    k: tuple[int, int]
    device: torch.device | str | None

    def by_sequence(self) -> bool:
        """Whether the queries have a first position for each sequence."""
        return type(self.q[0]) is tuple

    def offset(self) -> int | tuple[int, ...]:
        """How far the first query stands after the first key; of each sequence, where they differ."""
        first, k_first = self.q[0], self.k[0]
        return tuple([n - k_first for n in first]) if isinstance(first, tuple) else first - k_first


def counting(first: int | tuple[int, ...], count: int, device: torch.device | str | None = None) -> Tensor:
    """The positions first, first + 1, ...: int64 (count,), or (batch, count) of a first one for each sequence."""
    if not isinstance(first, tuple):
        return torch.arange(first, first + count, dtype=torch.int64, device=device)
    firsts = torch.tensor(first, dtype=torch.int64, device=device)
    return firsts[:, None] + torch.arange(count, dtype=torch.int64, device=device)


def counted(
    q: tuple[int | tuple[int, ...], int], k: tuple[int, int], device: torch.device | str | None = None
) -> Positions:
    """Positions that count up by one, from anywhere: the first and how many, of the queries and of the keys.

    The first of the queries may be a tuple, a number for each sequence. Raises ValueError for negative counts.

    >>> counted((5, 2), (3, 4)).k
    tensor([3, 4, 5, 6])
    """
    if torch.compiler.is_compiling() or scripted():  # which have numbers of their own
        _refuse_counts(q, k)
        return _with_span(counting(*q, device), counting(*k, device), Span(q, k, device))
    (first, nq), (k_first, nk) = q, k
    counts = type(nq) is int and type(nk) is int and nq >= 0 and nk >= 0
    near = type(first) is int and type(k_first) is int and max(abs(first), abs(k_first)) <= FARTHEST
    if not counts or not near:  # asked once, since each step of a cache comes here
        _refuse_counts(q, k)
        _refuse_far(q[0] if isinstance(q[0], tuple) else (q[0],), k[0])
    made = object.__new__(Positions)
    object.__setattr__(made, "_span", Span(q, k, device))
    return made


def _refuse_counts(q: tuple[int | tuple[int, ...], int], k: tuple[int, int]) -> None:
    for count in (q[1], k[1]):
        if isinstance(count, (float, str)):
            raise TypeError(f"{count!r} positions: expected an integer.")
    if q[1] < 0 or k[1] < 0:
        first, count = q if q[1] < 0 else k
        raise ValueError(f"{count_of(count, 'position')} from {first} on: expected 0 or more.")


def _refuse_far(q: tuple[int, ...], k: int) -> None:
    if any(type(n) is int and not -FARTHEST <= n <= FARTHEST for n in (*q, k)):
        raise ValueError(f"positions from {q[0]} and {k} on: expected numbers from -2^62 to 2^62.")


def _with_span(q: Tensor, k: Tensor, span: Span | None) -> Positions:
    """Positions with these tensors, which must not be written to, and their span where it is known."""
    made = object.__new__(Positions)
    object.__setattr__(made, "q", q)  # the tensors are regard's own, or have been checked
    object.__setattr__(made, "k", k)
    if span is not None:
        object.__setattr__(made, "_span", span)
    return made


def head(nq: int, nk: int, device: torch.device | str | None = None) -> Positions:
    """The queries are the first nq positions: query i stands at i, key j at j.

    Raises ValueError for negative counts.

    >>> head(2, 4)
    Positions(q=int64[2], k=int64[4])
    """
    return counted((0, nq), (0, nk), device)


def tail(
    nq: int, nk: int | Sequence[int] | Tensor, device: torch.device | str | None = None, *, start: int = 0
) -> Positions:
    """The queries are the last nq positions, as in decoding: query i stands at start + nk - nq + i, key j at start + j.

    nk may be a length for each sequence, numbers or an integer tensor (batch,): the last query of each sequence then
    stands at its own last key, and there are keys for the longest sequence. If Causal does not hide the keys after the
    end of shorter sequences, hide them by Lengths(keys=lengths). Numbers stay numbers: no tensor is made unless q or k
    is read, and one plan serves calls whose lengths change from step to step. A tensor on a GPU is copied to the CPU,
    which waits for it; in a graph, whose shapes cannot depend on it, write Positions(lengths[:, None] - nq +
    torch.arange(nq), torch.arange(nk)).
    start is the position of the first key: above 0 if earlier keys were dropped (a rolling cache). With more queries
    than keys the first queries stand before every key, and see none of them under Causal.
    Raises ValueError for negative counts and no lengths, TypeError for lengths that are no integers, ShapeError for
    other axes.

    >>> tail(2, 4).q, tail(2, 4, start=10).q
    (tensor([2, 3]), tensor([12, 13]))
    >>> tail(1, [7, 3])
    Positions(q=int64[2, 1], k=int64[7])
    """
    lengths = None if type(nk) is int else _lengths_of(nk)
    if lengths is None:
        n = cast(int, nk)  # torch.jit.trace has tensors of one number
        return counted((start + n - nq, nq), (start, n), device)
    shift = start - nq
    return counted((tuple([n + shift for n in lengths]), nq), (start, max(lengths)), device)


def _lengths_of(nk: int | Sequence[int] | Tensor) -> list[int] | None:
    """A length for each sequence; None where nk is one number."""
    if not isinstance(nk, (int, Tensor, list, tuple, str)) and is_numpy(nk):
        nk = plain_tensor(nk, "tail: nk")
    if isinstance(nk, Tensor) and nk.dim():
        if nk.dim() > 1:
            raise ShapeError(
                f"tail: nk has shape {listed(nk.shape)}; expected a number, or lengths (batch,). Positions that follow "
                "several batch axes are tensors: Positions(q, k)."
            )
        nk = integers(nk, "tail: nk").tolist()
    if isinstance(nk, str):
        raise TypeError(f"tail: nk is {nk!r}; expected a number, or lengths (batch,).")
    if not isinstance(nk, (list, tuple)):
        return None
    lengths = numbers(nk, "tail: nk")
    if not lengths or min(lengths) < 0:
        raise ValueError(f"tail: nk is {nk}; expected lengths of 0 or more, of one sequence at least.")
    return list(lengths)


def resolve_positions(
    positions: Positions | None,
    nq: int,
    nk: int,
    batch: tuple[int, ...],
    positional: object | None,
    device: torch.device | str | None,
) -> Positions:
    """The positions of one call, checked; `positional` is what compares them, None if nothing does."""
    if positions is None:
        if nq != nk and positional is not None:
            one = nq == 1
            raise ShapeError(
                f"{count_of(nq, 'query')} {'meets' if one else 'meet'} {count_of(nk, 'key')} under {positional!r}, "
                f"and their positions are not given. Pass\n  positions=tail({nq}, {nk}) if "
                f"{'the query is the last token' if one else f'the queries are the last {nq} tokens'} (decoding), or "
                f"positions=head({nq}, {nk}) if {'it is' if one else 'they are'} the first."
            )
        span = Span((0, nq), (0, nk), device)
        return _with_span(counting(*span.q, device), counting(*span.k, device), span)
    for name, x, n in (("q", positions.q, nq), ("k", positions.k, nk)):
        lead, rest = tuple(x.shape[:-1]), batch[len(batch) - x.dim() + 1 :]
        if (
            x.shape[-1] != n
            or x.dim() > len(batch) + 1
            or any(not one_or(a, b) for a, b in zip(lead, rest, strict=True))
        ):
            raise ShapeError(
                f"positions.{name} has shape {listed(x.shape)}; expected ({n},)"
                + (f" or {listed((*batch, n))}." if batch else ".")
            )
    span = positions.span
    if span is not None:
        device = span.device if device is None else device
        return _with_span(counting(*span.q, device), counting(*span.k, device), Span(span.q, span.k, device))
    if positions.q.is_cpu and positions.consecutive:  # found out by looking
        firsts = [int(x[0]) if x.numel() else 0 for x in (positions.q, positions.k)]
        span = Span((firsts[0], nq), (firsts[1], nk), device)
    # int64: the small types would wrap in differences
    return _with_span(positions.q.to(device, torch.int64), positions.k.to(device, torch.int64), span)
