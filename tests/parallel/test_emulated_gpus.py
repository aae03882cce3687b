"""Calls on tensors of a GPU, which is emulated (pretended_device, emulated_nccl): what one process computes on the CPU.

What a real GPU does beyond that (its kernels, their time, nccl's failures) is not shown here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emulated_nccl
from gloo_processes import Group
from gpu_calls import difference, layer, refused, some_ranks_see_some_others
from pretended_device import DEVICE
from ring_cases import Case, errors, layouts
from selection import in_turn
from test_raised_alone import checked, raising

pytestmark = pytest.mark.full


def emulated(group: Any, call: Any, *given: Any) -> tuple[Any, list[str]]:
    """What a function of the group answers, and the rules of nccl that were broken on this rank."""
    with emulated_nccl.nccl() as broken:
        return call(group, *given), broken


def answers(gpus: Group, ranks: int, call: Any, *given: Any) -> list[Any]:
    """What the ranks answer, none of which has broken a rule."""
    found, broken = zip(*gpus.run(emulated, call, *given, ranks=ranks), strict=True)
    assert list(broken) == [[]] * ranks
    return list(found)


MASKS = ["causal", "window", "documents", "lengths", "dense", "your own"]


@pytest.mark.parametrize(
    ("score", "mask", "layout", "ranks"), in_turn(["scaled", "slopes, bias"], MASKS, list(layouts(9, 2)), [3, 2, 4])
)
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


@pytest.mark.parametrize("ranks", [4, 3])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 10))])
def test_whoever_sees_whom(gpus: Group, seed: int, ranks: int) -> None:
    assert max(answers(gpus, ranks, some_ranks_see_some_others, DEVICE, seed)) < 1e-12


@pytest.mark.parametrize("ranks", [3, 2, 4])
@pytest.mark.parametrize("way", ["ulysses", "ordered", "tree"])
@pytest.mark.parametrize("layout", ["contiguous", "any", "ragged"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_other_ways(gpus: Group, mask: str, layout: str, way: str, ranks: int) -> None:
    assert max(answers(gpus, ranks, difference, DEVICE, way, layout, mask)) < 1e-12


@pytest.mark.parametrize("layout", ["zigzag", "ragged"])
@pytest.mark.parametrize("mask", ["causal", "window", "dense"])
def test_on_a_mesh(gpus: Group, mask: str, layout: str) -> None:
    assert max(answers(gpus, 4, difference, DEVICE, "usp", layout, mask)) < 1e-12


def test_a_layer_and_what_is_recorded(gpus: Group) -> None:
    assert max(answers(gpus, 3, layer, DEVICE)) < 1e-12


def test_what_cannot_go_is_refused(gpus: Group) -> None:
    for mixed, unlike, without in answers(gpus, 2, refused, DEVICE):
        assert mixed == f"k is on cpu, q on {DEVICE}:0; expected one device: move with .to(...)."
        assert unlike == f"the ranks make unlike calls: the device is {DEVICE} on rank 1, cpu on rank 0."
        assert f"of cpu:gloo,{DEVICE}:nccl none can; gloo sends tensors on the CPU alone. For GPUs call" in without


@pytest.mark.parametrize(("way", "ranks"), [("ring", 3), ("usp", 4), ("ulysses", 3), ("ordered", 2)])
@pytest.mark.parametrize("where", ["forward, first", "backward, first", "backward, last"])
def test_a_rank_that_raises_an_error_alone(gpus: Group, way: str, ranks: int, where: str) -> None:
    """Backward runs in a thread of the device there."""
    checked(answers(gpus, ranks, raising, way, 1, where, "ValueError", DEVICE), way, 1, where)
