"""NumpyFile: keys, or values, in an .npy file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from regard.sources.files import StoredArray, opened_file


@dataclass(frozen=True, eq=False)
class NumpyFile:
    """An array of numbers, (*batch, hk, n, d), in an .npy file. reversed: it lies there with its axes reversed."""

    stored: StoredArray
    dtype: Any
    reversed: bool
    shape: tuple[int, ...]
    nbytes: int

    @staticmethod
    def of(file: str | PathLike[str]) -> NumpyFile:
        """ValueError where that is no such file, or is cut short. FileNotFoundError."""
        from numpy.lib import format as npy

        path, readers = fspath(file), {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        with opened_file(path, "Arrays reads what numpy.save writes, or takes the arrays themselves") as opened:
            try:
                shape, fortran, dtype = readers[npy.read_magic(opened)](opened)
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f"{path} is no .npy file of an array of numbers: {error}. Expected what numpy.save writes; of "
                    "other files pass the arrays, or a Source of your own."
                ) from error
            first = opened.tell()
            opened.seek(0)
            header = opened.read(first)
        if dtype.hasobject:
            raise ValueError(f"{path} holds objects of Python ({dtype}); expected an array of numbers.")
        # in Fortran's order it is, to C, the array with its axes reversed
        lying, axis = (shape[::-1], 1) if fortran else (shape, len(shape) - 2)
        stored = StoredArray(path, header, f"its array of shape {shape}", first, lying, axis, dtype.itemsize)
        stored.check_size()
        return NumpyFile(stored, dtype, fortran, shape, math.prod(shape) * dtype.itemsize)

    def read(self, keys: slice) -> Any:
        """The array of these keys."""
        lying = list(self.stored.shape)
        lying[self.stored.axis] = keys.stop - keys.start
        found = self.stored.read(keys).numpy().view(self.dtype).reshape(lying)
        return found.T if self.reversed else found
