"""Arrays: keys and values in two arrays, or two .npy files."""

from __future__ import annotations

import mmap
from collections.abc import Generator
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from torch import Tensor

import regard.core.tracing as tracing
from regard.core.errors import ShapeError
from regard.core.wrong_calls import kind_of
from regard.sources.files import anonymous_memory
from regard.sources.npy import NumpyFile
from regard.sources.source import Part, Source, cut, keys_of_a_part


@dataclass(frozen=True, eq=False)
class Arrays(Source):
    """k (*batch, hk, nk, dk) and v (*batch, hk, nk, dv): paths of .npy files, NumPy arrays, or tensors.

    A file is opened for each part, read, and closed again. For arrays that you have mapped to a file (np.memmap,
    np.load(mmap_mode="r")) each part is copied and its pages are released: memory stays that of a few parts for any
    size of the file. Arrays in memory and tensors are read in place, and tensors receive gradients.

    size   the number of keys of a part; None: as many as take 32 MB, with their values
    start  the position of the first key

    Raises ValueError, when it is made, for a path that is not a complete .npy file. If a file becomes shorter or is
    replaced while it is read, a RuntimeError says so. For an array that you have mapped, no program can detect this:
    the process ends by SIGBUS. Pass the path if this may happen.

    >>> import numpy as np
    >>> k, v = np.zeros((2, 1000, 8), np.float32), np.zeros((2, 1000, 3), np.float32)
    >>> [part.count for part in Arrays(k, v, size=400).parts()]
    [400, 400, 200]
    """

    k: Any
    v: Any
    size: int | None = None
    start: int = 0

    def __post_init__(self) -> None:
        k, v = (NumpyFile.of(x) if isinstance(x, (str, PathLike)) else x for x in (self.k, self.v))
        for name, x in (("k", k), ("v", v)):
            if not hasattr(x, "shape"):
                raise TypeError(f"Arrays.{name} is {kind_of(x)}; expected an array, a tensor or a path.")
        if len(k.shape) < 2 or len(v.shape) < 2 or k.shape[-2] != v.shape[-2]:
            raise ShapeError(
                f"Arrays.k has shape {tuple(k.shape)}, Arrays.v {tuple(v.shape)}; expected (*batch, hk, nk, dk) and "
                "(*batch, hk, nk, dv), as many values as keys."
            )
        step = keys_of_a_part(self.size, (_bytes(k) + _bytes(v)) // max(k.shape[-2], 1), "Arrays")
        for name, value in (
            ("keys", int(k.shape[-2])),
            ("first_position", self.start),
            ("_step", step),
            ("_read", (k, v)),
        ):
            object.__setattr__(self, name, value)

    def parts(self) -> Generator[Part, None, None]:
        k, v = self.__dict__["_read"]
        yield from cut(
            k.shape[-2], self.__dict__["_step"], 0, self.start, lambda keys: (_part(k, keys), _part(v, keys))
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.k, self.v) if isinstance(x, Tensor))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Arrays:
        rest = iter(tensors)
        k, v = (next(rest) if isinstance(x, Tensor) else x for x in (self.k, self.v))
        return Arrays(k, v, self.__dict__["_step"], self.start)

    def __repr__(self) -> str:
        shown = (fspath(x) if isinstance(x, (str, PathLike)) else type(x).__name__ for x in (self.k, self.v))
        return f"Arrays({', '.join(map(repr, shown))})"


def _part(x: Any, keys: slice) -> Any:
    return x.read(keys) if isinstance(x, NumpyFile) else loaded(x[..., keys, :])


def _bytes(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else int(getattr(x, "nbytes", 0))


def loaded(x: Any) -> Any:
    """x in memory. What is mapped to a file is copied, and its pages are given back; anything else is x itself."""
    numpy = tracing.loaded("numpy")
    if numpy is None or not isinstance(x, numpy.memmap):
        return x
    copy = anonymous_memory(x.nbytes).numpy().view(x.dtype).reshape(x.shape)
    numpy.copyto(copy, x)
    mapping, mode = getattr(x, "_mmap", None), getattr(x, "mode", None)
    # pages of a mode "c" mapping may hold changes that no file has
    if mapping is not None and mode in ("r", "r+", "w+") and hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_DONTNEED)
    return copy
