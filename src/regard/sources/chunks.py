"""Chunks: keys and values as a list of parts, or as an iterable that makes one part after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.core.errors import ShapeError
from regard.core.shapes import count_of
from regard.core.wrong_calls import kind_of
from regard.sources.arrays import loaded
from regard.sources.source import Part, Source, closed_at_the_end, named_errors

Parts = Iterable[tuple[Any, ...]]


class Chunks(Source):
    """Parts (k, v) or (k, v, positions), each k (*batch, hk, n, dk), v (*batch, hk, n, dv), with any n.

    parts: a list or a tuple of them; another iterable; a function without arguments that returns an iterable; or an
    iterator, which can be read only once, so without gradients. Tensors, NumPy arrays (memory-mapped ones are read part
    by part), or any DLPack arrays. positions: integers (n,) or (*batch, n), in all parts or in none; without them the
    keys count up from 0. k and v of a list receive gradients if they require them; the tensors of other iterables must
    not require any.

    Raises TypeError for another type, and during reading for a wrong part, ValueError if an iterator has been read
    before or gives no part.

    >>> k, v = torch.randn(5, 8), torch.randn(5, 3)
    >>> Chunks([(k[:3], v[:3]), (k[3:], v[3:])]).keys
    5
    >>> Chunks((k[i : i + 1], v[i : i + 1]) for i in range(5)).rereadable
    False
    """

    def __init__(self, parts: Parts | Callable[[], Parts]) -> None:
        if isinstance(parts, (str, bytes)):
            raise TypeError(
                f"Chunks.parts is {parts!r}, a name; expected a list of (k, v). A file is Arrays(k, v) of numpy's .npy "
                "files, or Safetensors(path)."
            )
        if isinstance(parts, tuple) and len(parts) == 2 and all(isinstance(each, Tensor) for each in parts):
            raise TypeError("Chunks.parts is one pair (k, v); expected a list of them: [(k, v)].")
        if not callable(parts) and not isinstance(parts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Chunks.parts is {kind_of(parts)}; expected a list or an iterator of (k, v) or "
                "(k, v, positions), or a function that returns one."
            )
        self._parts, self._begun = parts, False
        self.rereadable = not isinstance(parts, Iterator)
        if isinstance(parts, Sequence):
            self._checked = [_checked(part, n) for n, part in enumerate(parts)]
            self.keys = sum(part[0].shape[-2] for part in self._checked)
            self.first_position = 0 if all(len(part) == 2 for part in self._checked) else None

    def parts(self) -> Generator[Part, None, None]:
        if not self.rereadable and self._begun:
            raise ValueError(
                f"the source {self!r} has been read already, and an iterator can be read once. Pass a list, or a "
                "function that returns a new iterator: Chunks(lambda: ...)."
            )
        self._begun = True
        made = self._parts() if callable(self._parts) else self._parts
        # a generator that was made here ends here; one that was given is its owner's
        with closed_at_the_end(made) if callable(self._parts) else nullcontext():
            yield from _numbered(iter(made), repr(self))

    def tensors(self) -> tuple[Tensor, ...]:
        if not isinstance(self._parts, Sequence):
            return ()
        return tuple(t for part in self._checked for t in part[:2] if isinstance(t, Tensor))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Chunks:
        if not isinstance(self._parts, Sequence):
            return self
        rest = iter(tensors)
        return Chunks(
            [
                tuple(next(rest) if n < 2 and isinstance(t, Tensor) else t for n, t in enumerate(part))
                for part in self._checked
            ]
        )

    def __repr__(self) -> str:
        listed = isinstance(self._parts, Sequence)
        many = count_of(len(self._checked), "part") if listed else type(self._parts).__name__
        return f"Chunks({many})"


_END = object()  # None may be a part that a function forgot to return, which is an error


def _numbered(given: Iterator[Any], name: str) -> Generator[Part, None, None]:
    first, n, placed = 0, 0, None
    while True:
        with named_errors(f"part {n} of the source {name}"):
            part = next(given, _END)
        if part is _END:
            break
        k, v, *positions = _checked(part, n)
        if placed is not None and placed != bool(positions):
            raise ValueError(f"part {n} has {'' if positions else 'no '}positions, the parts before it differ.")
        count, placed = k.shape[-2], bool(positions)
        stand = (
            arrays.integers(positions[0], "positions")
            if placed
            else torch.arange(first, first + count, dtype=torch.int64, device="cpu")
        )
        if stand.dim() == 0 or stand.shape[-1] != count:
            raise ShapeError(
                f"part {n} has {count_of(count, 'key')} and positions {tuple(stand.shape)}; expected ({count},)."
            )
        # every key is an own view, so that a part that is not read is not copied
        yield Part(first, count, stand, lambda k=k, v=v: (loaded(k), loaded(v)))
        first, n = first + count, n + 1


def _checked(part: Any, n: int) -> tuple[Any, ...]:
    if not isinstance(part, (tuple, list)) or len(part) not in (2, 3):
        what = count_of(len(part), "thing") if isinstance(part, (tuple, list)) else kind_of(part)
        raise TypeError(f"part {n} of Chunks is {what}; expected (k, v) or (k, v, positions).")
    for name, x in zip("kv", part, strict=False):
        if not hasattr(x, "shape") or len(x.shape) < 2:
            what = f"has shape {tuple(x.shape)}" if hasattr(x, "shape") else f"is {kind_of(x)}"
            raise TypeError(f"{name} of part {n} of Chunks {what}; expected a tensor or an array (*batch, hk, n, d).")
    return tuple(part)
