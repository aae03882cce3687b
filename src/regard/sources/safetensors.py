"""Safetensors: keys and values in tensors of such a file."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from regard.core.errors import ShapeError
from regard.core.shapes import count_of
from regard.sources.files import StoredArray, opened_file
from regard.sources.source import Part, Source, cut, keys_of_a_part

# The dtypes that attention computes in, as such files call them.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LENGTH_BYTES = 8  # of the little-endian number that a file begins with: how long its header is
_MOST_HEADER = 100_000_000  # as the safetensors library has it


@dataclass(frozen=True, eq=False)
class Safetensors(Source):
    """Tensors of a safetensors file: k (*batch, hk, n, dk) and v (*batch, hk, n, dv), read in slices of keys.

    k, v   the name of a tensor each, or lists of as many names: their keys follow one another
    size   the largest number of keys of a part; None: as many as take 32 MB, with their values
    start  the position of the first key

    The file is opened for each part, read, and closed again. Raises FileNotFoundError, ValueError for a file that is no
    complete safetensors file, KeyError for a name that it does not have, ShapeError for tensors that do not fit
    together. If the file becomes shorter or is replaced while it is read, a RuntimeError says so.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"k": torch.zeros(2, 9, 4), "v": torch.zeros(2, 9, 3)}, f"{folder}/kv.safetensors")
    ...     source = Safetensors(f"{folder}/kv.safetensors", size=4)
    ...     [part.read()[1].shape for part in source.parts()]
    [torch.Size([2, 4, 3]), torch.Size([2, 4, 3]), torch.Size([2, 1, 3])]
    """

    file: str | PathLike[str]
    k: str | Sequence[str] = "k"
    v: str | Sequence[str] = "v"
    size: int | None = None
    start: int = 0

    def __post_init__(self) -> None:
        k, v = ([x] if isinstance(x, str) else list(x) for x in (self.k, self.v))
        if len(k) != len(v) or not k:
            raise ValueError(
                f"Safetensors names {count_of(len(k), 'tensor')} of keys and {len(v)} of values; expected as many."
            )
        tensors: list[tuple[StoredTensor, StoredTensor]] = []
        widest = 0
        header, known = _header(self.file)
        for names in zip(k, v, strict=True):
            keys, values = (StoredTensor.of(self.file, header, known, name) for name in names)
            if min(len(keys.shape), len(values.shape)) < 2 or keys.shape[-2] != values.shape[-2]:
                raise ShapeError(
                    f"{names[0]!r} has shape {keys.shape}, {names[1]!r} {values.shape} in {fspath(self.file)}; "
                    "expected (*batch, hk, n, dk) and (*batch, hk, n, dv), as many values as keys."
                )
            tensors.append((keys, values))
            widest = max(widest, keys.key_bytes() + values.key_bytes())
        step = keys_of_a_part(self.size, widest, "Safetensors")
        count = sum(keys.shape[-2] for keys, _ in tensors)
        made = (("keys", count), ("first_position", self.start), ("_step", step), ("_tensors", tuple(tensors)))
        for name, value in made:
            object.__setattr__(self, name, value)

    def parts(self) -> Generator[Part, None, None]:
        first, step = 0, self.__dict__["_step"]
        for k, v in self.__dict__["_tensors"]:
            yield from cut(k.shape[-2], step, first, self.start, lambda keys, k=k, v=v: (k.read(keys), v.read(keys)))
            first += k.shape[-2]

    def __repr__(self) -> str:
        return f"Safetensors({fspath(self.file)!r})"


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor (*batch, hk, n, d) of a safetensors file."""

    stored: StoredArray
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @staticmethod
    def of(file: str | PathLike[str], header: bytes, known: dict[str, Any], name: str) -> StoredTensor:
        """KeyError for a name that the file does not have, ValueError where the tensor cannot be read."""
        path = fspath(file)
        if name not in known:
            raise KeyError(f"{path} has no tensor {name!r}; it has {_some(sorted(known))}.")
        try:
            dtype, shape, (begin, end) = known[name]["dtype"], tuple(known[name]["shape"]), known[name]["data_offsets"]
            size = math.prod(shape)
            sound = begin >= 0 and (dtype not in DTYPES or end - begin == size * DTYPES[dtype].itemsize)
        except (KeyError, TypeError, ValueError):
            sound, dtype, shape, begin = False, "", (), 0
        if not sound:
            raise ValueError(
                f"{path} says of its tensor {name!r} only {known[name]}; expected dtype, shape and data_offsets that "
                "belong together. The file is damaged: write it again, with safetensors' save_file."
            )
        if dtype not in DTYPES:
            raise ValueError(f"{name!r} of {path} has dtype {dtype}; expected one of {', '.join(DTYPES)}: convert it.")
        called, axis = f"{name!r} of shape {shape}", len(shape) - 2
        found = StoredArray(path, header, called, len(header) + begin, shape, axis, DTYPES[dtype].itemsize)
        found.check_size()
        return StoredTensor(found, DTYPES[dtype])

    def key_bytes(self) -> int:
        """What one key takes."""
        return math.prod((*self.shape[:-2], self.shape[-1])) * self.dtype.itemsize

    def read(self, keys: slice) -> Tensor:
        """(*batch, hk, count, d) of these keys."""
        return self.stored.read(keys).view(self.dtype).view(*self.shape[:-2], keys.stop - keys.start, self.shape[-1])


def _header(file: str | PathLike[str]) -> tuple[bytes, dict[str, Any]]:
    """How a file begins, and what that says of its tensors: {name: {dtype, shape, data_offsets}}."""
    path = fspath(file)
    with opened_file(path, "Safetensors reads what safetensors' save_file writes") as opened:
        begin = opened.read(_LENGTH_BYTES)
        length = int.from_bytes(begin, "little")
        text = opened.read(min(length, _MOST_HEADER))
    try:
        if len(begin) < _LENGTH_BYTES or len(text) < length:
            raise ValueError(f"{len(begin) + len(text)} bytes are read, a header has {_LENGTH_BYTES + length}")
        known = json.loads(text)
        if not isinstance(known, dict):
            raise ValueError("its header is no table of tensors")
    except ValueError as error:  # those of json and of unicode are ValueErrors too
        raise ValueError(
            f"{path} is no safetensors file, or the beginning of one: {error}. Expected what safetensors' save_file "
            "writes; if it was copied or downloaded, do that again."
        ) from error
    return begin + text, {name: entry for name, entry in known.items() if name != "__metadata__"}


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
