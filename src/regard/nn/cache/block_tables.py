"""BlockTables: which pages of a pool each sequence has, how many sequences read a page, which pages are free."""

from __future__ import annotations

from array import array
from collections import Counter
from operator import add
from typing import Any

import torch
from torch import Tensor


class BlockTables:
    """The pages of sequences, in order, and how many tokens each sequence has. Page numbers only: it holds no keys.

    tables   the pages of each sequence, ceil(length / page_size) of them
    lengths  tokens of each sequence
    spare    how many more tokens of each sequence surely fit in pages that no other reads; `reserve` finds out
    tensor   the tables as int32 (batch, room), written in place by `reserve`, replaced where it is full and by
             `reorder`; behind a sequence's last page, any page of the pool
    """

    def __init__(self, batch: int, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.tables: list[list[int]] = [[] for _ in range(batch)]
        self.lengths = [0] * batch
        self.spare = 0
        self.tensor = self._written_out(1)
        self._readers = [0] * pages  # how many tables a page stands in
        self._free = list(range(pages))[::-1]

    @property
    def free(self) -> int:
        """How many pages stand in no table."""
        return len(self._free)

    def reserve(self, new: list[int]) -> list[tuple[int, int]]:
        """Gives sequence b pages of its own for new[b] more tokens; ValueError, and no change, if too few are free.

        Returns the pages to be copied, (from, to): several sequences read them, and one of them is about to write.
        """
        size, readers, tables, lengths = self.page_size, self._readers, self.tables, self.lengths
        pages = 0  # that are needed
        writers: Counter[int] = Counter()  # of each page that others read too: the sequences that write to it now
        for table, length, n in zip(tables, lengths, new, strict=True):
            pages += -(-(length + n) // size) - len(table)
            if n and length % size and readers[table[-1]] > 1:
                writers[table[-1]] += 1
        if pages or writers:
            pages += sum(min(count, readers[page] - 1) for page, count in writers.items())
            if pages > len(self._free):
                raise ValueError(
                    f"append: {pages} more pages are needed, {len(self._free)} of {len(readers)} are free. Crop or "
                    "drop sequences, or make the cache with more pages."
                )
        copied: list[tuple[int, int]] = []
        for b, (table, length, n) in enumerate(zip(tables, lengths, new, strict=True)):
            if n and length % size and readers[table[-1]] > 1:
                shared = table[-1]
                table[-1] = self._take()
                self._release([shared])
                copied.append((shared, table[-1]))
                self._write(b, len(table) - 1)
            while len(table) * size < length + n:
                table.append(self._take())
                self._write(b, len(table) - 1)
        self._measure()
        return copied

    def advance(self, new: list[int]) -> None:
        """Counts new[b] more tokens of sequence b, whose pages were reserved."""
        self.lengths = list(map(add, self.lengths, new))
        self.spare -= max(new) if new else 0

    def crop(self, lengths: list[int]) -> None:
        """Gives back the pages behind so many tokens of each sequence."""
        for table, left in zip(self.tables, lengths, strict=True):
            kept = -(-left // self.page_size)
            self._release(table[kept:])
            del table[kept:]
        self.lengths, self.spare = lengths, 0

    def reorder(self, chosen: list[int]) -> None:
        """Sequence b becomes what sequence chosen[b] was: pages are shared, not copied."""
        before = [page for table in self.tables for page in table]
        self.tables = [list(self.tables[b]) for b in chosen]
        self.lengths = [self.lengths[b] for b in chosen]
        for table in self.tables:
            for page in table:
                self._readers[page] += 1
        self._release(before)
        self.spare = 0
        self.tensor = self._written_out(self.tensor.shape[1])

    def _measure(self) -> None:
        """Finds `spare`."""
        spare = [
            len(table) * self.page_size - length if table and self._readers[table[-1]] == 1 else 0
            for table, length in zip(self.tables, self.lengths, strict=True)
        ]
        self.spare = min(spare, default=0)

    def _take(self) -> int:
        page = self._free.pop()
        self._readers[page] = 1
        return page

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._readers[page] -= 1
            if not self._readers[page]:
                self._free.append(page)

    def _write(self, b: int, at: int) -> None:
        """Writes page `at` of sequence b to the tensor, which gets twice the room where it is full."""
        room = self.tensor.shape[1]
        if at < room:
            self._cells[b * room + at] = self.tables[b][at]
        else:
            self.tensor = self._written_out(max(at + 1, 2 * room))

    def _written_out(self, room: int) -> Tensor:
        """A new tensor of the tables. Its memory is `_cells`, where Python writes a number faster than torch does."""
        rows = [table + [0] * (room - len(table)) for table in self.tables]
        self._cells = array("i", [page for row in rows for page in row])
        with torch.inference_mode(False):
            if not self._cells:
                return torch.empty(len(rows), room, dtype=torch.int32, device="cpu")
            return torch.frombuffer(self._cells, dtype=torch.int32).reshape(len(rows), room)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy makes the tensor anew: copied one by one, it and its memory would part."""
        self.__dict__.update(state)
        self.tensor = self._written_out(self.tensor.shape[1])
