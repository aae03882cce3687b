"""examples/parallel_cost.py: its counts against masks written out, its simulation against what the papers say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg

N, RANKS = 24, 4  # zigzag halves are of 3 tokens


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("parallel_cost")


LAYOUTS = {
    "contiguous": [torch.arange(6 * rank, 6 * rank + 6) for rank in range(RANKS)],
    "zigzag": [
        torch.cat([torch.arange(3 * half, 3 * half + 3) for half in (rank, 2 * RANKS - 1 - rank)])
        for rank in range(RANKS)
    ],
    "striped": [torch.arange(rank, N, RANKS) for rank in range(RANKS)],
}
MASKS = {
    "all": ({"causal": False}, rg.Everything()),
    "causal": ({}, rg.Causal()),
    "window": ({"window": 8}, rg.Causal() & rg.Window(before=7, after=0)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_pairs_are_those_of_the_mask(cost: Any, layout: str, mask: str) -> None:
    fields, written = MASKS[mask]
    seen = written.dense(N).expand(1, 1, N, N)[0, 0]
    counted = [[int(seen[i][:, j].sum()) for j in LAYOUTS[layout]] for i in LAYOUTS[layout]]
    assert cost.visible_pairs(cost.Call(N, **fields), RANKS, layout).tolist() == counted


def test_every_rank_sends_all_blocks_but_one_and_their_gradients(cost: Any) -> None:
    call, cluster = cost.Call(4096, key_heads=8, causal=False), cost.Cluster("", RANKS, 1e12, 1e9)
    block = 2 * 8 * 1024 * 128
    assert cost.ring(cluster, call).sent == (RANKS - 1) * block * 2
    assert cost.ring(cluster, call, "backward").sent == (RANKS - 1) * block * (2 + 4)


def test_a_block_stops_behind_the_last_rank_that_sees_it(cost: Any) -> None:
    cluster = cost.Cluster("", 8, 1e12, 1e9)
    call = cost.Call(8 * 1024, window=1025)  # keys of the rank before, and no farther
    assert cost.ring(cluster, call, layout="contiguous").sent == 2 * call.bytes(call.key_heads, 1024)


@pytest.mark.parametrize(("tokens", "hidden"), [(24_960, True), (24_000, False)])
def test_a_ring_is_hidden_from_flops_over_bandwidth_on(cost: Any, tokens: int, hidden: bool) -> None:
    """Section 3 of arXiv 2310.01889: c >= F / B, 24,960 tokens of an A100 on InfiniBand."""
    cluster = cost.Cluster("", 8, 312e12, 12.5e9, latency=0.0)
    found = cost.ring(cluster, cost.Call(8 * tokens, causal=False))
    assert cost.smallest_block(cluster, cost.Call(1, causal=False)) == pytest.approx(24_960)
    assert (found.hidden > 1 - 1e-9) == hidden


def test_balanced_layouts_take_half_of_the_contiguous_one(cost: Any) -> None:
    """2 - 1 / ranks: section 3 of arXiv 2311.09431, where communication is hidden."""
    cluster, call = cost.Cluster("", 8, 1e12, 1e15, latency=0.0), cost.Call(8 * 4096)
    contiguous, zigzag, striped = (cost.ring(cluster, call, layout=name).seconds for name in LAYOUTS)
    assert contiguous / zigzag == pytest.approx(2 - 1 / 8, rel=1e-3)
    assert striped == pytest.approx(zigzag, rel=1e-3)


def test_ulysses_sends_four_hidden_states_over_the_ranks(cost: Any) -> None:
    """4 N h / P numbers, h the width of all heads: section 3.2 of arXiv 2309.14509, less what stays on the rank."""
    call = cost.Call(4096, size=1)
    sent = cost.ulysses(cost.Cluster("", 8, 1e12, 1e9), call).sent
    assert sent == 4 * 4096 * (32 * 128) / 8 * 7 / 8
    assert cost.ulysses(cost.Cluster("", 64, 1e12, 1e9), call) is None


def measured() -> dict[tuple[str, bool, int], float]:
    """Seconds of 16,384 causal tokens by layout, whether backward too, and processes."""
    table = (Path(__file__).parents[2] / "benchmarks/results/processes-intel.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| 16,384 tokens, 4 x 64, causal, (\w+)(, both)? \| (\d) \| ([\d.]+) \|", table)
    return {(layout, bool(both), int(ranks)): float(seconds) for layout, both, ranks, seconds in rows}


@pytest.mark.parametrize(("layout", "error"), [("zigzag", 0.15), ("contiguous", 0.40)])
@pytest.mark.parametrize("both", [False, True])
def test_seconds_are_near_those_that_were_measured(cost: Any, layout: str, error: float, both: bool) -> None:
    """Two processes, from the speed of one: docs/hosts.md states the errors. Four share two cores, and say nothing."""
    seconds, call = measured(), cost.Call(16384, 4, 4, 64, size=4)
    directions = ("forward", "backward") if both else ("forward",)
    pairs = float(cost.visible_pairs(call, 1, layout).sum())
    flops = sum(call.flops(pairs, direction) for direction in directions) / seconds[layout, both, 1]
    cluster = cost.Cluster("", 2, flops, 1e9, 50e-6)
    computed = sum(cost.ring(cluster, call, direction, layout).seconds for direction in directions)
    assert computed == pytest.approx(seconds[layout, both, 2], rel=error)


def test_the_tables_print(cost: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["--ranks", "16", "--bandwidth", "1e9", "--flops", "4e10", "--tokens", "16384"]
    monkeypatch.setattr("sys.argv", ["parallel_cost.py", *own])
    cost.main()
    printed = capsys.readouterr().out
    assert "usp 8 x 2" in printed and "states reduced" in printed
