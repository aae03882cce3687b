"""Source: keys and values that come in parts, and Part, some of them that are not read yet."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.core.shapes import blocks

# Of keys and values together, where nobody names a size: a few of these are in memory at once.
PART_BYTES = 1 << 25


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive keys of a source, and the function that reads them.

    first, count  the index of its first key in the source, and its number of keys
    positions     the positions of its keys, integers (count,) or (*batch, count)
    read          reads (k, v), tensors or arrays (*batch, hk, count, dk) and (*batch, hk, count, dv)
    """

    first: int
    count: int
    positions: Tensor
    read: Callable[[], tuple[Any, Any]]


class Source:
    """Keys and values that come in parts. A subclass defines `parts`, and the attributes below if it knows them.

    keys            the number of keys; None if it is not known before the end
    first_position  the position of the first key, if positions count up from it; None if parts have their own
    rereadable      whether `parts` can be called again, which a backward needs

    >>> import regard as rg, torch
    >>> class Halves(rg.sources.Source):
    ...     def parts(self):
    ...         for first in (0, 4):
    ...             yield rg.sources.Part(first, 4, torch.arange(first, first + 4), lambda: (torch.zeros(4, 8),) * 2)
    >>> rg.attention_over(torch.zeros(2, 8), Halves()).shape
    torch.Size([2, 8])
    """

    keys: int | None = None
    first_position: int | None = None
    rereadable: bool = True

    def parts(self) -> Iterator[Part]:
        """The parts, in the order of their keys. Opened files are closed when the iterator ends or is closed."""
        raise NotImplementedError(f"{type(self).__name__} does not define parts().")

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the parts are views of, which may require gradients; none if parts are read from files."""
        return ()

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Source:
        """The same source over other tensors, in the order of `tensors()`."""
        return self


def keys_of_a_part(size: int | None, key_bytes: int, name: str) -> int:
    """How many keys a part has: the size that was named, or what fills PART_BYTES. ValueError below 1, TypeError."""
    if size is not None and not isinstance(size, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name}(size={size!r}): expected a number of keys a part, or None to choose.")
    if size is not None and size < 1:
        raise ValueError(f"{name}(size={size}): expected 1 key a part or more, or None to choose.")
    return size or max(1, PART_BYTES // max(key_bytes, 1))


def cut(
    n: int, size: int, first: int, position: int, read: Callable[[slice], tuple[Any, Any]]
) -> Generator[Part, None, None]:
    """n keys as parts of `size`, none of them as one part. first: the index of the first; position: that of key 0 of
    the source.
    """
    for keys in blocks(n, size) or [slice(0, 0)]:
        start, stop = first + keys.start, first + keys.stop
        positions = torch.arange(position + start, position + stop, dtype=torch.int64, device="cpu")
        yield Part(start, stop - start, positions, lambda keys=keys: read(keys))


def closed_at_the_end(parts: Iterable[Any]) -> AbstractContextManager[Any]:
    """A generator ends with the block, so what it has opened is closed; other iterables have nothing to close."""
    return closing(parts) if isinstance(parts, Generator) else nullcontext()


@contextmanager
def named_errors(what: str) -> Generator[None, None, None]:
    """An error while something is read becomes a RuntimeError that says what was read, its cause the error."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{what} could not be read: {type(error).__name__}: {error}") from error
