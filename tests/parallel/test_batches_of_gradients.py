"""Backwards of calls on several ranks whose cotangents are batches or carry tangents: a loop of plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import regard as rg
from gloo_processes import Group
from regard.parallel import Shards, ring_attention, ulysses_attention, unshard

N = 11


def results(name: str, group: Any, inputs: list[Tensor], shards: Shards) -> Tensor:
    if name == "unshard":
        return unshard(inputs[0], shards, group)
    attention = {"ring": ring_attention, "ulysses": ulysses_attention}[name]
    return attention(*inputs, mask=rg.Causal(), group=group, shards=shards)


def largest_error(group: Any, name: str, way: str) -> float:
    """On one rank: of a batch of backwards against one after another."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shards = Shards.contiguous(N, ranks)
    torch.manual_seed(rank)
    inputs = [torch.randn(2, 4, shards.lengths[rank], 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs = inputs[:1] if name == "unshard" else inputs
    out = results(name, group, inputs, shards)
    batch = torch.randn(3, *out.shape, dtype=out.dtype)
    expected = [torch.autograd.grad(out, inputs, g, retain_graph=True) for g in batch]
    if way == "is_grads_batched":
        found = zip(*torch.autograd.grad(out, inputs, batch, retain_graph=True, is_grads_batched=True), strict=True)
    elif way == "vmap":
        mapped = torch.vmap(lambda g: torch.autograd.grad(out, inputs, g, retain_graph=True))
        found = zip(*mapped(batch), strict=True)
    else:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones_like(batch[0]), batch[0])
            grads = torch.autograd.grad(out, inputs, dual, retain_graph=True)
            found, expected = [[forward_ad.unpack_dual(g).tangent for g in grads]], expected[:1]
    pairs = zip((t for each in found for t in each), (t for each in expected for t in each), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.full
@pytest.mark.parametrize("way", ["is_grads_batched", "vmap", "forward mode"])
@pytest.mark.parametrize("name", ["ring", "ulysses", "unshard"])
def test_batches_and_tangents(gloo: Group, name: str, way: str) -> None:
    assert max(gloo.run(largest_error, name, way, ranks=2)) < 1e-12
