"""RingCall: one call of ring_attention, its blocks one after another, and its gradients."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.api import attention_state
from regard.backends.base import Backend
from regard.backends.streaming.backward import output_cotangents
from regard.call.of_part import mask_of_part, part_gradients, score_of_part
from regard.call.part import QueriesAndKeys
from regard.core.cotangents import linear_in
from regard.core.dropout import Dropout
from regard.core.dtypes import exact
from regard.core.errors import ShapeError, Unsupported
from regard.core.positions import Positions, resolve_positions
from regard.core.region import Frame
from regard.core.state import RowStats, State
from regard.masks.algebra import Cover, Everything, Mask
from regard.parallel.circulation import ReturnedGradients, circulate
from regard.parallel.peers import Peers
from regard.parallel.shards import Shards
from regard.scores.algebra import Score

# Queries and keys of the tiles by which a block is known to be hidden.
TILE = (64, 1024)


@dataclass(frozen=True, eq=False)
class RingCall:
    """The arguments of a call but q, k and v, and which rank's queries see some of which rank's keys."""

    peers: Peers
    shards: Shards
    key_shards: Shards
    score: Score
    mask: Mask
    positions: Positions | None
    sink: Tensor | None
    dropout: Dropout | None
    backend: Backend | None
    wire: torch.dtype | None
    needed: tuple[tuple[bool, ...], ...] = ()
    whole: Frame | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """What may have a gradient besides q, k and v."""
        return (*self.score.tensors(), *(() if self.sink is None else (self.sink,)))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> RingCall:
        rest = iter(tensors)
        return replace(self, score=self.score.with_tensors(rest), sink=None if self.sink is None else next(rest))

    def placed(self, q: Tensor, positions: Positions | None) -> RingCall:
        """With positions of all tokens, where something reads them, and with `needed`."""
        nq, nk, headed = self.shards.n, self.key_shards.n, q.dim() >= 4
        batch, heads = (tuple(q.shape[:-3]), q.shape[-3]) if headed else (tuple(q.shape[:-2]), 1)
        positional = next((x for x in (self.mask, self.score) if x.compares_positions()), None)
        at = resolve_positions(positions, nq, nk, batch, positional, q.device)
        whole = Frame(batch, heads, nq, nk, at, headed)
        error = self.mask.shape_error(whole)
        if error is not None:
            raise ShapeError(error)
        here = replace(self, positions=at if positional is not None or self.dropout is not None else None, whole=whole)
        count = self.peers.count
        seen = here.seen([here.part(r, s) for r in range(count) for s in range(count)])
        return replace(here, needed=tuple(tuple(seen[r * count : (r + 1) * count]) for r in range(count)))

    def seen(self, parts: Sequence[QueriesAndKeys]) -> list[bool]:
        """Whether some query of each part may see some of its keys, as far as the mask knows without looking at all.

        The device is read once, for all parts.
        """
        assert self.whole is not None
        at, covered, found = self.whole.positions, list[Tensor](), list[bool]()
        for part in parts:
            assert part.rows is not None
            nq, nk = len(part.rows), len(part.cols)
            found.append(0 not in (nq, nk, self.whole.heads, *self.whole.batch))
            if found[-1] and type(self.mask) is not Everything:
                frame = replace(
                    self.whole, nq=nq, nk=nk, positions=Positions(part.of_queries(at.q), part.of_keys(at.k))
                )
                covered.append((mask_of_part(self.mask, part).cover(frame.tiling(*TILE)) != Cover.NONE).any())
        if not covered:
            return found
        answers = iter(torch.stack(covered).tolist())
        return [possible and next(answers) for possible in found]

    def part(self, rank: int, source: int) -> QueriesAndKeys:
        """The queries of one rank and the keys of another."""
        rows, cols = self.shards.of_ranks[rank], self.key_shards.of_ranks[source]
        return QueriesAndKeys(rows, cols, self.shards.n, self.key_shards.n)

    def state(self, q: Tensor, k: Tensor, v: Tensor, part: QueriesAndKeys, sink: Tensor | None = None) -> State:
        """Of the queries of a part, for its keys."""
        at = self.positions
        return attention_state(
            q,
            k,
            v,
            score=score_of_part(self.score, part),
            mask=mask_of_part(self.mask, part),
            positions=None if at is None else Positions(part.of_queries(at.q), part.of_keys(at.k)),
            sink=sink,
            dropout=self.dropout,
            backend=self.backend,
        )

    def fold(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        """The state of all keys for this rank's queries."""
        state, rank = None, self.peers.rank
        with torch.no_grad(), exact(q.device.type), closing(self.blocks(k, v)) as blocks:
            for source, k_there, v_there in blocks:
                sink = self.sink if source == rank else None  # it is counted once, with this rank's own keys
                found = self.state(q, k_there, v_there, self.part(rank, source), sink)
                state = found if state is None else state | found
        assert state is not None
        return state

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, whole: RowStats, g: Tensor, delta: Tensor, needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Those of q, k, v and `tensors()` for which `needs` is true, in the dtype of sums.

        The gradient of a block goes from each rank that computes it to the next one that does, and from the last home.
        """
        rank, need_kv = self.peers.rank, needs[1:3]
        fixed = [
            t.detach().requires_grad_(need)
            for t, need in zip((q, *self.tensors()), (needs[0], *needs[3:]), strict=True)
        ]
        call, wanted = self.with_tensors(tuple(fixed[1:])), [t for t, need in zip((k, v), need_kv, strict=True) if need]
        sizes = [sum(_numbers(t, n) for t in wanted) for n in self.key_shards.lengths]
        travelling = ReturnedGradients(self.peers, self.needed, sizes, g) if wanted else None
        sums, places = list[Tensor | None](), list[Tensor]()
        with exact(q.device.type), closing(self.blocks(k, v, travelling)) as blocks:
            for source, *there in blocks:
                kv = [t.detach().requires_grad_(need) for t, need in zip(there, need_kv, strict=True)]
                shares = call._shares(fixed, kv, source, whole, g, delta)
                if source == rank:  # the first; what its backward took is free again
                    sums = [torch.zeros_like(t, dtype=g.dtype) if t.requires_grad else None for t in fixed]
                    places = [torch.zeros_like(t, dtype=g.dtype) for t in wanted]
                _add([t for t in sums if t is not None] + (places if source == rank else []), shares)
                if source != rank and travelling is not None:
                    travelling.add(torch.cat([t.reshape(-1) for t in shares[-len(places) :]]))
                del shares, kv  # the next block's backward has their room
        if travelling is not None and travelling.found is not None:
            found = travelling.found.split([t.numel() for t in places])
            _add(places, [share.view(place.shape) for place, share in zip(places, found, strict=True)])
        home = iter(places)
        return [sums[0], *(next(home) if need else None for need in need_kv), *sums[1:]]

    def _shares(
        self, fixed: list[Tensor], kv: list[Tensor], source: int, whole: RowStats, g: Tensor, delta: Tensor
    ) -> list[Tensor]:
        """What the block of a rank adds to the gradients of those of fixed (q and `tensors()`) and kv that have one."""
        inputs = [t for t in (*fixed, *kv) if t.requires_grad]
        with torch.enable_grad():
            sink = self.sink if source == self.peers.rank else None
            state = self.state(fixed[0], kv[0], kv[1], self.part(self.peers.rank, source), sink)
        found = part_gradients(state, whole, g, delta, inputs)
        return [
            torch.zeros_like(t, dtype=g.dtype) if x is None else x.to(g.dtype)
            for t, x in zip(inputs, found, strict=True)
        ]

    def blocks(
        self, k: Tensor, v: Tensor, gradients: ReturnedGradients | None = None
    ) -> Generator[tuple[int, Tensor, Tensor], None, None]:
        """(rank, its keys, its values) of each block that this rank computes, its own first."""
        rank, dtype = self.peers.rank, self.wire or k.dtype
        own = [t.detach().to(dtype) for t in (k, v)]
        sizes = [_numbers(k, n) + _numbers(v, n) for n in self.key_shards.lengths]
        with closing(circulate(self.peers, own, sizes, self.needed, gradients)) as arriving:
            for source, block in arriving:
                count = self.key_shards.lengths[source]
                if source == rank:
                    yield source, k, v
                elif block is not None and self.needed[rank][source]:
                    flats = block.split([_numbers(k, count), _numbers(v, count)])
                    k_there, v_there = (
                        flat.view(*t.shape[:-2], count, t.shape[-1]).to(t.dtype)
                        for flat, t in zip(flats, (k, v), strict=True)
                    )
                    yield source, k_there, v_there


def _numbers(t: Tensor, n: int) -> int:
    """How many numbers n tokens of t have."""
    return t.shape[:-2].numel() * n * t.shape[-1]


def _add(places: Sequence[Tensor], shares: Sequence[Tensor]) -> None:
    for place, share in zip(places, shares, strict=False):  # behind those of q and the score are those of k and v
        place += share


class RingAttention(torch.autograd.Function):
    """Output, m and l, to autograd: apply(call, q, k, v, *call.tensors())."""

    @staticmethod
    def forward(ctx: Any, call: RingCall, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        state = call.fold(q, k, v)
        out = state.finish()[0]
        ctx.call = call
        ctx.save_for_backward(out, state.m, state.l, q, k, v, *tensors)
        ctx.mark_non_differentiable(state.m)
        return out, state.m, state.l

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_m: Tensor, g_l: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise Unsupported(
                "ring_attention can be differentiated once, and this backward is asked to be differentiable "
                "(create_graph=True). attention(...) in one process can be, to any order."
            )
        with ctx.call.peers.together("the gradients of ring_attention"):
            out, m, l, q, k, v, *tensors = ctx.saved_tensors
            call, given, needs = (
                ctx.call.with_tensors(tuple(tensors)),
                (q, k, v, *tensors),
                tuple(ctx.needs_input_grad[1:]),
            )

            def gradients(cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
                whole, (g, g_l) = RowStats(m, l), cotangents
                g, delta = output_cotangents(out, whole.empty, (g, g_l * l))
                found = call.gradients(q, k, v, whole, g, delta, needs)
                return tuple(None if t is None else t.to(x.dtype) for t, x in zip(found, given, strict=True))

            return None, *linear_in((g, g_l), gradients)
