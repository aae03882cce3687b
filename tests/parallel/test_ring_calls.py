"""Calls of ring_attention that differ in how tensors lie, what has a gradient, and who sees whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard as rg
from gloo_processes import Group
from regard.parallel import Shards, ring_attention, shard
from regard.parallel.comparison import described
from regard.parallel.shards import joined

RANKS = 3


def difference(group: Any, shards: Shards, q: Tensor, k: Tensor, v: Tensor, wanted: str = "qkv", **given: Any) -> float:
    """By how much the output and the gradients of what is `wanted` differ from one process's, at most."""
    rank = dist.get_rank(group)
    leaves = [t.clone().requires_grad_(name in wanted) for name, t in zip("qkv", (q, k, v), strict=True)]
    out = rg.attention(*leaves, **given)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    expected = [out, *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], g)]
    mine = [shard(t.detach(), shards, rank).requires_grad_(t.requires_grad) for t in leaves]
    own = ring_attention(*mine, group=group, shards=shards, timeout=60.0, **given)
    got = [own, *torch.autograd.grad(own, [t for t in mine if t.requires_grad], shard(g, shards, rank))]
    parts = [a.detach() - shard(b.detach(), shards, rank) for a, b in zip(got, expected, strict=True)]
    return max(float(t.abs().max()) if t.numel() else 0.0 for t in parts)


def drawn(*sizes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(*size, generator=draw, dtype=torch.float64) for size in sizes]


def tokens_in_any_order(group: Any) -> float:
    order = torch.randperm(21, generator=torch.Generator().manual_seed(3))
    shards = Shards.of([order[rank::RANKS] for rank in range(RANKS)])  # whose tensors have gaps
    q, k, v = drawn((2, 2, 21, 4), (2, 2, 21, 4), (2, 2, 21, 3))
    lengths = rg.Lengths(keys=torch.tensor([9, 17]))
    masks = rg.Causal(), lengths, lengths & rg.Causal(), rg.Documents(torch.arange(42)[::2] // 11) & rg.Causal()
    return max(difference(group, shards, q, k, v, mask=mask) for mask in masks)


def any_ranks_see_any_others(group: Any) -> float:
    """Blocks pass ranks that do not compute them, their gradients do not."""
    draw, worst = torch.Generator().manual_seed(4), 0.0
    for _ in range(12):
        seen = torch.rand(RANKS, RANKS, generator=draw) < 0.5
        mask = rg.Dense(seen.repeat_interleave(5, 0).repeat_interleave(5, 1)[None, None])
        q, k, v = drawn((1, 2, 15, 4), (1, 2, 15, 4), (1, 2, 15, 3))
        worst = max(worst, difference(group, Shards.contiguous(15, RANKS), q, k, v, mask=mask))
    return worst


def some_gradients_alone(group: Any) -> float:
    q, k, v = drawn((1, 2, 14, 4), (1, 1, 14, 4), (1, 1, 14, 3))
    shards = Shards.zigzag(14, RANKS)
    return max(difference(group, shards, q, k, v, wanted, mask=rg.Causal()) for wanted in ("q", "k", "v", "qv"))


def axes_of_every_kind(group: Any) -> float:
    n = 13
    shards, expanded = Shards.zigzag(n, RANKS), drawn((1, 1, n, 3))[0].expand(2, 2, n, 3)
    calls = [
        drawn((n, 4), (n, 4), (n, 3)),
        drawn((2, n, 4), (2, n, 4), (2, n, 3)),
        drawn((2, 3, 2, n, 4), (2, 3, 1, n, 4), (2, 3, 1, n, 3)),
        drawn((0, 2, n, 4), (0, 2, n, 4), (0, 2, n, 3)),
        [*(t.transpose(1, 2) for t in drawn((2, n, 2, 4), (2, n, 2, 4))), expanded],
    ]
    return max(difference(group, shards, *qkv, mask=rg.Causal()) for qkv in calls)


def positions_of_each_sequence(group: Any) -> float:
    at = torch.randint(0, 30, (2, 17), generator=torch.Generator().manual_seed(5))
    q, k, v = drawn((2, 2, 17, 4), (2, 2, 17, 4), (2, 2, 17, 3))
    shards = Shards.striped(17, RANKS)
    return difference(group, shards, q, k, v, mask=rg.Causal(), positions=rg.Positions(at, at))


def more_ranks_than_tokens(group: Any) -> float:
    return difference(group, Shards.contiguous(2, RANKS), *drawn((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 3)))


def several_calls_in_one_graph(group: Any) -> float:
    """Two calls beside each other and one behind them, as they are, and computed again in backward."""
    (x,), shards = drawn((1, 2, 12, 4)), Shards.zigzag(12, RANKS)
    own = shard(x, shards, dist.get_rank(group))

    def network(x: Tensor, **given: Any) -> Tensor:
        def attend(*qkv: Tensor) -> Tensor:
            return ring_attention(*qkv, mask=rg.Causal(), **given) if given else rg.attention(*qkv, mask=rg.Causal())

        a, b = attend(x, 2 * x, x), attend(x, x, 3 * x)
        return attend(a + b, b, a).sin().sum()

    options = {"group": group, "shards": shards, "timeout": 60.0}
    leaves = [t.clone().requires_grad_() for t in (x, own, own)]
    network(leaves[0]).backward()
    network(leaves[1], **options).backward()
    checkpoint(lambda x: network(x, **options), leaves[2], use_reentrant=False).backward()
    whole, plain, again = (t.grad for t in leaves)
    assert whole is not None and plain is not None and again is not None
    return max(
        float((t - shard(whole, shards, dist.get_rank(group))).abs().max() / whole.abs().max()) for t in (plain, again)
    )


CALLS = [
    tokens_in_any_order,
    any_ranks_see_any_others,
    some_gradients_alone,
    axes_of_every_kind,
    positions_of_each_sequence,
    more_ranks_than_tokens,
    several_calls_in_one_graph,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_as_in_one_process(gloo: Group, call: Any) -> None:
    assert max(gloo.run(call, ranks=RANKS)) < 1e-13


def answer(group: Any, device: str) -> str:
    x = torch.zeros(1, 1, 4, 4, device=device)
    try:
        ring_attention(x, x, x, group=group, timeout=60.0)
    except (ValueError, rg.Unsupported) as error:
        return str(error)
    return "answered"


def answer_of_two(_: Any) -> str:
    return answer(dist.new_group([0, 1]), "cpu")


def test_another_device_is_refused(gloo: Group) -> None:
    (found,) = gloo.run(answer, "meta", ranks=1)
    assert found.startswith("q is on meta") and "q.cpu()" in found


def test_a_process_outside_of_the_group_is_refused(gloo: Group) -> None:
    found = gloo.run(answer_of_two)
    assert found[:2] == ["answered"] * 2
    assert found[2:] == [f"group has no process {rank}; expected a call by its ranks alone." for rank in (2, 3)]


def answer_without_a_cpu(_: Any) -> str:
    return answer(dist.new_group([0, 1], backend="cuda:gloo"), "cpu")


def test_a_group_without_messages_on_the_cpu_is_refused(gloo: Group) -> None:
    for found in gloo.run(answer_without_a_cpu)[:2]:
        assert found.startswith("group has the backends cuda:gloo, none for tensors on the CPU; expected gloo")


@pytest.mark.parametrize("n", [0, 21, 1000])
def test_balanced_shards_of_masks_that_say_the_same_of_all(n: int) -> None:
    """Their covers have two axes, or one tile for all."""
    written = rg.Dense(torch.ones(n, n).tril().bool())
    for mask in (rg.Everything(), rg.Dilated(3), rg.Where(lambda b, h, i, j: i >= j), written):
        shards = Shards.balanced(mask, n, RANKS)
        assert torch.equal(torch.cat(shards.indices).sort().values, torch.arange(n))
        assert max(shards.lengths) - min(shards.lengths) <= 128


def test_balanced_shards_of_a_mask_of_other_tokens_are_refused() -> None:
    with pytest.raises(rg.ShapeError, match="8"):
        Shards.balanced(rg.Dense(torch.ones(8, 8).bool()), 16, 2)
    of_heads = rg.Dense(torch.ones(2, 4, 300, 300).tril().bool())
    assert torch.equal(torch.cat(Shards.balanced(of_heads, 300, 2).indices).sort().values, torch.arange(300))


@pytest.mark.parametrize("of_ranks", [[range(4), range(7, 3, -1)], [range(6, -1, -2), range(1, 8, 2)]], ids=str)
def test_shards_of_ranges_that_descend(of_ranks: list[range]) -> None:
    """The tokens of a rank in its own order."""
    shards, x = Shards.of(of_ranks), torch.arange(8)
    assert [t.tolist() for t in shards.indices] == [list(one) for one in of_ranks]
    assert [shard(x, shards, rank, dim=0).tolist() for rank in range(2)] == [list(one) for one in of_ranks]
    assert joined([shard(x, shards, rank, dim=0) for rank in range(2)], shards, 0).equal(x)


def test_shards_of_other_tokens_are_refused() -> None:
    for shards in (Shards.zigzag(1000, 2), Shards.contiguous(1000, 2)):
        for n in (1024, 900):
            with pytest.raises(rg.ShapeError, match=rf"{n} tokens along axis -2; expected 1000"):
                shard(torch.randn(1, 8, n, 4), shards, 1)


def test_a_description_names_no_device_of_a_rank() -> None:
    """Each rank has a GPU of its own; a tensor without axes is written with it."""

    class Held:
        def __init__(self, n: int) -> None:
            self.n = n

        def __repr__(self) -> str:
            return f"Temperature(t=tensor(2., device='cuda:{self.n}'))"

    assert described(Held(0)) == described(Held(1)) == "Temperature(t=tensor(2.))"


@pytest.mark.parametrize("n", [21, 1000, 5000])
def test_balanced_shards_are_balanced(n: int) -> None:
    """In tokens and in the pairs that their queries see, but for a piece."""
    shards = Shards.balanced(rg.Causal(), n, RANKS)
    assert torch.equal(torch.cat(shards.indices).sort().values, torch.arange(n))
    pairs = [float((at + 1).sum()) / (n * (n + 1) / 2) for at in shards.indices]
    assert max(shards.lengths) - min(shards.lengths) <= 256
    assert max(pairs) < 1.1 / RANKS
