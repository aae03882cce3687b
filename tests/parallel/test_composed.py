"""Sequences over one dimension of a mesh, batches over the other: DDP and FSDP2 need not know of the former."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import regard as rg
from gloo_processes import Group
from regard.parallel import SequenceParallel, Shards, shard

N, WIDTH = 14, 16


class Model(nn.Module):
    """A causal layer of attention between two linear ones, with learned slopes."""

    def __init__(self, parallel: SequenceParallel | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.attention = rg.nn.MultiHeadAttention(WIDTH, heads=4, dtype=torch.float64, parallel=parallel)
        self.last = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.attention(self.first(x), mask=rg.Causal()))).square().sum()


def texts() -> Tensor:
    """One for each of two places along the mesh's dimension of data."""
    return torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(group: Any, wrapper: str) -> float:
    """The largest error of a gradient, against one process that has all tokens of both texts."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("data", "sequence"))
    data, sequence = mesh["data"], mesh["sequence"]
    shards = Shards.zigzag(N, 2)
    model: Any = Model(SequenceParallel(shards, sequence))
    if wrapper == "DDP":
        model = DistributedDataParallel(model, process_group=data.get_group())
    else:
        fully_shard(model, mesh=data)
    mine = shard(texts()[data.get_local_rank()][None], shards, sequence.get_local_rank())
    model(mine).backward()
    alone = Model(None)
    (sum(alone(x[None]) for x in texts()) / 2).backward()  # both take the mean over the ranks of data
    worst = 0.0
    for own, expected in zip(model.parameters(), alone.parameters(), strict=True):
        found = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
        dist.all_reduce(found, group=sequence.get_group())
        worst = max(worst, float((found - expected.grad).abs().max() / expected.grad.abs().max().clamp(min=1)))
    return worst


@pytest.mark.full
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_gradients_are_those_of_one_process(gloo: Group, wrapper: str) -> None:
    assert max(gloo.run(gradients, wrapper, ranks=4)) < 1e-12
