"""OrderedCall: a call of ring_attention whose bits do not depend on how many ranks there are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from operator import add, and_, or_
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.call.of_part import part_gradients
from regard.call.part import QueriesAndKeys
from regard.core.dtypes import accumulator, exact
from regard.core.state import RowStats, State
from regard.parallel.circulation import circulate
from regard.parallel.ring_call import RingCall
from regard.parallel.shards import Shards

T = TypeVar("T")


class OrderedFold(Generic[T]):
    """Numbered parts, joined by twos in the order of their numbers, in whatever order they come.

    `waiting` holds what waits for its neighbour, by level and number, where a part of level n is 2 to the nth of them
    joined: of parts that come one behind the other, as many as the logarithm of `count`. What waits in one fold may be
    added to another.

    >>> fold = OrderedFold(5, lambda a, b: f"({a}{b})")
    >>> for number in (2, 1, 0, 4):
    ...     fold.add(number, "abcde"[number])
    >>> fold.waiting
    {(0, 2): 'c', (1, 0): '(ab)', (2, 1): 'e'}
    >>> fold.finish()
    '(((ab)c)e)'
    """

    def __init__(self, count: int, join: Callable[[T, T], T]) -> None:
        self.count, self.join = count, join
        self.waiting: dict[tuple[int, int], T | None] = {}

    def add(self, number: int, part: T | None, level: int = 0) -> None:
        """The part with that number on its level, once each; None for one that is neutral."""
        size = -(-self.count // 2**level)
        while size > 1:
            other = number ^ 1
            if other < size:
                if (level, other) not in self.waiting:
                    break
                neighbour = self.waiting.pop((level, other))
                a, b = (neighbour, part) if other < number else (part, neighbour)
                part = b if a is None else a if b is None else self.join(a, b)
            level, number, size = level + 1, number // 2, (size + 1) // 2
        assert (level, number) not in self.waiting
        self.waiting[level, number] = part

    def finish(self) -> T | None:
        """All parts joined; those that have not come are neutral."""
        top = (self.count - 1).bit_length(), 0
        while self.waiting and (at := min(self.waiting)) != top:
            self.add(at[1] ^ 1, None, at[0])
        return self.waiting.get(top)


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
            if first % grid or not torch.equal(
                at[start:stop], torch.arange(first, first + stop - start, dtype=torch.int64, device="cpu")
            ):
                raise ValueError(
                    f"deterministic={grid}: rank {rank} holds a part of a block of {grid} tokens of {name}, around "
                    f"token {first}; expected shards of whole blocks."
                )
            blocks.append((first // grid, slice(start, stop)))
            start = stop
        found.append(tuple(blocks))
    return tuple(found)


class Pair(NamedTuple):
    """A block of a rank's queries and a block of another's keys.

    row, col             which of the rank's blocks they are
    of_queries, of_keys  the numbers that the blocks have in the sequence
    rows, cols           where they lie in what the rank has
    """

    row: int
    col: int
    of_queries: int
    of_keys: int
    rows: slice
    cols: slice
    part: QueriesAndKeys


@dataclass(frozen=True, eq=False)
class OrderedCall(RingCall):
    """Every sum is one of blocks of `grid` queries and `grid` keys, added in the order of their numbers.

    For the gradients of keys and values, queries travel: each rank then adds up those of its own keys.
    """

    grid: int = 1

    def fold(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        rank, rows, count = self.peers.rank, self._rows()[self.peers.rank], self._count(self.key_shards)
        pairs = [self._pairs(rank, source) for source in range(self.peers.count)]
        folds = [OrderedFold[State](count + 1, or_) for _ in rows]  # the last part is the sink's
        with torch.no_grad(), exact(q.device.type), closing(self.blocks(*self._rounded(k, v))) as blocks:
            for source, k_there, v_there in blocks:
                for pair in pairs[source]:
                    k_part, v_part = k_there[..., pair.cols, :], v_there[..., pair.cols, :]
                    folds[pair.row].add(pair.of_keys, self.state(q[..., pair.rows, :], k_part, v_part, pair.part))
            states = [_empty(q[..., :0, :], v)]
            for (_, own), fold in zip(rows, folds, strict=True):
                if self.sink is not None:
                    fold.add(count, _of_sink(self.sink, q[..., own, :], v.shape[-1]))
                state = fold.finish()
                states.append(_empty(q[..., own, :], v) if state is None else state)
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
        rank, rows = self.peers.rank, self._rows()[self.peers.rank]
        pairs = [self._pairs(rank, source) for source in range(self.peers.count)]
        learned = tuple(t.detach().requires_grad_(need) for t, need in zip(self.tensors(), needs[1:], strict=True))
        queries = [q[..., own, :].detach().requires_grad_(needs[0]) for _, own in rows]
        call, count = self.with_tensors(learned), self._count(self.key_shards)
        folds = [OrderedFold[list[Tensor]](count + 1, _added) for _ in rows]  # the last part is the sink's

        def shares(at: int, state: State) -> list[Tensor]:
            """What a state adds to the gradients of a block of queries and of `learned`."""
            own, inputs = rows[at][1], [t for t in (queries[at], *learned) if t.requires_grad]
            found = part_gradients(state, whole.rows(own), g[..., own, :], delta[..., own], inputs)
            return [_or_zeros(x, t, g.dtype) for x, t in zip(found, inputs, strict=True)]

        with closing(self.blocks(k, v)) as blocks, torch.enable_grad():
            for source, k_there, v_there in blocks:
                for pair in pairs[source]:
                    k_part, v_part = k_there[..., pair.cols, :].detach(), v_there[..., pair.cols, :].detach()
                    state = call.state(queries[pair.row], k_part, v_part, pair.part)
                    folds[pair.row].add(pair.of_keys, shares(pair.row, state))
            for at in range(len(rows)) if call.sink is not None and call.sink.requires_grad else ():
                assert call.sink is not None
                folds[at].add(count, shares(at, _of_sink(call.sink, queries[at].detach(), v.shape[-1])))
        sums = [
            fold.finish() or [torch.zeros_like(t, dtype=g.dtype) for t in (of, *learned) if t.requires_grad]
            for fold, of in zip(folds, queries, strict=True)
        ]
        of_q = _joined([of_row[0] for of_row in sums], q, g.dtype) if needs[0] else None
        of_rows = [of_row[1 if needs[0] else 0 :] for of_row in sums]
        return [of_q, *self._over_rows(of_rows, learned, g)]

    def _over_rows(self, of_rows: list[list[Tensor]], learned: tuple[Tensor, ...], g: Tensor) -> list[Tensor | None]:
        """The gradients of `learned`, from what each block of this rank's queries adds to them, in g's dtype.

        Rank 0 gets the sums over all blocks of queries, in their order, and the others zeros: the sum over the group
        then has the bits of rank 0's.
        """
        wanted = [t for t in learned if t.requires_grad]
        if not wanted:
            return [None] * len(learned)
        rank, count, size = self.peers.rank, self._count(self.shards), sum(t.numel() for t in wanted)
        fold = OrderedFold[Tensor](count, add)
        for (number, _), part in zip(self._rows()[rank], of_rows, strict=True):
            fold.add(number, torch.cat([t.reshape(-1) for t in part]))
        places = [_places(count, rows) for rows in self._rows()]
        mine = [part for at in places[rank] if (part := fold.waiting[at]) is not None]
        own = torch.cat([g.new_zeros(0), *mine])
        sizes = [len(of_rank) * size if rank == 0 else 0 for of_rank in places]
        self.peers.tell("the gradients of the score")
        found = self.peers.exchange([own, *[own[:0]] * (self.peers.count - 1)], sizes)
        whole = OrderedFold[Tensor](count, add)
        for of_rank, flat in zip(places, found, strict=True) if rank == 0 else ():
            for (level, number), part in zip(of_rank, flat.view(len(of_rank), size), strict=True):
                whole.add(number, part, level)
        total = whole.finish()
        total = g.new_zeros(size) if total is None else total + 0.0  # -0 becomes 0, as by adding zeros
        parts = iter(total.split([t.numel() for t in wanted]))
        return [next(parts).view(t.shape) if t.requires_grad else None for t in learned]

    def _of_keys(
        self, q: Tensor, k: Tensor, v: Tensor, whole: RowStats, g: Tensor, delta: Tensor, needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of k and v, from queries as they come, with their cotangents and statistics."""
        rank, cols = self.peers.rank, self._cols()[self.peers.rank]
        pairs = [self._pairs(source, rank) for source in range(self.peers.count)]
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
                for pair in pairs[source]:
                    row, (k_part, v_part) = pair.rows, blocks[pair.col]
                    state = self.state(there[0][..., row, :].to(q.dtype), k_part, v_part, pair.part)
                    wanted = [t for t in (k_part, v_part) if t.requires_grad]
                    cotangents = there[1][..., row, :], there[4][..., row, 0]
                    found = iter(part_gradients(state, stats.rows(row), *cotangents, wanted))
                    for t, fold in zip((k_part, v_part), folds[pair.col], strict=True):
                        if t.requires_grad and (x := next(found)) is not None:
                            fold.add(pair.of_queries, x.to(g.dtype))
        sums = [
            [_or_zeros(fold.finish(), t, g.dtype) for fold, t in zip(*pairs, strict=True)]
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

    def _pairs(self, rank: int, source: int) -> list[Pair]:
        """The blocks of a rank's queries and those of another's keys, as far as the ones may see the others."""
        if not self.needed[rank][source]:
            return []
        whole = self.part(rank, source)
        assert whole.rows is not None
        every = [
            Pair(
                row, col, of_queries, of_keys, rows, cols, replace(whole, rows=whole.rows[rows], cols=whole.cols[cols])
            )
            for row, (of_queries, rows) in enumerate(self._rows()[rank])
            for col, (of_keys, cols) in enumerate(self._cols()[source])
        ]
        seen = self.seen([pair.part for pair in every])
        return [pair for pair, found in zip(every, seen, strict=True) if found]

    def _rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As other ranks get them."""
        return (k, v) if self.wire is None else (k.to(self.wire).to(k.dtype), v.to(self.wire).to(v.dtype))


def _empty(q: Tensor, v: Tensor) -> State:
    return State.empty(q.shape[:-1], v.shape[-1], dtype=accumulator(q.dtype), device=q.device)


def _of_sink(sink: Tensor, q: Tensor, dv: int) -> State:
    """The state of a sink () or (h,) for queries (*batch, h, n, dk), or without h."""
    logit = sink[:, None] if sink.dim() and q.dim() >= 4 else sink.reshape(())
    return State.of_sink(logit.expand(q.shape[:-1]), dv)


def _places(count: int, rows: tuple[tuple[int, slice], ...]) -> list[tuple[int, int]]:
    """Level and number of what waits once a rank has joined the parts of its blocks."""
    fold = OrderedFold[bool](count, and_)
    for number, _ in rows:
        fold.add(number, True)
    return sorted(fold.waiting)


def _added(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _or_zeros(found: Tensor | None, t: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(t, dtype=dtype) if found is None else found.to(dtype)


def _joined(parts: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat(parts, -2) if parts else torch.zeros_like(like, dtype=dtype)
