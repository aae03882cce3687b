"""Ranks: those over which a sequence lies, of a group or of a mesh."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from regard.parallel.peers import Peers


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks over which a sequence lies: of a group, or of a mesh (rows, ranks of a row), numbered row by row.

    levels: the peers of this rank: of its group; or of its row, then of its column.
    """

    levels: tuple[Peers, ...]

    @staticmethod
    def of(group: Any, timeout: float | None = None) -> Ranks:
        """Of a process group, a DeviceMesh of one or two dimensions, or None: all processes."""
        if getattr(group, "ndim", 1) == 2:
            return Ranks(tuple(Peers.of(group.get_group(dim), timeout) for dim in (1, 0)))
        return Ranks((Peers.of(group, timeout),))

    @property
    def rank(self) -> int:
        found, size = 0, 1
        for peers in self.levels:
            found, size = found + size * peers.rank, size * peers.count
        return found

    @contextmanager
    def telling(self) -> Generator[None]:
        """As of `Peers`: an error is sent to the row, which sends it to the columns."""
        with ExitStack() as stack:
            for peers in reversed(self.levels):
                stack.enter_context(peers.telling())
            yield

    @contextmanager
    def together(self, step: str) -> Generator[None]:
        """As of `Peers`."""
        with self.telling():
            yield
            for peers in self.levels:
                peers.tell(step)

    def sizes(self, lengths: Sequence[int]) -> list[tuple[Peers, list[int]]]:
        """Each level, and of what its ranks have gathered before it how much it is, from the lengths of all ranks."""
        found: list[tuple[Peers, list[int]]] = []
        size = 1  # of what a rank has gathered, in ranks
        for peers in self.levels:
            first = self.rank // (size * peers.count) * (size * peers.count)
            starts = [first + size * n for n in range(peers.count)]
            found.append((peers, [sum(lengths[start : start + size]) for start in starts]))
            size *= peers.count
        return found

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """These integers of every rank, by rank."""
        found = [list(numbers)]
        for peers in self.levels:
            rows = peers.gather([number for of_rank in found for number in of_rank])
            found = [row[n : n + len(numbers)] for row in rows for n in range(0, len(row), len(numbers))]
        return found
