"""Forms: how a cache keeps the numbers of its keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.backends.native.direct import write_page_rows, write_rounded_page_rows, write_rounded_rows, write_rows
from regard.core.dtypes import FLOATING
from regard.core.int8_rows import Int8Rows, products, rounded
from regard.nn.cache.base import check_like, check_rows

Dtypes = tuple[torch.dtype, torch.dtype]  # of keys and of values


class Form(ABC):
    """What keys and values become in a cache: tensors of as many rows, which lie in a buffer each; and the way back."""

    @abstractmethod
    def kept(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """What is written to the buffers, (*lead, n, width) each."""

    @abstractmethod
    def read(self, rows: Sequence[Tensor], dtypes: Dtypes) -> tuple[Tensor, Tensor]:
        """Keys and values from rows of the buffers, as an append of keys and values of these dtypes returns them."""

    def check(
        self,
        buffers: tuple[Tensor, ...],
        lead: tuple[int, ...],
        k: Tensor,
        v: Tensor,
        names: tuple[str, str] = ("k", "v"),
    ) -> None:
        """Errors for tokens that are not like those in the buffers: (*lead, n, d). names: what errors call them."""
        for buffer, t, name in zip(buffers, (k, v), names, strict=False):
            self._check_rows(buffer, lead, t, name)

    @abstractmethod
    def _check_rows(self, buffer: Tensor, lead: tuple[int, ...], t: Tensor, name: str) -> None:
        """Errors for keys, or values, that are not like those in their buffer."""

    @abstractmethod
    def shapes(self, dk: int, dv: int, dtype: torch.dtype | None) -> tuple[tuple[int, torch.dtype | None], ...]:
        """The width and the dtype of each buffer."""

    def write(self, buffers: tuple[Tensor, ...], row: int, k: Tensor, v: Tensor) -> bool:
        """Writes a few tokens to the rows from `row` on, in one step; whether that was done."""
        return False

    def write_pages(
        self, most: int, lengths: list[int], table: Tensor, pools: tuple[Tensor, ...], k: Tensor, v: Tensor
    ) -> int | None:
        """The same behind the rows of each sequence in pages, how many; None where it was not done: write_page_rows."""
        return None


@dataclass(frozen=True)
class AsGiven(Form):
    """Keys and values as they come, in a buffer each."""

    def kept(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return k, v

    def read(self, rows: Sequence[Tensor], dtypes: Dtypes) -> tuple[Tensor, Tensor]:
        return rows[0], rows[1]

    def _check_rows(self, buffer: Tensor, lead: tuple[int, ...], t: Tensor, name: str) -> None:
        check_like(buffer, lead, t, name)

    def shapes(self, dk: int, dv: int, dtype: torch.dtype | None) -> tuple[tuple[int, torch.dtype | None], ...]:
        return (dk, dtype), (dv, dtype)

    def write(self, buffers: tuple[Tensor, ...], row: int, k: Tensor, v: Tensor) -> bool:
        return write_rows(row, k, buffers[0], v, buffers[1])

    def write_pages(
        self, most: int, lengths: list[int], table: Tensor, pools: tuple[Tensor, ...], k: Tensor, v: Tensor
    ) -> int | None:
        return write_page_rows(most, lengths, table, k, pools[0], v, pools[1])


@dataclass(frozen=True)
class Int8(Form):
    """Keys and values rounded to int8, and a scale for each row: see core.int8_rows.rounded."""

    def kept(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        (keys, key_scales), (values, value_scales) = rounded(k, "k"), rounded(v, "v")
        return keys, values, key_scales, value_scales

    def write(self, buffers: tuple[Tensor, ...], row: int, k: Tensor, v: Tensor) -> bool:
        keys, values, key_scales, value_scales = buffers
        return write_rounded_rows(row, k, (keys, key_scales), v, (values, value_scales))

    def write_pages(
        self, most: int, lengths: list[int], table: Tensor, pools: tuple[Tensor, ...], k: Tensor, v: Tensor
    ) -> int | None:
        keys, values, key_scales, value_scales = pools
        return write_rounded_page_rows(most, lengths, table, k, (keys, key_scales), v, (values, value_scales))

    def read(self, rows: Sequence[Tensor], dtypes: Dtypes) -> tuple[Tensor, Tensor]:
        keys, values, key_scales, value_scales = rows
        of_keys, of_values = dtypes
        if torch.compiler.is_compiling():  # a graph reads no int8
            return products(keys, key_scales, of_keys), products(values, value_scales, of_values)
        return Int8Rows(keys, key_scales, of_keys), Int8Rows(values, value_scales, of_values)

    def _check_rows(self, buffer: Tensor, lead: tuple[int, ...], t: Tensor, name: str) -> None:
        check_rows(buffer, lead, t, name)

    def shapes(self, dk: int, dv: int, dtype: torch.dtype | None) -> tuple[tuple[int, torch.dtype | None], ...]:
        return (dk, torch.int8), (dv, torch.int8), (1, torch.float32), (1, torch.float32)


def form_of(dtype: torch.dtype | None, name: str) -> Form:
    """The form of a cache that is made with a dtype, None for torch's default one; ValueError for others."""
    if dtype not in (None, torch.int8, *FLOATING):
        raise ValueError(
            f"{name}(dtype={dtype}): expected the dtype of keys and values, one of {', '.join(map(str, FLOATING))}, or "
            "torch.int8, which rounds them."
        )
    return Int8() if dtype == torch.int8 else AsGiven()


def form_of_any(
    dtype: torch.dtype | None, name: str, way: str = "convert tokens with .to(...) before they are appended"
) -> Form:
    """The same for a cache that takes the dtype of its first tokens; ValueError for other dtypes than None and int8.

    way: what the error advises
    """
    if dtype not in (None, torch.int8):
        raise ValueError(
            f"{name}(dtype={dtype}): expected None, which keeps tokens in their own dtype, or torch.int8, which rounds "
            f"them; {way}."
        )
    return form_of(dtype, name)
