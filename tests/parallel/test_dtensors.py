"""DTensors sharded along the sequence, and dimensions of a DeviceMesh, in place of tensors and groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import regard as rg
from gloo_processes import Group
from regard.parallel import Shards, ring_attention, ring_attention_state, shard

N = 21  # divided by no number of ranks here


def whole() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, N, d, generator=draw, dtype=torch.float64) for h, d in ((4, 6), (2, 6), (2, 5))]


def distributed(group: Any) -> tuple[float, str]:
    """The largest error of output and gradients of a causal call on DTensors, and how the output is placed."""
    mesh = DeviceMesh.from_group(group, "cpu")
    q, k, v = (distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in whole())
    out = ring_attention(q, k, v, mask=rg.Causal())
    assert isinstance(out, DTensor)
    state, _ = ring_attention_state(q, k, v, mask=rg.Causal()).finish()
    assert torch.allclose(state, out.to_local())
    found = [out, *torch.autograd.grad(out.to_local().sin().sum(), (q, k, v))]
    tensors = [t.requires_grad_() for t in whole()]
    wanted = rg.attention(*tensors, mask=rg.Causal())
    expected = [wanted, *torch.autograd.grad(wanted.sin().sum(), tensors)]
    errors = [float((a.detach().full_tensor() - b.detach()).abs().max()) for a, b in zip(found, expected, strict=True)]
    return max(errors), str(out.placements)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [3, 2, 4])
def test_a_sharded_sequence(gloo: Group, ranks: int) -> None:
    for error, placements in gloo.run(distributed, ranks=ranks):
        assert error < 1e-13 and placements == "(Shard(dim=2),)"


def over_a_mesh(group: Any) -> list[float]:
    """Two rings of two ranks, each along the second dimension of a mesh, by DTensors and by that dimension as group."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("data", "sequence"))
    q, k, v = (distribute_tensor(t, mesh, [Replicate(), Shard(2)]) for t in whole())
    wanted = rg.attention(*whole(), mask=rg.Causal())
    first = ring_attention(q, k, v, mask=rg.Causal())
    shards, rank = Shards.zigzag(N, 2), mesh.get_local_rank("sequence")
    mine = [shard(t, shards, rank) for t in whole()]
    second = ring_attention(*mine, group=mesh["sequence"], shards=shards, mask=rg.Causal())
    errors = [first.full_tensor() - wanted, second - shard(wanted, shards, rank)]
    return [float(error.abs().max()) for error in errors]


@pytest.mark.full
def test_one_dimension_of_a_mesh(gloo: Group) -> None:
    for errors in gloo.run(over_a_mesh, ranks=4):
        assert max(errors) < 1e-13


def wrong(group: Any) -> list[str]:
    mesh, said = DeviceMesh.from_group(group, "cpu"), []
    q, k, v = whole()
    sharded, replicated = (distribute_tensor(q, mesh, [placement]) for placement in (Shard(2), Replicate()))
    for tensors in ((sharded, k, v), (sharded, replicated, sharded)):
        with pytest.raises((TypeError, ValueError), match="expected") as raised:
            ring_attention(*tensors)
        said.append(str(raised.value))
    return said


def test_other_placements_are_refused(gloo: Group) -> None:
    mixed, whole_keys = gloo.run(wrong, ranks=2)[0]
    assert mixed == "k is a Tensor of float64, and others are DTensors; expected three of them."
    assert whole_keys == (
        "k has the placements (Replicate(),); expected Shard(2), its tokens, over one dimension of the mesh and "
        "Replicate() over the others."
    )
