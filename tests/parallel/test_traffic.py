"""What ranks send, in bytes, is what examples/parallel_cost.py computes."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import regard as rg
from gloo_processes import Group
from regard.parallel import Shards, ring_attention, shard, ulysses_attention
from regard.parallel.peers import Message, Messages, Peers

N, HEADS, KEY_HEADS, WIDTH = 1024, 8, 4, 4
MASKS = {"all": rg.Everything(), "causal": rg.Causal(), "window": rg.Causal() & rg.Window(before=255, after=0)}
FIELDS = {"all": {"causal": False}, "causal": {}, "window": {"window": 256}}


def sent(group: Any, way: str, mask: str) -> dict[str, int]:
    """Bytes of numbers that this rank sends, forward and backward."""
    counted, direction, post = Counter[str](), ["forward"], Peers.post

    def counting(peers: Peers, sends: Sequence[Message], receives: Sequence[Message]) -> Messages:
        counted[direction[0]] += sum(t.numel() * t.element_size() for t, _ in sends if t.is_floating_point())
        return post(peers, sends, receives)

    shards = getattr(Shards, "contiguous" if way == "ulysses" else way)(N, dist.get_world_size(group))
    whole = (torch.randn(1, h, N, WIDTH) for h in (HEADS, KEY_HEADS, KEY_HEADS))
    q, k, v = (shard(t, shards, dist.get_rank(group)).requires_grad_() for t in whole)
    attend = ulysses_attention if way == "ulysses" else ring_attention
    Peers.post = counting
    try:
        out = attend(q, k, v, group=group, shards=shards, mask=MASKS[mask])
        direction[0] = "backward"
        out.sum().backward()
    finally:
        Peers.post = post
    return dict(counted)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", ["contiguous", "zigzag", "striped", "ulysses"])
@pytest.mark.parametrize("ranks", [4, 2])
def test_bytes(gloo: Group, monkeypatch: pytest.MonkeyPatch, way: str, mask: str, ranks: int) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    cost: Any = importlib.import_module("parallel_cost")
    call = cost.Call(N, HEADS, KEY_HEADS, WIDTH, size=4, **FIELDS[mask])
    cluster = cost.Cluster("", ranks, 1e9, 1e9)
    found = gloo.run(sent, way, mask, ranks=ranks)
    for direction in ("forward", "backward"):
        computed = cost.ulysses(cluster, call, direction)
        if way != "ulysses":
            computed = cost.ring(cluster, call, direction, way)
        assert max(of_rank.get(direction, 0) for of_rank in found) == pytest.approx(computed.sent, rel=0.05)
