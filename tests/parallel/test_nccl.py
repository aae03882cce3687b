"""Calls of several ranks on tensors of a real GPU, which travel by nccl: what one process computes on the CPU."""

from __future__ import annotations

import pytest
import torch

from gloo_processes import Group
from gpu_calls import difference, layer, refused, some_ranks_see_some_others
from ring_cases import Case, errors
from test_raised_alone import checked, raising

DEVICE = "cuda"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("layout", ["zigzag", "ragged"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents", "dense", "your own"])
@pytest.mark.parametrize("score", ["scaled", "slopes, bias", "additive"])
def test_ring(nccl: Group, score: str, mask: str, layout: str) -> None:
    case = Case(layout, mask, score, device=DEVICE, sink=True)
    assert max(max(of_rank) for of_rank in nccl.run(errors, case, ranks=3)) < 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mask", ["full", "window"])
def test_few_queries(nccl: Group, mask: str, ranks: int) -> None:
    case = Case("striped", mask, nq=7, heads=(4, 4), sink=True, device=DEVICE)
    assert max(max(of_rank) for of_rank in nccl.run(errors, case, ranks=ranks)) < 1e-12


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_dropout_and_half_precision_on_the_wire(nccl: Group, wire: torch.dtype | None) -> None:
    case = Case("zigzag", dtype=torch.float32, dropout=0.3, wire=wire, device=DEVICE)
    assert max(max(of_rank) for of_rank in nccl.run(errors, case, ranks=3)) < (1e-5 if wire is None else 5e-2)


@pytest.mark.parametrize("seed", [1, 2])
def test_whoever_sees_whom(nccl: Group, seed: int) -> None:
    assert max(nccl.run(some_ranks_see_some_others, DEVICE, seed)) < 1e-12


@pytest.mark.parametrize(
    ("way", "ranks"), [("ulysses", 3), ("ulysses", 4), ("ordered", 2), ("ordered", 3), ("tree", 4), ("usp", 4)]
)
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_other_ways(nccl: Group, mask: str, way: str, ranks: int) -> None:
    layout = "zigzag" if way == "usp" else "any"
    assert max(nccl.run(difference, DEVICE, way, layout, mask, ranks=ranks)) < 1e-12


def test_a_layer_and_what_is_recorded(nccl: Group) -> None:
    assert max(nccl.run(layer, DEVICE, ranks=3)) < 1e-12


def test_what_cannot_go_is_refused(nccl: Group) -> None:
    for mixed, unlike, without in nccl.run(refused, DEVICE, ranks=2):
        assert mixed == "k is on cpu, q on cuda:0; expected one device: move with .to(...)."
        assert unlike == "the ranks make unlike calls: the device is cuda on rank 1, cpu on rank 0."
        assert "of cpu:gloo,cuda:nccl none can; gloo sends tensors on the CPU alone. For GPUs call" in without


@pytest.mark.parametrize(("way", "ranks"), [("ring", 3), ("ulysses", 3)])
@pytest.mark.parametrize("where", ["forward, first", "backward, first", "backward, last"])
def test_a_rank_that_raises_an_error_alone(nccl: Group, way: str, ranks: int, where: str) -> None:
    checked(nccl.run(raising, way, 1, where, "ValueError", DEVICE, ranks=ranks), way, 1, where)
