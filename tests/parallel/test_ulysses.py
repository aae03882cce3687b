"""ulysses_attention over processes: output and gradients of one call in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import regard as rg
from gloo_processes import Group
from regard.core.region import Frame
from regard.parallel import Shards, shard, ulysses_attention, usp_attention
from regard.testing import Case, draw, masks, scores
from selection import in_turn

N, HEADS = 23, 6
AT = Frame.of(N, batch=(2,), heads=HEADS)
# of 23 tokens, for each number of ranks: in order, or drawn at random with one rank that has none
LAYOUTS = {
    "contiguous": {ranks: Shards.contiguous(N, ranks) for ranks in range(1, 5)},
    "ragged": {
        1: Shards.of([torch.randperm(N, generator=torch.Generator().manual_seed(1))]),
        2: Shards.of([torch.arange(0, N, 3), torch.tensor([i for i in range(N) if i % 3])]),
        3: Shards.of([torch.arange(5, N), torch.arange(0), torch.arange(5)]),
        4: Shards.of([torch.arange(rank, N, 4).flip(0) for rank in range(4)]),
    },
}
SCORES = [
    "ScaledDot 2",
    "Additive 2",
    "Alibi",
    "Bias",
    "Bilinear 2",
    "Cosine 2",
    "Custom",
    "Elementwise 3",
    "LogDistance",
    "Pipeline",
    "RelativeBias",
    "SoftCap 2",
]
MASKS = ["Causal", "Dense", "Documents", "Prefix", "Where", "Window", "Not"]


def case(score: str = "ScaledDot", mask: str = "Everything", key_heads: int = 3, seed: int | None = None) -> Case:
    """The same numbers in every process."""
    torch.manual_seed(20170612)
    several = scores(AT)[score]
    some = rg.Everything() if mask == "Everything" else masks(AT)[mask]
    dropout = None if seed is None else rg.Dropout(0.3, seed=seed)
    return draw(AT, key_heads=key_heads, score=several, mask=some, sink=True, dropout=dropout)


def called(attention: Any, of: Case, **more: Any) -> Tensor:
    return attention(of.q, of.k, of.v, score=of.score, mask=of.mask, sink=of.sink, dropout=of.dropout, **more)


def results(case: Case, out: Tensor, cotangent: Tensor) -> list[Tensor]:
    """The output and the gradients of everything that has one."""
    found = torch.autograd.grad(out, list(case.differentiable.values()), cotangent, materialize_grads=True)
    return [out.detach(), *found]


@lru_cache(maxsize=4)
def in_one_process(given: tuple[Any, ...], dtype: torch.dtype, backend: Any) -> tuple[list[Tensor], Tensor]:
    """Results of one process, which are the same for every layout and number of ranks, and their cotangent."""
    whole = case(*given).leaves(dtype)
    out = called(rg.attention, whole, backend=backend)
    cotangent = torch.randn_like(out)
    return results(whole, out, cotangent), cotangent


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def compare(group: Any, given: tuple[Any, ...], layout: str, dtype: torch.dtype, backend: Any, *mesh: int) -> float:
    """On one rank: the largest difference from one process, relative to the largest number there."""
    shards, rank = LAYOUTS[layout][dist.get_world_size(group)], dist.get_rank(group)
    whole, mine = case(*given).leaves(dtype), shards.indices[rank]
    expected, cotangent = in_one_process(given, dtype, backend)
    expected = [*expected]
    part = replace(whole, **{name: getattr(whole, name)[..., mine, :] for name in "qkv"}).leaves(dtype)
    if mesh:
        out = called(usp_attention, part, backend=backend, group=mesh_of(mesh), shards=shards)
    else:
        out = called(ulysses_attention, part, backend=backend, group=group, shards=shards)
    found = results(part, out, cotangent[..., mine, :])
    expected[:4] = (t[..., mine, :] for t in expected[:4])
    for t in found[4:]:  # tensors that every rank has whole: what each adds to their gradient
        dist.all_reduce(t, group=group)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True) if b.numel())


@pytest.mark.parametrize(("layout", "mask", "score", "ranks"), in_turn(list(LAYOUTS), MASKS, SCORES, [1, 2, 3, 4]))
def test_float64(gloo: Group, ranks: int, layout: str, score: str, mask: str) -> None:
    given = (score, mask, 3, 5 << 40)
    assert max(gloo.run(compare, given, layout, torch.float64, rg.Tiled(), ranks=ranks)) < 1e-13


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("mask", ["Causal", "Documents", "Dense"])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("backend", [rg.Native(), rg.Tiled()], ids=repr)
def test_float32(gloo: Group, ranks: int, mask: str, key_heads: int, backend: Any) -> None:
    given = ("Alibi", mask, key_heads, (1 << 62) - 5)
    assert max(gloo.run(compare, given, "ragged", torch.float32, backend, ranks=ranks)) < 2e-6


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("score", ["ScaledDot 2", "Additive 2", "Pipeline", "RelativeBias"])
@pytest.mark.parametrize("mask", ["Causal", "Dense", "Documents", "Where"])
def test_usp(gloo: Group, mesh: tuple[int, int], layout: str, score: str, mask: str) -> None:
    given = (score, mask, 3, 5 << 40)
    assert max(gloo.run(compare, given, layout, torch.float64, rg.Tiled(), *mesh, ranks=4)) < 1e-13


def without_a_seed(group: Any) -> float:
    shards, rank = Shards.zigzag(N, 4), dist.get_rank(group)
    whole = replace(case(), dropout=rg.Dropout(0.3))
    torch.manual_seed(5)  # as on the first rank
    out = called(rg.attention, whole, backend=rg.Tiled())
    part = replace(whole, **{name: shard(getattr(whole, name), shards, rank) for name in "qkv"})
    torch.manual_seed(5 + rank)
    found = called(usp_attention, part, backend=rg.Tiled(), group=mesh_of((2, 2)), shards=shards)
    return float((found - shard(out, shards, rank)).abs().max())


def test_usp_drops_what_the_first_rank_would(gloo: Group) -> None:
    assert max(gloo.run(without_a_seed, ranks=4)) < 1e-13
