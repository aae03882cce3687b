"""StoredArray: an array in a file, read and not mapped; and the memory that parts of files are read into.

A file that becomes shorter ends a process that has mapped it by SIGBUS; one that reads it gets an error.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, FileIO

import torch
from torch import Tensor

from regard.core.shapes import count_of


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array in a file, its numbers one behind another in C order.

    file    its path
    header  how the file begins: its layout, which must not change while parts are read
    name    what messages call the array, with its shape
    first   where the array begins, in bytes
    shape   (*before, n, *behind); `axis` is that of the n keys
    """

    file: str
    header: bytes
    name: str
    first: int
    shape: tuple[int, ...]
    axis: int
    item_bytes: int

    @property
    def _end(self) -> int:
        return self.first + math.prod(self.shape) * self.item_bytes

    def check_size(self) -> None:
        """Raises ValueError where the file ends before the array does."""
        size = os.stat(self.file).st_size
        if size < self._end:
            raise ValueError(
                f"{self.file} has {count_of(size, 'byte')}; by its header, {self.name} needs {self._end}. "
                "The file was cut short: copy it or write it again."
            )

    def read(self, keys: slice) -> Tensor:
        """The bytes of some keys, uint8 (count,), of an array like the whole but with fewer keys.

        EOFError where the file has become shorter, ValueError where its header is another one.
        """
        row = math.prod(self.shape[self.axis + 1 :]) * self.item_bytes
        lead, n, run = math.prod(self.shape[: self.axis]), self.shape[self.axis], (keys.stop - keys.start) * row
        bytes_read = anonymous_memory(lead * run)
        if not bytes_read.numel():
            return bytes_read
        to = memoryview((ctypes.c_uint8 * (lead * run)).from_address(bytes_read.data_ptr())).cast("B")
        with FileIO(self.file) as file:
            header = bytearray(len(self.header))
            if file.readinto(header) != len(header) or bytes(header) != self.header:
                raise ValueError(
                    f"{self.file} was written anew since this source was made: its header is another one. Make the "
                    "source again, and write a file under another name, to be renamed when it is whole."
                )
            for index in range(lead):
                file.seek(self.first + (index * n + keys.start) * row)
                self._fill(file, to[index * run : (index + 1) * run])
        return bytes_read

    def _fill(self, file: FileIO, to: memoryview) -> None:
        filled = 0
        while filled < len(to):  # a call reads 2 GB at most
            count = file.readinto(to[filled:])
            if not count:
                size = count_of(os.fstat(file.fileno()).st_size, "byte")
                raise EOFError(
                    f"{self.file} has {size}; by its header, {self.name} needs "
                    f"{self._end}. The file became shorter since this source was made: write a file under another "
                    "name, and rename it when it is whole."
                )
            filled += count


def opened_file(path: str, expected: str) -> BufferedReader:
    """A file opened for reading; FileNotFoundError, with what is `expected`, where there is none."""
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; {expected}.") from None


def anonymous_memory(count: int) -> Tensor:
    """uint8 (count,) of zeros in a mapping of its own, which the system gets back when the tensor is freed.

    Of blocks of up to 32 MB, malloc keeps many: a thread reads parts and another drops them, glibc has a heap for each
    thread, and an aligned block that was freed there is too short for the next aligned one of its size.
    """
    if not count:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    mapping = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        # fewer faults; a kernel without huge pages raises
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
