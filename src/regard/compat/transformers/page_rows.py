"""PageRows: how a page of transformers' continuous batching holds the key, or value, of one token and head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.backends.native.direct import round_rows
from regard.core.int8_rows import Int8Rows, rounded
from regard.core.paged import Paged

_SCALE = torch.float32.itemsize  # bytes


class PageRows(ABC):
    """Keys, or values, as rows of pages (pages, page_size, heads, width), and the way back."""

    @abstractmethod
    def packed(self, x: Tensor) -> Tensor:
        """Tokens (heads, n, d) as rows, (n, heads, width)."""

    @abstractmethod
    def unpacked(self, rows: Tensor) -> Tensor:
        """The keys, (heads, n, d), that rows (n, heads, width) hold."""

    @abstractmethod
    def in_pages(self, pages: Tensor, table: Tensor, n: int) -> Tensor:
        """The keys of some sequences where they lie, (batch, heads, n, d). table: as core.paged.Paged has it."""


@dataclass(frozen=True)
class RowsAsGiven(PageRows):
    """Each row is the d features."""

    def packed(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def unpacked(self, rows: Tensor) -> Tensor:
        return rows.transpose(0, 1)

    def in_pages(self, pages: Tensor, table: Tensor, n: int) -> Tensor:
        return Paged(pages.transpose(1, 2), table, n)


@dataclass(frozen=True)
class RowsOfInt8(PageRows):
    """Each row is d numbers of int8, up to 3 bytes without meaning, and the float32 scale of the numbers.

    d      features
    dtype  of the keys for their readers: the model's
    """

    d: int
    dtype: torch.dtype

    def packed(self, x: Tensor) -> Tensor:
        numbers, scales = round_rows(x) or rounded(x)
        bytes_of_scales = scales.contiguous().view(torch.int8)
        return torch.cat((nn.functional.pad(numbers, (0, -self.d % _SCALE)), bytes_of_scales), -1).transpose(0, 1)

    def unpacked(self, rows: Tensor) -> Tensor:
        numbers, scales = self._parts(rows.transpose(0, 1))
        return Int8Rows(numbers, scales, self.dtype)

    def in_pages(self, pages: Tensor, table: Tensor, n: int) -> Tensor:
        numbers, scales = self._parts(pages.transpose(1, 2))
        return Int8Rows(Paged(numbers, table, n), Paged(scales, table, n), self.dtype)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers (..., d), and scales (..., 1), as views."""
        return rows[..., : self.d], rows[..., -_SCALE:].view(torch.float32)


def width_of_int8(d: int) -> int:
    """Bytes of a row of RowsOfInt8."""
    return d + -d % _SCALE + _SCALE


def page_rows(pages: Tensor, x: Tensor) -> PageRows:
    """How pages hold tokens like x."""
    return RowsOfInt8(x.shape[-1], x.dtype) if pages.dtype == torch.int8 else RowsAsGiven()
