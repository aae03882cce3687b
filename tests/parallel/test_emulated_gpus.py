"""Calls on tensors of a GPU, which is emulated (pretended_device, emulated_nccl): what one process computes on the CPU.

What a real GPU does beyond that (its kernels, their time, nccl's failures) is not shown here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import emulated_nccl
import regard as rg
from gloo_processes import Group
from pretended_device import DEVICE
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
from ring_cases import MASKS, Case, N, errors, layouts, moved
from test_raised_alone import checked, raising

TIMEOUT = 10.0


def emulated(group: Any, call: Any, *given: Any) -> tuple[Any, list[str]]:
    """What a function of the group answers, and the rules of nccl that were broken on this rank."""
    with emulated_nccl.nccl() as broken:
        return call(group, *given), broken


def answers(gpus: Group, ranks: int, call: Any, *given: Any) -> list[Any]:
    """What the ranks answer, none of which has broken a rule."""
    found, broken = zip(*gpus.run(emulated, call, *given, ranks=ranks), strict=True)
    assert list(broken) == [[]] * ranks
    return list(found)


@pytest.mark.parametrize("ranks", [3, 2, 4])
@pytest.mark.parametrize("layout", list(layouts(9, 2)))
@pytest.mark.parametrize("mask", ["causal", "window", "documents", "lengths", "dense", "your own"])
@pytest.mark.parametrize("score", ["scaled", "slopes, bias"])
def test_ring(gpus: Group, score: str, mask: str, layout: str, ranks: int) -> None:
    case = Case(layout, mask, score, device=DEVICE, sink=True)
    assert max(max(of_rank) for of_rank in answers(gpus, ranks, errors, case)) < 1e-12


@pytest.mark.parametrize("ranks", [3, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "ragged", "striped"])
@pytest.mark.parametrize("mask", ["full", "window", "dense"])
def test_few_queries(gpus: Group, mask: str, layout: str, ranks: int) -> None:
    case = Case(layout, mask, nq=7, heads=(4, 4), sink=True, device=DEVICE)
    assert max(max(of_rank) for of_rank in answers(gpus, ranks, errors, case)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_and_half_precision_on_the_wire(gpus: Group, dtype: torch.dtype) -> None:
    wire, bound = (None, 1e-12) if dtype == torch.float64 else (torch.bfloat16, 5e-2)
    case = Case("zigzag", dtype=dtype, dropout=0.3, wire=wire, device=DEVICE)
    assert max(max(of_rank) for of_rank in answers(gpus, 3, errors, case)) < bound


def drawn(*sizes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(*size, generator=draw, dtype=torch.float64) for size in sizes]


@cache
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(4).reshape(2, 2))


def difference(group: Any, way: str, layout: str, mask: str | rg.Mask) -> float:
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
    there, learned = moved(given, DEVICE)
    if way == "tree":
        keys = [shard(t.detach(), shards, rank).to(DEVICE) for t in (k, v)]
        del options["shards"]
        found = tree_decode(q.detach().to(DEVICE), *keys, **there, **options, key_shards=shards)
        return float((found.cpu() - out).detach().abs().max())
    g = drawn(tuple(out.shape))[0]
    wanted = torch.autograd.grad(out, leaves, g)
    expected = [shard(t.detach(), shards, rank) for t in (out, *wanted[:3])]
    mine = [shard(t.detach(), shards, rank).to(DEVICE).requires_grad_() for t in (q, k, v)]
    own = attend(*mine, **there, **options)
    got = [own, *torch.autograd.grad(own, [*mine, *learned], shard(g, shards, rank).to(DEVICE))]
    got = [t.detach().cpu() for t in got]
    for t in got[4:]:
        dist.all_reduce(t, group=None if way == "usp" else group)
    pairs = zip(got, [*expected, *wanted[3:]], strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def some_ranks_see_some_others(group: Any, seed: int) -> float:
    """Blocks pass ranks that do not compute them, their gradients do not, and ranks wait for each other in circles."""
    ranks, draw = dist.get_world_size(group), torch.Generator().manual_seed(seed)
    rank_of = torch.arange(ranks).repeat_interleave(torch.tensor(Shards.contiguous(N, ranks).lengths))
    each_sees_the_last = torch.eye(ranks).roll(-1, 1) > 0
    drawn_at_random = torch.rand(ranks, ranks, generator=draw) < 0.5
    masks = [rg.Dense(seen[rank_of][:, rank_of]) for seen in (each_sees_the_last, drawn_at_random)]
    return max(difference(group, "ring", "contiguous", mask) for mask in masks)


@pytest.mark.parametrize("ranks", [4, 3])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 10))])
def test_whoever_sees_whom(gpus: Group, seed: int, ranks: int) -> None:
    assert max(answers(gpus, ranks, some_ranks_see_some_others, seed)) < 1e-12


@pytest.mark.parametrize("ranks", [3, 2, 4])
@pytest.mark.parametrize("way", ["ulysses", "ordered", "tree"])
@pytest.mark.parametrize("layout", ["contiguous", "any", "ragged"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_other_ways(gpus: Group, mask: str, layout: str, way: str, ranks: int) -> None:
    assert max(answers(gpus, ranks, difference, way, layout, mask)) < 1e-12


@pytest.mark.parametrize("layout", ["zigzag", "ragged"])
@pytest.mark.parametrize("mask", ["causal", "window", "dense"])
def test_on_a_mesh(gpus: Group, mask: str, layout: str) -> None:
    assert max(answers(gpus, 4, difference, "usp", layout, mask)) < 1e-12


def layer(group: Any) -> float:
    """Of a layer with rotated positions: output, the gradient of its tokens, recorded facts, and all tokens joined."""
    rank, shards = dist.get_rank(group), Shards.zigzag(N, dist.get_world_size(group))
    torch.manual_seed(3)
    options: dict[str, Any] = {"key_heads": 2, "rotary": rg.nn.Rotary(4), "dtype": torch.float64}
    whole, (x,) = rg.nn.MultiHeadAttention(24, 6, **options), drawn((2, N, 24))
    part = rg.nn.MultiHeadAttention(24, 6, **options)
    part.load_state_dict(whole.state_dict())
    part.to(DEVICE).parallel = SequenceParallel(shards, group)
    y = shard(x, shards, rank).to(DEVICE).requires_grad_()
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


def test_a_layer_and_what_is_recorded(gpus: Group) -> None:
    assert max(answers(gpus, 3, layer)) < 1e-12


def refused(group: Any) -> list[str]:
    """Devices that differ between tensors, between ranks, and where the group has no backend for one."""
    (q,), rank = drawn((1, 2, 8, 4)), dist.get_rank(group)
    there, said = q.to(DEVICE), []
    for given in ((there, q, q), (there, there, there) if rank else (q, q, q), (q.to("meta"),) * 3):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            ring_attention(*given, group=group, timeout=TIMEOUT)
        said.append(str(raised.value))
    return said


def test_what_cannot_go_is_refused(gpus: Group) -> None:
    for mixed, unlike, without in answers(gpus, 2, refused):
        assert mixed == f"k is on cpu, q on {DEVICE}:0; expected one device: move with .to(...)."
        assert unlike == f"the ranks make unlike calls: the device is {DEVICE} on rank 1, cpu on rank 0."
        assert f"of cpu:gloo,{DEVICE}:nccl none can; gloo sends tensors on the CPU alone. For GPUs call" in without


@pytest.mark.parametrize(("way", "ranks"), [("ring", 3), ("usp", 4), ("ulysses", 3), ("ordered", 2)])
@pytest.mark.parametrize("where", ["forward, first", "backward, first", "backward, last"])
def test_a_rank_that_raises_an_error_alone(gpus: Group, way: str, ranks: int, where: str) -> None:
    """Backward runs in a thread of the device there."""
    checked(answers(gpus, ranks, raising, way, 1, where, "ValueError", DEVICE), way, 1, where)
