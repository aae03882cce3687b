"""ulysses_attention: tokens of all heads become all tokens of some heads, and go back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.api import attention
from regard.backends.base import Backend
from regard.call.arguments import answers_calls, batch_axes, check_heads
from regard.core.dropout import Dropout
from regard.core.dtypes import accumulator
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.shapes import count_of, listed
from regard.core.tracing import outside_of_graphs
from regard.masks.algebra import Everything, Mask
from regard.parallel.agreement import agree_on_call
from regard.parallel.all_to_all import all_to_all, between
from regard.parallel.call_on_heads import mask_of_heads, score_of_heads
from regard.parallel.heads import HeadShare
from regard.parallel.peers import Peers
from regard.parallel.shards import Shards, divided, joined
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@outside_of_graphs
@answers_calls
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    shards: Shards | None = None,
    key_shards: Shards | None = None,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    dropout: Dropout | None = None,
    backend: Backend | None = None,
    timeout: float | None = None,
) -> Tensor:
    """`attention` over a sequence that is split over ranks; each rank computes some of the heads, for all tokens.

    q (*batch, h, n_r, dk), k (*batch, hk, m_r, dk), v (*batch, hk, m_r, dv) of this rank's tokens -> (*batch, h, n_r,
    dv). The output is this rank's part of `attention` over the whole sequence, by the same kernels. Ranks exchange
    queries, keys and values of all heads for all tokens of their own heads, and then the output: a rank sends (2 h + 2
    hk) d n (R - 1) / R² numbers, once forward and once backward, and computes nothing during the exchange.

    group       a process group of at most h ranks, one dimension of a DeviceMesh, or None: all processes
    shards      which tokens each rank holds; None: consecutive ones, as many as each has. key_shards: the same of keys
                and values; None: shards
    score, mask, positions, sink, dropout, backend
                as `attention`, and of the whole call, the same on every rank: a mask of (nq, nk), positions of all. A
                similarity of your own must be a Custom, whose fn sees the heads of a rank as a call of its own, as
                modifiers do: what mixes heads gives other results here
    timeout     seconds without an answer after which PeerError is raised (300)

    Heads are distributed as evenly as grouped queries allow; a key head that the query heads of several ranks read is
    sent to each of them. Differentiable with respect to q, k, v, the sink and the tensors of the score, as often as
    `attention` is, in reverse mode. The gradients of the sink and the score are this rank's share: sum them over the
    group, as for any shared parameter. Dropout drops the same weights as one process; without a seed it takes that of
    rank 0. Raises ShapeError if there are fewer heads than ranks, Unsupported for a similarity of your own, PeerError
    if ranks make different calls, or one has ended, has stopped, is late or raises an error, and the errors of
    `attention`.
    Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509).
    """
    peers = Peers.of(group, timeout)
    with peers.together("the output of ulysses_attention"):
        logits = None if sink is None else torch.as_tensor(sink, dtype=accumulator(q.dtype), device=q.device)
        queries, keys, drop = agree_on_call(
            peers, "ulysses_attention", q, k, v, shards, key_shards, score, mask, positions, logits, dropout
        )
        deal = Deal.of(q, k, v, peers, queries, keys)
        attend = deal.to_heads(q, k, v, score, mask, logits, drop)
        return attend(partial(attention, positions=positions, backend=backend))


@dataclass(frozen=True, eq=False)
class Deal:
    """Who has which tokens before the exchange, and which heads behind it.

    queries, keys: the tokens of each rank; behind the exchange all of them stand in ascending order of their indices.
    """

    peers: Peers
    heads: list[HeadShare]
    queries: Shards
    keys: Shards

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, peers: Peers, queries: Shards, keys: Shards) -> Deal:
        """For a call on these; ShapeError where they have too few heads."""
        if q.dim() < 4 or q.shape[-3] < peers.count:
            raise ShapeError(
                f"q has shape {listed(q.shape)}, the group {count_of(peers.count, 'rank')}; expected (*batch, heads, "
                "n, d) with as many heads as ranks or more. ring_attention needs no heads, usp_attention fewer of "
                "them."
            )
        check_heads(q, k, v)
        return Deal(peers, HeadShare.split(q.shape[-3], k.shape[-3], peers.count), queries, keys)

    def to_heads(
        self, q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Mask, sink: Tensor | None, dropout: Dropout | None
    ) -> Callable[[Callable[..., Tensor]], Tensor]:
        """Exchanges tokens for heads. What is returned takes the function that attends, calls it for all tokens of this
        rank's heads, and exchanges its output for this rank's tokens of all heads.
        """
        own, ranks, lead = self.heads[self.peers.rank], range(self.peers.count), batch_axes(q, k, v, True)
        parts = [(heads.of(q, -3), heads.of_keys(k, -3), heads.of_keys(v, -3)) for heads in self.heads]
        mine, of = parts[self.peers.rank], (self.queries, self.keys, self.keys)
        shapes = [
            [(*t.shape[:-2], x.lengths[rank], t.shape[-1]) for t, x in zip(mine, of, strict=True)] for rank in ranks
        ]
        numbers = all_to_all(
            torch.cat([t.reshape(-1) for of_rank in parts for t in of_rank]),
            [sum(t.numel() for t in of_rank) for of_rank in parts],
            [sum(map(math.prod, of_rank)) for of_rank in shapes],
            self.peers,
        )
        score, mask = score_of_heads(score, own), mask_of_heads(mask, own)
        given = {"mask": mask, "dropout": None if dropout is None else dropout.from_head(own.first)}
        learned = [*score.tensors(), *(() if sink is None else (own.of(sink, -1),))]

        def attend(compute: Callable[..., Tensor]) -> Tensor:
            def of_heads(numbers: Tensor, *tensors: Tensor) -> Tensor:
                rest, pieces = iter(tensors), iter(numbers.split([math.prod(s) for of_rank in shapes for s in of_rank]))
                received = [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]
                qkv = [joined(of_all, x) for of_all, x in zip(zip(*received, strict=True), of, strict=True)]
                options = {**given, "score": score.with_tensors(rest), "sink": None if sink is None else next(rest)}
                return torch.cat([t.reshape(-1) for t in divided(compute(*qkv, **options), self.queries)])

            of_all = [(*lead, heads.count, q.shape[-2], v.shape[-1]) for heads in self.heads]
            sent = [math.prod(lead) * own.count * n * v.shape[-1] for n in self.queries.lengths]
            received = list(map(math.prod, of_all))
            out = all_to_all(between(of_heads, [numbers, *learned], self.peers), sent, received, self.peers)
            pieces = zip(out.split(received), of_all, strict=True)
            return torch.cat([t.view(shape) for t, shape in pieces], -3)

        return attend
