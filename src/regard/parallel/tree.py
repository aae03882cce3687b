"""tree_decode: few queries, the same on every rank, over keys that are split over the ranks."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from regard.api import attention_state
from regard.backends.base import Backend
from regard.call.arguments import answers_calls, batch_axes
from regard.call.of_part import mask_of_part, score_of_part
from regard.call.part import QueriesAndKeys
from regard.core.dtypes import accumulator
from regard.core.positions import Positions, resolve_positions
from regard.core.state import State
from regard.core.tracing import outside_of_graphs
from regard.masks.algebra import Everything, Mask
from regard.parallel.agreement import agree_on_call
from regard.parallel.peers import Peers
from regard.parallel.shards import Shards
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@outside_of_graphs
@torch.no_grad()
@answers_calls
def tree_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    key_shards: Shards | None = None,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    backend: Backend | None = None,
    timeout: float | None = None,
) -> Tensor:
    """`attention` of the same queries on every rank over keys and values that are split over the ranks: decoding.

    q (*batch, h, nq, dk), the same on all ranks, k (*batch, hk, n_r, dk) and v (*batch, hk, n_r, dv) of this rank's
    keys -> (*batch, h, nq, dv), in q's dtype, the same bits on all ranks: the output of `attention` over all keys, up
    to rounding. Each rank computes the State of its keys; the ranks gather the states, nq h (dv + 2) numbers each, in
    one exchange, and merge them in the order of ranks.

    group       a process group, one dimension of a DeviceMesh, or None: all processes
    key_shards  which keys each rank holds, maybe none; None: consecutive ones, as many as each has
    score, mask, positions, sink, backend
                as `attention`, and of the whole call, the same on every rank: positions=tail(nq, n) where the queries
                are the last of n tokens
    timeout     seconds without an answer after which PeerError is raised (300)

    There are no gradients; use ring_attention for them. Raises the errors of `attention`; PeerError if ranks make
    different calls, or one has ended, has stopped, is late or raises an error.
    Source: Shyam et al. 2024, Tree Attention (arXiv 2408.04093), where the states are reduced along a tree.
    """
    peers = Peers.of(group, timeout)
    with peers.together("the states of tree_decode"):
        logits = None if sink is None else torch.as_tensor(sink, dtype=accumulator(q.dtype), device=q.device)
        given = (q, k, v, None, key_shards, score, mask, positions, logits, None)
        shards = agree_on_call(peers, "tree_decode", *given, same={"q, which all ranks have": q})[1]
        positional = next((x for x in (mask, score) if x.compares_positions()), None)
        nq, nk, batch = q.shape[-2], shards.n, batch_axes(q, k, v, q.dim() >= 4)
        at = resolve_positions(positions, nq, nk, batch, positional, q.device)
        part = QueriesAndKeys(None, shards.of_ranks[peers.rank], nq, nk)
        state = attention_state(
            q,
            k,
            v,
            score=score_of_part(score, part),
            mask=mask_of_part(mask, part),
            positions=None if positional is None else Positions(at.q, part.of_keys(at.k)),
            sink=logits if peers.rank == 0 else None,
            backend=backend,
        )
        packed = torch.cat([state.m[..., None], state.l[..., None], state.o], -1)
    found = (x.view(packed.shape) for x in peers.exchange([packed.reshape(-1)] * peers.count))
    return reduce(or_, (State(x[..., 0], x[..., 1], x[..., 2:]) for x in found)).finish()[0].to(q.dtype)
