"""Layers, decoding and what is looked at, over processes: what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import regard as rg
from gloo_processes import Group
from regard.parallel import (
    SequenceParallel,
    Shards,
    ring_attention,
    shard,
    tree_decode,
    ulysses_attention,
    unshard,
    usp_attention,
)

N, WIDTH = 23, 24
SHARDS = {
    1: Shards.of([torch.arange(N)]),
    2: Shards.of([torch.arange(0, N, 3), torch.tensor([i for i in range(N) if i % 3])]),
    3: Shards.of([torch.arange(5, N), torch.arange(0), torch.arange(5)]),
    4: Shards.of([torch.arange(rank, N, 4) for rank in range(4)]),
}
FACTS = (rg.facts.Entropy(), rg.facts.MaxScore())


def layer(dropout: float = 0.0) -> rg.nn.MultiHeadAttention:
    """The same in every process."""
    torch.manual_seed(3)
    score = rg.ScaledDot() >> rg.Alibi(torch.linspace(0.1, 1, 6, dtype=torch.float64))
    options: dict[str, Any] = {"rotary": rg.nn.Rotary(4), "qk_norm": torch.nn.RMSNorm, "sink": 0.3, "dropout": dropout}
    made = rg.nn.MultiHeadAttention(WIDTH, 6, key_heads=2, score=score, dtype=torch.float64, **options)
    return made


def tokens() -> Tensor:
    return torch.randn(2, N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def layer_error(group: Any, attend: Callable[..., Tensor], *mesh: int) -> float:
    shards, rank = SHARDS[dist.get_world_size(group)], dist.get_rank(group)
    mine, mask = shards.indices[rank], rg.Causal() & rg.Window(before=7, after=0)
    whole, part = layer(), layer()
    part.parallel = SequenceParallel(shards, init_device_mesh("cpu", mesh) if mesh else group, attend)
    x, y = tokens().requires_grad_(), tokens()[:, mine].requires_grad_()
    out, found = whole(x, mask=mask), part(y, mask=mask)
    cotangent = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(6))
    out.backward(cotangent)
    found.backward(cotangent[:, mine])
    assert x.grad is not None and y.grad is not None
    pairs = [(found, out[:, mine]), (y.grad, x.grad[:, mine])]
    for a, b in zip(part.parameters(), whole.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        dist.all_reduce(a.grad, group=group)
        pairs.append((a.grad, b.grad))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if b.numel())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
def test_layer(gloo: Group, attend: Callable[..., Tensor], ranks: int) -> None:
    assert max(gloo.run(layer_error, attend, ranks=ranks)) < 1e-13


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 4)])
def test_layer_on_a_mesh(gloo: Group, mesh: tuple[int, int]) -> None:
    assert max(gloo.run(layer_error, usp_attention, *mesh, ranks=4)) < 1e-13


def dropped(group: Any, attend: Callable[..., Tensor]) -> list[bool]:
    """With a seed that the first rank draws: what one process drops, in two calls that differ."""
    shards, rank = SHARDS[dist.get_world_size(group)], dist.get_rank(group)
    whole, part = layer(0.4), layer(0.4)
    part.parallel = SequenceParallel(shards, group, attend)
    mine = shards.indices[rank]
    torch.manual_seed(11)
    outs = [whole(tokens()) for _ in range(2)]
    torch.manual_seed(11 + rank)
    found = [part(tokens()[:, mine]) for _ in range(2)]
    same = [torch.allclose(a, b[:, mine], rtol=0, atol=1e-13) for a, b in zip(found, outs, strict=True)]
    return [*same, not torch.equal(*outs)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
def test_layer_drops_what_one_process_drops(gloo: Group, attend: Callable[..., Tensor], ranks: int) -> None:
    assert gloo.run(dropped, attend, ranks=ranks) == [[True, True, True]] * ranks


def facts(group: Any, *mesh: int) -> float:
    shards, rank = SHARDS[dist.get_world_size(group)], dist.get_rank(group)
    mine, whole, part = shards.indices[rank], layer().eval(), layer().eval()
    over = (init_device_mesh("cpu", mesh), usp_attention) if mesh else (group,)
    part.parallel = SequenceParallel(shards, *over)
    with torch.no_grad(), rg.record(whole, FACTS) as expected:
        whole(tokens(), mask=rg.Causal())
    with torch.no_grad(), rg.record(part, FACTS) as found:
        part(tokens()[:, mine], mask=rg.Causal())
    assert len(found) == len(expected) == 1
    pairs = [(found.calls[0][FACTS[0]], expected.calls[0][FACTS[0]][..., mine])]
    largest, wanted = found.calls[0][FACTS[1]], expected.calls[0][FACTS[1]]
    pairs += [(a, b[..., mine]) for a, b in zip(largest, wanted, strict=True)]
    return max((float((a - b).abs().max()) for a, b in pairs if b.numel()), default=0.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_recorded_facts_are_those_of_the_whole(gloo: Group, ranks: int) -> None:
    assert max(gloo.run(facts, ranks=ranks)) < 1e-12


def test_recorded_facts_on_a_mesh(gloo: Group) -> None:
    assert max(gloo.run(facts, 2, 2, ranks=4)) < 1e-12


def unshard_error(group: Any) -> float:
    """Of a tensor and of its gradient, on a mesh."""
    shards, rank, whole = SHARDS[4], dist.get_rank(group), tokens()
    part = shard(whole, shards, rank).clone().requires_grad_()
    found = unshard(part, shards, init_device_mesh("cpu", (2, 2)))
    found.backward(whole * (rank + 1))  # ranks 0 to 3 have 10 of it together
    assert part.grad is not None
    return float((found - whole).abs().max() + (part.grad - 10 * shard(whole, shards, rank)).abs().max())


def test_unshard_on_a_mesh(gloo: Group) -> None:
    assert max(gloo.run(unshard_error, ranks=4)) < 1e-13


def decoded(group: Any, mask: str, dtype: torch.dtype) -> tuple[float, Tensor]:
    shards, draw = SHARDS[dist.get_world_size(group)], torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(2, h, n, 8, dtype=dtype, generator=draw) for h, n in ((6, 3), (2, N), (2, N)))
    slopes, bias = torch.linspace(0.1, 1, 6), torch.randn(6, 3, N, generator=draw)
    call = {
        "score": rg.ScaledDot() >> rg.Alibi(slopes) >> rg.Bias(bias),
        "mask": MASKS[mask],
        "sink": torch.linspace(-1, 1, 6, dtype=dtype),
        "positions": rg.tail(3, N),
    }
    out = rg.attention(q, k, v, **call)
    k, v = (shard(t, shards, dist.get_rank(group)) for t in (k, v))
    found = tree_decode(q, k, v, group=group, key_shards=shards, **call)
    return float((found - out).abs().max()), found


MASKS = {
    "causal": rg.Causal(),
    "window": rg.Causal() & rg.Window(before=3, after=0),
    "documents": rg.Documents(torch.tensor([2, 2, 3]), torch.arange(N) // 6),
    "lengths": rg.Lengths(keys=torch.tensor([N, 9])),
    "nothing": ~rg.Everything(),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_decoding(gloo: Group, ranks: int, mask: str, dtype: torch.dtype, bound: float) -> None:
    errors, outs = zip(*gloo.run(decoded, mask, dtype, ranks=ranks), strict=True)
    assert max(errors) < bound
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_layer_refuses_what_it_cannot_do_in_parts() -> None:
    made = layer()
    made.parallel = SequenceParallel(Shards.contiguous(N, 1))
    with pytest.raises(ValueError, match=r"context is given to a layer with parallel="):
        made(tokens(), tokens())
    with pytest.raises(ValueError, match=r"positions is given"):
        made(tokens(), positions=rg.head(N, N))
    with pytest.raises(ValueError, match=r"cache is given"):
        made(tokens(), cache=rg.nn.GrowingCache())
    with pytest.raises(ValueError, match=r"those of this process's keys alone"):
        made.weights(tokens())
