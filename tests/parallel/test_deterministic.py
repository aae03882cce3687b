"""With deterministic= the bits of output and gradients depend neither on the number of ranks nor on who holds what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import regard as rg
from gloo_processes import Group
from regard.parallel import Shards, ring_attention, shard, unshard
from regard.parallel.ordered import OrderedFold

GRID, N = 16, 5 * 16 - 3  # the last block is shorter
MASKS = {
    "full": rg.Everything(),
    "causal": rg.Causal(),
    "window": rg.Causal() & rg.Window(before=20, after=0),
    "documents": rg.Documents(torch.arange(N) // 23) & rg.Causal(),
    "nothing": rg.Documents(torch.zeros(N, dtype=torch.int64), torch.ones(N, dtype=torch.int64)),
}


def layouts(ranks: int) -> list[Shards]:
    """Whole blocks, dealt out one by one, or in a row with a rank that has none."""
    blocks = [torch.arange(first, min(first + GRID, N)) for first in range(0, N, GRID)]
    none = torch.zeros(0, dtype=torch.int64)
    in_a_row = {1: [N], 2: [48, N - 48], 3: [32, 0, N - 32], 4: [16, 32, 0, N - 48]}[ranks]
    return [Shards.of([torch.cat([none, *blocks[r::ranks]]) for r in range(ranks)]), Shards.of_lengths(in_a_row)]


def bits(group: Any, layout: int, mask: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[list[Tensor], float]:
    """out and all gradients, whole, and their largest error against one process."""
    rank, shards = dist.get_rank(group), layouts(dist.get_world_size(group))[layout]
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, h, N, d, generator=draw).to(dtype) for h, d in ((4, 8), (2, 8), (2, 6), (4, 6)))
    wide = torch.promote_types(dtype, torch.float32)
    slopes, sink = (torch.linspace(first, 1, 4, dtype=wide).requires_grad_() for first in (0.1, -1))
    given = {"mask": MASKS[mask], "score": rg.ScaledDot() >> rg.Alibi(slopes), "sink": sink}
    mine = [shard(t, shards, rank).requires_grad_() for t in (q, k, v)]
    out = ring_attention(*mine, shards=shards, group=group, timeout=60.0, **given, **options)
    found = [out, *torch.autograd.grad(out, [*mine, slopes, sink], shard(g, shards, rank))]
    whole = [t.requires_grad_() for t in (q, k, v)]
    wanted = rg.attention(*whole, **given)
    expected = [wanted, *torch.autograd.grad(wanted, [*whole, slopes, sink], g)]
    joined = [unshard(t.detach(), shards, group) for t in found[:4]]
    for t in found[4:]:
        dist.all_reduce(t, group=group)
    joined += found[4:]
    pairs = [(a.detach(), b.detach()) for a, b in zip(joined, expected, strict=True)]
    return joined, max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def alike(found: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_any_number_of_ranks_gives_the_same_bits(gloo: Group, mask: str, dtype: torch.dtype) -> None:
    cases = [(ranks, layout) for ranks in (1, 2, 3, 4) for layout in (0, 1)]
    options = {"deterministic": GRID}
    answers = [gloo.run(bits, layout, mask, dtype, options, ranks=ranks) for ranks, layout in cases]
    assert alike([found for of_ranks in answers for found, _ in of_ranks])
    worst = max(error for of_ranks in answers for _, error in of_ranks)
    assert worst <= {torch.float32: 4e-6, torch.float64: 1e-13, torch.bfloat16: 0.07}[dtype]


@pytest.mark.full
def test_without_it_they_differ(gloo: Group) -> None:
    answers = [gloo.run(bits, 0, "full", torch.float32, {}, ranks=ranks)[0][0] for ranks in (1, 3, 4)]
    assert not alike(answers)


def test_half_precision_on_the_wire_is_that_of_every_rank(gloo: Group) -> None:
    options = {"deterministic": GRID, "wire": torch.bfloat16}
    answers = [gloo.run(bits, 0, "causal", torch.float32, options, ranks=ranks)[0][0] for ranks in (1, 2, 3)]
    assert alike(answers)


def divided(group: Any) -> str:
    q, ranks = torch.zeros(1, 10, 4), dist.get_world_size(group)
    with pytest.raises(ValueError, match="deterministic=8") as raised:
        ring_attention(q, q, q, group=group, shards=Shards.contiguous(10 * ranks, ranks), deterministic=8)
    return str(raised.value)


def test_a_block_on_two_ranks_is_refused(gloo: Group) -> None:
    for said in gloo.run(divided, ranks=2):
        assert said == (
            "deterministic=8: rank 0 holds a part of a block of 8 tokens of q, around token 8; expected shards of "
            "whole blocks."
        )


@pytest.mark.parametrize("count", [1, 2, 5, 8, 13])
def test_parts_are_joined_alike_in_whatever_order_they_come(count: int) -> None:
    def joined(order: list[int]) -> str | None:
        fold = OrderedFold[str](count, lambda a, b: f"({a} {b})")
        for number in order:
            fold.add(number, str(number))
        return fold.finish()

    random = torch.Generator().manual_seed(0)
    expected = joined(list(range(count)))
    assert expected is not None and expected.count("(") == count - 1
    for _ in range(20):
        order = torch.randperm(count, generator=random)
        assert joined(order.tolist()) == expected
        whole, folds = OrderedFold[str](count, lambda a, b: f"({a} {b})"), [part.tolist() for part in order.chunk(3)]
        for numbers in folds:  # of three ranks
            fold = OrderedFold[str](count, whole.join)
            for number in numbers:
                fold.add(number, str(number))
            for (level, number), part in fold.waiting.items():
                whole.add(number, part, level)
        assert whole.finish() == expected
    assert OrderedFold[str](count, lambda a, b: a + b).finish() is None
