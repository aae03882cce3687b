"""usp_attention: heads dealt out along one dimension of a mesh, a ring along the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regard.backends.base import Backend
from regard.call.arguments import answers_calls, check_kinds
from regard.core.dropout import Dropout
from regard.core.dtypes import accumulator
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.shapes import count_of
from regard.core.tracing import outside_of_graphs
from regard.masks.algebra import Everything, Mask
from regard.parallel.agreement import agree_on_call
from regard.parallel.ranks import Ranks
from regard.parallel.ring import ring_attention
from regard.parallel.shards import Shards
from regard.parallel.ulysses import Deal
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@outside_of_graphs
@answers_calls
def usp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: DeviceMesh,
    shards: Shards,
    key_shards: Shards | None = None,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    dropout: Dropout | None = None,
    backend: Backend | None = None,
    timeout: float | None = None,
) -> Tensor:
    """`attention` over a sequence in parts, on a mesh of ranks: a ring along one dimension, Ulysses along the other.

    The ranks of a row of the mesh (with fast links between them, for example on one host) exchange their tokens for
    heads, and the rows pass keys and values of these heads around: a ring with one step per row, whose blocks have the
    tokens of a row and the heads of one of its ranks. Rank r of the shards is mesh.flatten()[r].

    group   a DeviceMesh (rows, ranks of a row); a row has at most as many ranks as q has heads
    shards  which tokens each rank of the mesh holds
    Other arguments, gradients and errors as `ring_attention` and `ulysses_attention`; differentiable once.
    Source: Fang and Zhao 2024, USP (arXiv 2405.07719).
    """
    if group.ndim != 2 or shards.ranks != group.size():
        raise ShapeError(
            f"group is a mesh {tuple(group.shape)}; expected two dimensions, and {count_of(shards.ranks, 'rank')}."
        )
    if key_shards is not None and key_shards.ranks != shards.ranks:
        raise ShapeError(f"key_shards are of {count_of(key_shards.ranks, 'rank')}; expected {shards.ranks}, as shards.")
    ranks = Ranks.of(group, timeout)
    inner, outer = ranks.levels
    row, width = outer.rank, inner.count
    # An error before the ring is sent to the row, which sends it to the columns; the ring itself sends the columns its
    # errors, and the row then receives them.
    with ranks.telling():
        check_kinds(score, mask, positions, dropout)
        queries, keys = (_by_row(x, width) for x in (shards, shards if key_shards is None else key_shards))
        logits = None if sink is None else torch.as_tensor(sink, dtype=accumulator(q.dtype), device=q.device)
        if dropout is not None and dropout.seed is None and dropout.p > 0:
            seed = dropout.seeded().seed or 0
            for peers in ranks.levels:
                seed = peers.tell("the seed of dropout", seed)[0][0]  # of the first rank
            dropout = replace(dropout, seed=seed)
        own = agree_on_call(
            inner, "usp_attention", q, k, v, queries[row], keys[row], score, mask, positions, logits, dropout
        )
        deal = Deal.of(q, k, v, inner, *own[:2])
        attend = deal.to_heads(q, k, v, score, mask, logits, own[2])
    with inner.together("the output of usp_attention"):
        of_rows = {"shards": _of_rows(queries), "key_shards": _of_rows(keys), "group": outer.group}
        return attend(partial(ring_attention, **of_rows, positions=positions, backend=backend, timeout=timeout))


def _by_row(shards: Shards, width: int) -> list[Shards]:
    """The part of each row of the mesh: tokens of `width` ranks."""
    return [Shards(shards.of_ranks[n : n + width]) for n in range(0, shards.ranks, width)]


def _of_rows(rows: list[Shards]) -> Shards:
    """The shards of a ring whose ranks have the tokens of a row each, in ascending order."""
    return Shards.of([torch.cat(row.indices).sort().values for row in rows])
