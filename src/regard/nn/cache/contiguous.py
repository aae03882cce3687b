"""ContiguousCache: keys and values row by row in buffers, in the order of their positions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

import regard.core.arrays as arrays
from regard.core.errors import ShapeError
from regard.core.positions import Positions, tail
from regard.core.shapes import count_of, listed
from regard.nn.cache.base import KVCache, check_tokens, read_before_tokens, writable
from regard.nn.cache.forms import Dtypes, Form


class ContiguousCache(KVCache):
    """Buffers (*lead, capacity, width): of keys, of values, and what its form keeps besides. Abstract.

    The first `_rows` rows are in use, in the order of positions; the last of them stands at length - 1. What `append`
    returns is a slice of them. A subclass says how large a new buffer is, and which keys may be forgotten.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        self._buffers: tuple[Tensor, ...] | None = None
        self._rows = self._length = 0
        self._appended = 0  # tokens of the last append
        self._dtypes: Dtypes | None = None  # of the last append's keys and values

    @abstractmethod
    def _capacity_for(self, rows: int) -> int:
        """The capacity of new buffers that must hold `rows` rows at once."""

    def _first_read(self, position: int) -> int:
        """The position of the first key that a query at `position` may read; those before it may be forgotten."""
        return 0

    def _shortest(self) -> int:
        """The smallest length that `crop` must be able to come back to."""
        return self._length

    @property
    def first_key(self) -> int:
        return self._first_read(self._length)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        buffers = self._buffers
        if buffers is None or not self._form.write(buffers, self._rows, k, v):
            buffers = self._write(k, v)
        n = k.shape[-2]
        self._rows, self._length, self._appended = self._rows + n, self._length + n, n
        self._dtypes = k.dtype, v.dtype
        return self._read(buffers, self._dtypes)

    def read(self) -> tuple[Tensor, Tensor]:
        if self._buffers is None or self._dtypes is None:
            raise read_before_tokens()
        return self._read(self._buffers, self._dtypes)

    def _read(self, buffers: tuple[Tensor, ...], dtypes: Dtypes) -> tuple[Tensor, Tensor]:
        seen = self._length - self._first_read(self._length - self._appended)
        first = self._rows - seen
        return self._form.read([buffer.narrow(-2, first, seen) for buffer in buffers], dtypes)

    def _write(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Copies new keys and values behind the others, once they are checked and there is room."""
        check_tokens(k, v)
        n = k.shape[-2]
        if self._buffers is not None:
            self._form.check(self._buffers, self._buffers[0].shape[:-2], k, v)
        new = self._form.kept(k, v)
        buffers, rows = self._buffers, self._rows
        if buffers is None or rows + n > buffers[0].shape[-2]:
            buffers, rows = self._moved(new)
        for buffer, t in zip(buffers, new, strict=True):
            buffer.narrow(-2, rows, n).copy_(t)
        self._buffers, self._rows = buffers, rows
        return buffers

    def _moved(self, added: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], int]:
        """New buffers with what is still read, how many rows, and room for what will be added."""
        kept = self._length - self._first_read(self._shortest())
        capacity = self._capacity_for(kept + added[0].shape[-2])
        made = tuple(_empty(t, t.shape[:-2], capacity) for t in added)
        for old, new in zip(self._buffers or (), made, strict=False):
            new.narrow(-2, 0, kept).copy_(old.narrow(-2, self._rows - kept, kept))
        return made, kept

    def reorder(self, indices: Tensor) -> None:
        indices = arrays.indices(indices, "indices")
        if self._buffers is None:
            return
        keys = self._buffers[0]
        if keys.dim() < 3:
            raise ShapeError(f"reorder: keys of shape {listed(keys.shape)} have no batch axis.")
        chosen = arrays.existing(indices, keys.shape[0], "indices", "sequences").to(keys.device)
        self._buffers = tuple(self._chosen(buffer, chosen) for buffer in self._buffers)

    def _chosen(self, buffer: Tensor, indices: Tensor) -> Tensor:
        new = _empty(buffer, (len(indices), *buffer.shape[1:-2]), buffer.shape[-2])
        used = buffer.narrow(-2, 0, self._rows)
        torch.index_select(used, 0, indices, out=new.narrow(-2, 0, self._rows))
        return new

    def crop(self, length: int) -> None:
        if isinstance(length, Tensor) and length.dim():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShapeError(
                f"crop: length has shape {listed(length.shape)}; expected one for all sequences. PagedCache has a "
                "length for each."
            )
        length = arrays.whole_number(length, "crop: length")
        if not 0 <= length <= self._length:
            raise ValueError(
                f"crop({length}): the cache has {count_of(self._length, 'token')}; expected 0 to {self._length}."
            )
        first = self._length - self._rows
        if self._first_read(length) < min(first, length):
            raise ValueError(
                f"crop({length}): the next token would read keys from position {self._first_read(length)} on, "
                f"and those before {first} are forgotten."
            )
        self._rows, self._length, self._appended = max(0, length - first), length, 0
        if self._buffers is not None:
            # torch then refuses gradients through what was read and may be overwritten
            increment_version(self._buffers)

    def reset(self) -> None:
        self._buffers = None
        self._rows = self._length = self._appended = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def lengths(self) -> Tensor:
        if self._buffers is None:
            return torch.tensor(self._length, dtype=torch.int64, device="cpu")
        k = self._buffers[0]
        return torch.full(k.shape[: -3 if k.dim() > 3 else -2], self._length, device=k.device, dtype=torch.int64)

    @property
    def positions(self) -> Positions:
        start = self._first_read(self._length - self._appended)
        device = None if self._buffers is None else self._buffers[0].device
        return tail(self._appended, self._length - start, device, start=start)

    def next_positions(self, n: int) -> Tensor:
        n = n if torch.compiler.is_compiling() else arrays.size(n, "next_positions: n")
        device = None if self._buffers is None else self._buffers[0].device
        return torch.arange(self._length, self._length + n, device=device, dtype=torch.int64)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._buffers is not None:
            self._buffers = writable(self._buffers)


def _empty(like: Tensor, lead: tuple[int, ...], capacity: int) -> Tensor:
    with torch.inference_mode(False):  # a buffer made in inference mode could be written in no other mode
        return torch.empty(*lead, capacity, like.shape[-1], dtype=like.dtype, device=like.device)
