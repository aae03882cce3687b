"""BlockTables: which pages of a pool each sequence has, how many sequences read a page, which pages are free."""

from __future__ import annotations

from collections import Counter
from operator import add

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
        size = self.page_size
        sequences = list(zip(self.tables, self.lengths, new, strict=True))
        counts = [-(-(length + n) // size) - len(table) for table, length, n in sequences]
        partial = [table[-1] for table, length, n in sequences if n and length % size and self._readers[table[-1]] > 1]
        if not partial and not any(counts):
            self._measure()
            return []
        copies = sum(min(writers, self._readers[page] - 1) for page, writers in Counter(partial).items())
        if copies + sum(counts) > len(self._free):
            raise ValueError(
                f"append: {copies + sum(counts)} more pages are needed, {len(self._free)} of {len(self._readers)} are "
                "free. Crop or drop sequences, or make the cache with more pages."
            )
        copied: list[tuple[int, int]] = []
        for (table, length, n), count in zip(sequences, counts, strict=True):
            if n and length % size and self._readers[table[-1]] > 1:
                shared = table[-1]
                table[-1] = self._take()
                self._release([shared])
                copied.append((shared, table[-1]))
            table += [self._take() for _ in range(count)]
        self._write(counts, copied=bool(copied))
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
        self.spare = min(
            (
                len(table) * self.page_size - length if table and self._readers[table[-1]] == 1 else 0
                for table, length in zip(self.tables, self.lengths, strict=True)
            ),
            default=0,
        )

    def _take(self) -> int:
        page = self._free.pop()
        self._readers[page] = 1
        return page

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._readers[page] -= 1
            if not self._readers[page]:
                self._free.append(page)

    def _write(self, counts: list[int], copied: bool) -> None:
        """Brings the tensor up to date, where the last counts[b] pages of sequence b are new."""
        room = self.tensor.shape[1]
        most = max(map(len, self.tables))
        if most > room:
            self.tensor = self._written_out(max(most, 2 * room))
            return
        for b, (table, count) in enumerate(zip(self.tables, counts, strict=True)):
            first = max(len(table) - count - copied, 0)  # the page before the new ones may be a copy
            if first == len(table) - 1:  # a third of the time of what follows
                self.tensor[b, first] = table[first]
            elif first < len(table):
                self.tensor[b, first : len(table)] = torch.tensor(table[first:], dtype=torch.int32)

    def _written_out(self, room: int) -> Tensor:
        with torch.inference_mode(False):  # a tensor made in inference mode could be written in no other mode
            rows = [table + [0] * (room - len(table)) for table in self.tables]
            return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), room)
