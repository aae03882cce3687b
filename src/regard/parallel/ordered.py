"""OrderedCall: a call of ring_attention whose bits do not depend on how many ranks there are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from operator import add, or_
from typing import Generic, TypeVar

import torch
from torch import Tensor

from regard.core.dtypes import accumulator, exact
from regard.core.state import RowStats, State
from regard.parallel.circulation import circulate
from regard.parallel.ring_call import RingCall
from regard.parallel.shards import Shards
from regard.part_of_call import PartOfCall, part_gradients

T = TypeVar("T")


class OrderedFold(Generic[T]):
    """Numbered parts, joined by twos in the order of their numbers, in whatever order they come.

    It holds what waits for its neighbour: of parts that come one behind the other, as many as the logarithm of `count`.

    >>> fold = OrderedFold(5, lambda a, b: f"({a}{b})")
    >>> for number in (2, 1, 0, 4):
    ...     fold.add(number, "abcde"[number])
    >>> fold.finish()
    '(((ab)c)e)'
    """

    def __init__(self, count: int, join: Callable[[T, T], T]) -> None:
        self.count, self.join = count, join
        self._result: T | None = None
        self._missing = set(range(count))
        self._waiting: dict[tuple[int, int], T | None] = {}

    def add(self, number: int, part: T | None) -> None:
        """The part with that number, once each; None for one that is neutral."""
        self._missing.remove(number)
        level, size = 0, self.count
        while size > 1:
            other = number ^ 1
            if other < size:
                if (level, other) not in self._waiting:
                    self._waiting[level, number] = part
                    return
                neighbour = self._waiting.pop((level, other))
                a, b = (neighbour, part) if other < number else (part, neighbour)
                part = b if a is None else a if b is None else self.join(a, b)
            level, number, size = level + 1, number // 2, (size + 1) // 2
        self._result = part

    def finish(self) -> T | None:
        """All parts joined; those that have not come are neutral."""
        for number in sorted(self._missing):
            self.add(number, None)
        return self._result


def grid_blocks(shards: Shards, grid: int, name: str) -> tuple[tuple[tuple[int, slice], ...], ...]:
    """For each rank, the numbers of the blocks of `grid` tokens that it holds, and where they lie there.

    Raises ValueError where a block is divided over ranks.
    """
    found: list[tuple[tuple[int, slice], ...]] = []
    for rank, at in enumerate(shards.indices):
        blocks: list[tuple[int, slice]] = []
        start = 0
        while start < len(at):
            first = int(at[start])
            stop = start + min(grid, shards.n - first)
            if first % grid or not torch.equal(at[start:stop], torch.arange(first, first + stop - start)):
                raise ValueError(
                    f"deterministic={grid}: rank {rank} holds a part of a block of {grid} tokens of {name}, around "
                    f"token {first}; expected shards of whole blocks."
                )
            blocks.append((first // grid, slice(start, stop)))
            start = stop
        found.append(tuple(blocks))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class OrderedCall(RingCall):
    """Every sum is one of blocks of `grid` queries and `grid` keys, added in the order of their numbers.

    For the gradients of keys and values, queries travel: each rank then adds up those of its own keys.
    """

    grid: int = 1

    def fold(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        rank, rows, cols = self.peers.rank, self._rows(), self._cols()
        count, dtype = self._count(self.key_shards), accumulator(q.dtype)
        folds = [OrderedFold[State](count + 1, or_) for _ in rows[rank]]  # the last part is the sink's
        with torch.no_grad(), exact(q.device.type), closing(self.blocks(*self._rounded(k, v))) as blocks:
            for source, k_there, v_there in blocks:
                for (_, own), fold in zip(rows[rank], folds, strict=True):
                    for number, there in cols[source]:
                        part = self._pair(rank, own, source, there)
                        if self.sees(part):
                            k_part, v_part = k_there[..., there, :], v_there[..., there, :]
                            fold.add(number, self.state(q[..., own, :], k_part, v_part, part))
            states = [State.empty((*q.shape[:-2], 0), v.shape[-1], dtype=dtype)]
            for (_, own), fold in zip(rows[rank], folds, strict=True):
                if self.sink is not None:
                    fold.add(count, _of_sink(self.sink, q[..., own, :], v.shape[-1]))
                state = fold.finish()
                states.append(State.empty(q[..., own, 0].shape, v.shape[-1], dtype=dtype) if state is None else state)
        return State(*(torch.cat([getattr(s, name) for s in states], -2 if name == "o" else -1) for name in "mlo"))

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, whole: RowStats, g: Tensor, delta: Tensor, needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        k, v = self._rounded(k, v)
        with exact(q.device.type):
            of_q, *of_tensors = self._of_queries(q, k, v, whole, g, delta, (needs[0], *needs[3:]))
            of_keys = self._of_keys(q, k, v, whole, g, delta, needs[1:3]) if any(needs[1:3]) else [None, None]
        return [of_q, *of_keys, *of_tensors]

    def _of_queries(
        self, q: Tensor, k: Tensor, v: Tensor, whole: RowStats, g: Tensor, delta: Tensor, needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of q and of `tensors()`, from keys and values as they come."""
        rank, rows, cols = self.peers.rank, self._rows()[self.peers.rank], self._cols()
        learned = tuple(t.detach().requires_grad_(need) for t, need in zip(self.tensors(), needs[1:], strict=True))
        queries = [q[..., own, :].detach().requires_grad_(needs[0]) for _, own in rows]
        call, sums = self.with_tensors(learned), [torch.zeros_like(t, dtype=g.dtype) for t in learned]
        folds = [OrderedFold[Tensor](self._count(self.key_shards), add) for _ in rows]

        def share(at: int, state: State) -> Tensor | None:
            """What a state adds to the gradient of a block of queries; what it adds to the others is added."""
            inputs, own = (queries[at], *learned), rows[at][1]
            wanted = [t for t in inputs if t.requires_grad]
            found = iter(part_gradients(state, whole.rows(own), g[..., own, :], delta[..., own], wanted))
            of_q, *of_learned = (next(found) if t.requires_grad else None for t in inputs)
            for total, x in zip(sums, of_learned, strict=True):
                if x is not None:
                    total += x
            return None if of_q is None else of_q.to(g.dtype)

        with closing(self.blocks(k, v)) as blocks, torch.enable_grad():
            for source, k_there, v_there in blocks:
                for at, (_, own) in enumerate(rows):
                    for number, there in cols[source]:
                        part = self._pair(rank, own, source, there)
                        if self.sees(part):
                            k_part, v_part = k_there[..., there, :].detach(), v_there[..., there, :].detach()
                            folds[at].add(number, share(at, call.state(queries[at], k_part, v_part, part)))
            for at in range(len(rows)) if call.sink is not None else ():
                assert call.sink is not None
                share(at, _of_sink(call.sink, queries[at].detach(), v.shape[-1]))
        of_q = _joined([_found(fold, t, g.dtype) for fold, t in zip(folds, queries, strict=True)], q, g.dtype)
        return [of_q if needs[0] else None, *(t if need else None for t, need in zip(sums, needs[1:], strict=True))]

    def _of_keys(
        self, q: Tensor, k: Tensor, v: Tensor, whole: RowStats, g: Tensor, delta: Tensor, needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of k and v, from queries as they come, with their cotangents and statistics."""
        rank, rows, cols = self.peers.rank, self._rows(), self._cols()[self.peers.rank]
        folds = [[OrderedFold[Tensor](self._count(self.shards), add) for _ in range(2)] for _ in cols]
        blocks = [
            [t[..., own, :].detach().requires_grad_(x) for t, x in zip((k, v), needs, strict=True)] for _, own in cols
        ]
        given = (q.to(g.dtype), g, whole.m[..., None], whole.l[..., None], delta[..., None])
        own, widths = torch.cat(given, -1).detach(), [t.shape[-1] for t in given]
        sizes = [own.shape[:-2].numel() * n * own.shape[-1] for n in self.shards.lengths]
        seen_by = tuple(zip(*self.needed, strict=True))
        with closing(circulate(self.peers, [own], sizes, seen_by)) as arriving, torch.enable_grad():
            for source, flat in arriving:
                if flat is None or not seen_by[rank][source]:
                    continue
                there = flat.view(*own.shape[:-2], self.shards.lengths[source], own.shape[-1]).split(widths, -1)
                stats = RowStats(there[2][..., 0], there[3][..., 0])
                for at, (_, columns) in enumerate(cols):
                    for number, row in rows[source]:
                        part = self._pair(source, row, rank, columns)
                        if not self.sees(part):
                            continue
                        state = self.state(there[0][..., row, :].to(q.dtype), blocks[at][0], blocks[at][1], part)
                        wanted = [t for t in blocks[at] if t.requires_grad]
                        cotangents = there[1][..., row, :], there[4][..., row, 0]
                        found = iter(part_gradients(state, stats.rows(row), *cotangents, wanted))
                        for t, fold in zip(blocks[at], folds[at], strict=True):
                            if t.requires_grad and (x := next(found)) is not None:
                                fold.add(number, x.to(g.dtype))
        sums = [
            [_found(fold, t, g.dtype) for fold, t in zip(*pairs, strict=True)]
            for pairs in zip(folds, blocks, strict=True)
        ]
        return [
            _joined([of_block[n] for of_block in sums], t, g.dtype) if need else None
            for n, (t, need) in enumerate(zip((k, v), needs, strict=True))
        ]

    def _rows(self) -> tuple[tuple[tuple[int, slice], ...], ...]:
        return grid_blocks(self.shards, self.grid, "q")

    def _cols(self) -> tuple[tuple[tuple[int, slice], ...], ...]:
        return grid_blocks(self.key_shards, self.grid, "k")

    def _count(self, shards: Shards) -> int:
        return -(-shards.n // self.grid)

    def _pair(self, rank: int, rows: slice, source: int, cols: slice) -> PartOfCall:
        """A block of a rank's queries and one of another's keys."""
        whole = self.part(rank, source)
        assert whole.rows is not None
        return PartOfCall(whole.rows[rows], whole.cols[cols], whole.nq, whole.nk)

    def _rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As other ranks get them."""
        return (k, v) if self.wire is None else (k.to(self.wire).to(k.dtype), v.to(self.wire).to(v.dtype))


def _of_sink(sink: Tensor, q: Tensor, dv: int) -> State:
    """The state of a sink () or (h,) for queries (*batch, h, n, dk), or without h."""
    logit = sink[:, None] if sink.dim() and q.dim() >= 4 else sink.reshape(())
    return State.of_sink(logit.expand(q.shape[:-1]), dv)


def _found(fold: OrderedFold[Tensor], t: Tensor, dtype: torch.dtype) -> Tensor:
    found = fold.finish()
    return torch.zeros_like(t, dtype=dtype) if found is None else found


def _joined(parts: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat(parts, -2) if parts else torch.zeros_like(like, dtype=dtype)
