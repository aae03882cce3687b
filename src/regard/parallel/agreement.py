"""What the ranks of a group must agree on before they make a call together."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from regard.call.arguments import check_kinds, check_tensors
from regard.core.cotangents import has_tangent
from regard.core.dropout import Dropout
from regard.core.errors import ShapeError, Unsupported
from regard.core.positions import Positions
from regard.core.tracing import functorch
from regard.masks.algebra import Mask
from regard.parallel.comparison import CallDescription, PartOfTokens, agree, described
from regard.parallel.peers import Peers
from regard.parallel.shards import Shards
from regard.scores.algebra import Score


def agree_on_call(
    peers: Peers,
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards | None,
    key_shards: Shards | None,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Tensor | None,
    dropout: Dropout | None,
    wire: torch.dtype | None = None,
    deterministic: int | None = None,
    same: dict[str, Tensor] | None = None,
) -> tuple[Shards, Shards, Dropout | None]:
    """The shards of queries and of keys, and dropout with one seed for all.

    same: other tensors that all ranks must have alike.
    Raises Unsupported for tensors on a device for which the group has no backend, forward mode and transforms, and what
    `check_kinds` and `check_tensors` raise, before a message is sent; PeerError where the ranks' calls differ,
    ShapeError where a tensor does not fit the shards; on every rank.
    """
    check_kinds(score, mask, positions, dropout)
    tensors = (*score.tensors(), *(() if sink is None else (sink,)))
    if functorch() or has_tangent(q, k, v, *tensors):
        raise Unsupported(f"{function} has no forward mode, and no transform of torch.func goes through it.")
    check_tensors(q, k, v)
    peers.check_device("q", q)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *tensors))
    description: CallDescription = {
        "the function": function,
        "the version of regard": described(_version()),
        **{name: PartOfTokens(t) for name, t in (("q", q), ("k", k), ("v", v))},
        "the device": q.device.type,
        "shards": described(shards, () if shards is None else shards.indices),
        "key_shards": described(key_shards, () if key_shards is None else key_shards.indices),
        "score": described(score, score.tensors()),
        "mask": described(mask, mask.tensors()),
        "positions": described(positions, () if positions is None else (positions.q, positions.k)),
        "sink": described(sink, () if sink is None else (sink,)),
        "dropout": described(dropout),
        "wire": described(wire),
        "deterministic": described(deterministic),
        "requires_grad": described(recorded and [t.requires_grad for t in (q, k, v, *tensors)]),
        **{name: described(tuple(t.shape), (t,)) for name, t in (same or {}).items()},
    }
    dropout = None if dropout is None or dropout.p == 0 else dropout
    # a seed that was given is the same on all ranks, and may have more bits than a message
    drawn = dropout.seeded() if dropout is not None and dropout.seed is None else None
    seed = 0 if drawn is None or drawn.seed is None else drawn.seed
    queries, keys, values, seeds = zip(*agree(peers, description, *(t.shape[-2] for t in (q, k, v)), seed), strict=True)
    if values != keys:
        raise ShapeError(f"v has {values} values on the ranks of the group, k {keys} keys; expected one value a key.")
    if key_shards is None:
        key_shards = Shards.of_lengths(keys) if shards is None and queries != keys else shards
    shards = Shards.of_lengths(queries) if shards is None else shards
    key_shards = shards if key_shards is None else key_shards
    for name, of, lengths in (("q", shards, queries), ("k", key_shards, keys)):
        if of.lengths != lengths:
            raise ShapeError(f"{name} has {list(lengths)} tokens on the ranks of the group; expected {of!r}.")
    peers.connect(q.device)
    return shards, key_shards, dropout if drawn is None else replace(drawn, seed=seeds[0])


@cache
def _version() -> str:
    try:
        return version("regard")
    except PackageNotFoundError:
        return "not installed"
