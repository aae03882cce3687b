"""Calls on tensors of GPUs, emulated (test_emulated_gpus) or real (test_nccl): what one process computes on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import regard as rg
from regard.parallel import (
    SequenceParallel,
    Shards,
    ring_attention,
    shard,
    tree_decode,
    ulysses_attention,
    unshard,
    usp_attention,
)
from ring_cases import MASKS, N, layouts, moved

TIMEOUT = 10.0


def drawn(*sizes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(*size, generator=draw, dtype=torch.float64) for size in sizes]


@cache
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(4).reshape(2, 2))


def difference(group: Any, device: str, way: str, layout: str, mask: str | rg.Mask) -> float:
    """By how much output and gradients, of the score too, differ from one process's on the CPU, at most."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shards = Shards.of_lengths([8, 16, 0, 8][:ranks]) if way == "ordered" else layouts(N, ranks)[layout]
    n = shards.n
    attend: Any = {"ulysses": ulysses_attention, "usp": usp_attention, "tree": tree_decode}.get(way, ring_attention)
    options: dict[str, Any] = {"group": mesh() if way == "usp" else group, "shards": shards, "timeout": TIMEOUT}
    if way == "ordered":
        options["deterministic"] = 8
    q, k, v, slopes = drawn((2, 4, n, 6), (2, 2, n, 6), (2, 2, n, 5), (4,))
    score = rg.ScaledDot() >> rg.Alibi(slopes.abs().requires_grad_())
    given: dict[str, Any] = {
        "score": score,
        "mask": mask if isinstance(mask, rg.Mask) else MASKS[mask](n, n),
        "sink": torch.linspace(-1, 1, 4).double().requires_grad_(),
    }
    leaves = [*(t.requires_grad_() for t in (q, k, v)), *score.tensors(), given["sink"]]
    out = rg.attention(q, k, v, **given)
    there, learned = moved(given, device)
    if way == "tree":
        keys = [shard(t.detach(), shards, rank).to(device) for t in (k, v)]
        del options["shards"]
        found = tree_decode(q.detach().to(device), *keys, **there, **options, key_shards=shards)
        return float((found.cpu() - out).detach().abs().max())
    g = drawn(tuple(out.shape))[0]
    wanted = torch.autograd.grad(out, leaves, g)
    expected = [shard(t.detach(), shards, rank) for t in (out, *wanted[:3])]
    mine = [shard(t.detach(), shards, rank).to(device).requires_grad_() for t in (q, k, v)]
    own = attend(*mine, **there, **options)
    got = [own, *torch.autograd.grad(own, [*mine, *learned], shard(g, shards, rank).to(device))]
    got = [t.detach().cpu() for t in got]
    for t in got[4:]:
        dist.all_reduce(t, group=None if way == "usp" else group)
    pairs = zip(got, [*expected, *wanted[3:]], strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def some_ranks_see_some_others(group: Any, device: str, seed: int) -> float:
    """Blocks pass ranks that do not compute them, their gradients do not, and ranks wait for each other in circles."""
    ranks, draw = dist.get_world_size(group), torch.Generator().manual_seed(seed)
    rank_of = torch.arange(ranks).repeat_interleave(torch.tensor(Shards.contiguous(N, ranks).lengths))
    each_sees_the_last = torch.eye(ranks).roll(-1, 1) > 0
    drawn_at_random = torch.rand(ranks, ranks, generator=draw) < 0.5
    masks = [rg.Dense(seen[rank_of][:, rank_of]) for seen in (each_sees_the_last, drawn_at_random)]
    return max(difference(group, device, "ring", "contiguous", mask) for mask in masks)


def layer(group: Any, device: str) -> float:
    """Of a layer with rotated positions: output, the gradient of its tokens, recorded facts, and all tokens joined."""
    rank, shards = dist.get_rank(group), Shards.zigzag(N, dist.get_world_size(group))
    torch.manual_seed(3)
    options: dict[str, Any] = {"key_heads": 2, "rotary": rg.nn.Rotary(4), "dtype": torch.float64}
    whole, (x,) = rg.nn.MultiHeadAttention(24, 6, **options), drawn((2, N, 24))
    part = rg.nn.MultiHeadAttention(24, 6, **options)
    part.load_state_dict(whole.state_dict())
    part.to(device).parallel = SequenceParallel(shards, group)
    y = shard(x, shards, rank).to(device).requires_grad_()
    x.requires_grad_()
    facts = (rg.facts.Entropy(),)
    with rg.record(whole, facts) as expected:
        out = whole(x, mask=rg.Causal())
    with rg.record(part, facts) as recorded:
        found = part(y, mask=rg.Causal())
    out.sum().backward()
    joined = unshard(found, shards, group)
    torch.autograd.backward(joined.sum() / dist.get_world_size(group))
    assert x.grad is not None and y.grad is not None
    entropy, of_rank = expected.calls[0][facts[0]], recorded.calls[0][facts[0]].cpu()
    pairs = [(joined, out), (y.grad, shard(x.grad, shards, rank)), (of_rank, shard(entropy, shards, rank, -1))]
    return max(float((a.detach().cpu() - b.detach()).abs().max()) for a, b in pairs)


def refused(group: Any, device: str) -> list[str]:
    """Devices that differ between tensors, between ranks, and where the group has no backend for one."""
    (q,), rank = drawn((1, 2, 8, 4)), dist.get_rank(group)
    there, said = q.to(device), []
    for given in ((there, q, q), (there, there, there) if rank else (q, q, q), (q.to("meta"),) * 3):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            ring_attention(*given, group=group, timeout=TIMEOUT)
        said.append(str(raised.value))
    return said
