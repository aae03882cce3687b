"""FewQueriesCall: a call of ring_attention with so few queries that these travel, not the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.call.of_part import part_gradients
from regard.core.dtypes import accumulator, exact
from regard.core.state import RowStats, State
from regard.parallel.ring_call import RingCall


@dataclass(frozen=True, eq=False)
class FewQueriesCall(RingCall):
    """Every rank gets all queries, and sends each one's owner the state of its own keys for it."""

    def fold(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        rank, dtype = self.peers.rank, accumulator(q.dtype)
        width = v.shape[-1] + 2  # of m, l and o together
        with torch.no_grad(), exact(q.device.type):
            states: list[Tensor] = []
            for other, there in enumerate(self._from_all(q)):
                sink = self.sink if other == rank else None
                if self.needed[other][rank] or other == rank:
                    state = self.state(there, k, v, self.part(other, rank), sink)
                    states.append(torch.cat([state.m[..., None], state.l[..., None], state.o], -1))
                else:
                    states.append(q.new_empty(0, dtype=dtype))
            found = self._to_owners(states, q, width)
        merged = State.empty(q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
        for t in found:
            merged = merged | State(t[..., 0], t[..., 1], t[..., 2:])
        return merged

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, whole: RowStats, g: Tensor, delta: Tensor, needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        rank = self.peers.rank
        fixed = [t.detach().requires_grad_(need) for t, need in zip((k, v, *self.tensors()), needs[1:], strict=True)]
        call, sums = self.with_tensors(tuple(fixed[2:])), [torch.zeros_like(t, dtype=g.dtype) for t in fixed]
        given = (q.to(g.dtype), g, whole.m[..., None], whole.l[..., None], delta[..., None])
        of_queries: list[Tensor] = []
        with exact(q.device.type), torch.enable_grad():
            for other, flat in enumerate(self._from_all(torch.cat(given, -1).detach())):
                if not (self.needed[other][rank] or other == rank):
                    of_queries.append(g.new_empty(0))
                    continue
                there, g_there, *stats = flat.split([t.shape[-1] for t in given], -1)
                m, l, delta_there = (t[..., 0] for t in stats)
                there = there.to(q.dtype).requires_grad_(needs[0])
                sink = call.sink if other == rank else None
                state = call.state(there, fixed[0], fixed[1], self.part(other, rank), sink)
                inputs = [t for t in (there, *fixed) if t.requires_grad]
                found = iter(part_gradients(state, RowStats(m, l), g_there, delta_there, inputs))
                of_q, *of_fixed = (next(found) if t.requires_grad else None for t in (there, *fixed))
                for total, share in zip(sums, of_fixed, strict=True):
                    if share is not None:
                        total += share
                of_queries.append(torch.zeros_like(there, dtype=g.dtype) if of_q is None else of_q.to(g.dtype))
        shares = self._to_owners(of_queries, q, q.shape[-1]) if needs[0] else []
        of_own = sum(shares, torch.zeros_like(q, dtype=g.dtype)) if needs[0] else None
        return [of_own, *(t if need else None for t, need in zip(sums, needs[1:], strict=True))]

    def _from_all(self, own: Tensor) -> list[Tensor]:
        """A tensor (.., n_r, width) of each rank's queries, of every rank."""
        lead, width = own.shape[:-2], own.shape[-1]
        sizes = [lead.numel() * n * width for n in self.shards.lengths]
        self.peers.tell("the queries of all ranks")
        found = self.peers.exchange([own.detach().reshape(-1)] * self.peers.count, sizes)
        return [t.view(*lead, n, width) for t, n in zip(found, self.shards.lengths, strict=True)]

    def _to_owners(self, parts: list[Tensor], q: Tensor, width: int) -> list[Tensor]:
        """Of each rank that has keys for them, what it found for this rank's queries, q.shape[:-1] + (width,)."""
        rank, size = self.peers.rank, q.shape[:-1].numel() * width
        sizes = [size if self.needed[rank][other] or other == rank else 0 for other in range(self.peers.count)]
        self.peers.tell("the results of all ranks")
        found = self.peers.exchange([t.reshape(-1) for t in parts], sizes)
        return [t.view(*q.shape[:-1], width) for t, n in zip(found, sizes, strict=True) if n]
