"""ring_attention: keys and values travel around the ranks of a group, and each folds what its queries see."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.backends.base import Backend
from regard.call.arguments import answers_calls, batch_axes
from regard.core.dropout import Dropout
from regard.core.dtypes import accumulator
from regard.core.functions import with_bound
from regard.core.positions import Positions
from regard.core.state import State
from regard.core.tracing import outside_of_graphs
from regard.masks.algebra import Everything, Mask
from regard.masks.ragged import numbers_on
from regard.parallel.agreement import agree_on_call
from regard.parallel.dtensors import as_dtensor, is_dtensor, local_tokens
from regard.parallel.few_queries import FewQueriesCall
from regard.parallel.ordered import OrderedCall
from regard.parallel.peers import Peers
from regard.parallel.ring_call import RingAttention, RingCall
from regard.parallel.shards import Shards
from regard.runtime.binding import as_autocast
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@outside_of_graphs
@answers_calls
def ring_attention(
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
    wire: torch.dtype | None = None,
    timeout: float | None = None,
    deterministic: int | None = None,
) -> Tensor:
    """`attention` over a sequence that is split over the ranks of a group. All ranks of the group must call it.

    q (*batch, h, n_r, dk), k (*batch, hk, n_r, dk), v (*batch, hk, n_r, dv) are this rank's tokens. The output (*batch,
    h, n_r, dv), in q's dtype, has this rank's rows of the output of `attention` on the whole sequence, up to rounding.
    Keys and values are sent from rank to rank, the next ones while the current ones are in use; blocks that no query of
    a rank may see are not computed, and not sent if no later rank needs them. A rank holds three blocks at once. If the
    queries are less than half as large as the keys and values, the queries are sent to all ranks instead, which send
    back their states.

    DTensors with tokens sharded over one dimension of a mesh (Shard(dim - 2)) are accepted directly, without group and
    shards; the output is a DTensor placed like q.

    group       a process group, one dimension of a DeviceMesh, or None: all processes
    shards      which tokens each rank holds; None: consecutive ones, as many as each has. key_shards: the same of keys
                and values where these are another sequence (cross-attention); None: shards
    score, mask, positions, sink, dropout, backend
                as `attention`, and of the whole call, the same on every rank: a mask of (nq, nk), positions of all
    wire        the dtype in which keys and values are sent, floating-point; None: their own. Sums are float32,
                or float64. float16 overflows beyond 65,504
    timeout     seconds without a message from a neighbour after which PeerError is raised (300)
    deterministic
                None, or a number of tokens: the output and all gradients then have the same bits on any number of
                ranks, one included, whose shards consist of whole blocks of so many consecutive tokens (ValueError).
                Those of the sink and the score are the share of rank 0, and zero on the others: summed in any order
                they keep their bits. Each pair of blocks is a call of its own, computed twice backward: 512 or more are
                wise. Each block of queries needs room for some gradients of each tensor of the score

    Differentiable once with respect to q, k, v, the sink and the tensors of the score. The gradients of k and v are
    returned to their rank; those of the sink and the score are this rank's share: sum them over the group, as for any
    shared parameter. Dropout drops the same weights as one process; without a seed it takes that of rank 0. Tensors on
    a GPU need a group with nccl for them and gloo for the CPU, which init_process_group() makes.
    Raises what `attention` raises; Unsupported for tensors on a device for which the group has no backend; PeerError if
    ranks make different calls, if one has ended, has stopped or is late, or if another one raises an error: all ranks
    then end the call, and can make another one.
    Source: Liu et al. 2023, Ring Attention (arXiv 2310.01889).
    """
    local, group = local_tokens(q, k, v, group) if is_dtensor(q, k, v) else ((q, k, v), group)
    given = (group, shards, key_shards, score, mask, positions, sink, dropout, backend, wire, timeout, deterministic)
    own_q, own_k, own_v = map(as_autocast, local)
    out = _call(own_q, own_k, own_v, *given)[0].to(own_q.dtype)
    return out if local[0] is q else as_dtensor(out, q, v.shape[-1])


@outside_of_graphs
def ring_attention_state(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> State:
    """The State of all keys for this rank's queries: arguments and gradients as `ring_attention`.

    m and l have the shape (*batch, h, n_r), o (*batch, h, n_r, dv), float32 or float64; `finish()` gives (out, lse).
    Tensors of this rank alone, also for DTensors.
    """
    unknown = options.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(f"ring_attention_state has no argument {min(unknown)!r}; it has {', '.join(_DEFAULTS)}.")
    given = {**_DEFAULTS, **options}
    if is_dtensor(q, k, v):
        (q, k, v), given["group"] = local_tokens(q, k, v, given["group"])
    out, m, l = _call(as_autocast(q), as_autocast(k), as_autocast(v), *given.values())
    return State(m, l, out * l[..., None])


_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(ring_attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any,
    shards: Shards | None,
    key_shards: Shards | None,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Tensor | float | None,
    dropout: Dropout | None,
    backend: Backend | None,
    wire: torch.dtype | None,
    timeout: float | None,
    deterministic: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output in the dtype of sums, and m and l of each row."""
    peers = Peers.of(group, timeout)
    with peers.together("the output of ring_attention"):
        if wire is not None and not wire.is_floating_point:
            raise TypeError(f"wire is {wire}; expected a floating-point dtype, such as torch.bfloat16.")
        if deterministic is not None:
            deterministic = arrays.size(deterministic, "deterministic", 1)
        logits = None if sink is None else torch.as_tensor(sink, dtype=accumulator(q.dtype), device=q.device)
        call_of_all = (shards, key_shards, score, mask, positions, logits, dropout, wire, deterministic)
        shards, key_shards, drop = agree_on_call(peers, "ring_attention", q, k, v, *call_of_all)
        if q.device.type != "cpu":  # also of a part that is not computed, whose cover is asked
            mask = numbers_on(mask, q.device)
        given = (peers, shards, key_shards, with_bound(score), with_bound(mask), None, logits, drop, backend, wire)
        if deterministic is not None:
            kind = OrderedCall(*given, grid=deterministic)
        elif shards.n * _numbers(q, v) < key_shards.n * _numbers(k, v) / 2:
            kind = FewQueriesCall(*given)
        else:
            kind = RingCall(*given)
        q = q.expand(*batch_axes(q, k, v, q.dim() >= 4), *q.shape[-3 if q.dim() >= 4 else -2 :])
        call = kind.placed(q, positions)
        return RingAttention.apply(call, q, k, v, *call.tensors())


def _numbers(t: Tensor, v: Tensor) -> int:
    """About how many numbers travel for one token of t, queries with their states or keys with their values."""
    return t.shape[:-2].numel() * (t.shape[-1] + v.shape[-1])
