"""What users do beside and around these calls: messages of their own, autocast, transforms, parts that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

import regard as rg
from gloo_processes import Group
from regard.parallel import Shards, ring_attention, shard, tree_decode, ulysses_attention, unshard, usp_attention

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "tree": tree_decode,
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def said(call: Callable[[], object]) -> str:
    """The kind of error and its sentence."""
    try:
        return f"no error: {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def beside_own_messages(group: Any) -> tuple[float, list[float]]:
    """A receive of the user's own, posted before the call and sent behind it: the error of the call, and what came."""
    rank = dist.get_rank(group)
    q, shards = drawn(1, 2, 8, 4), Shards.contiguous(8, 2)
    mine, buffer = shard(q, shards, rank), torch.zeros(2)
    received = dist.irecv(buffer, 1, group=group) if rank == 0 else None
    out = ring_attention(mine, mine, mine, group=group, timeout=20.0)
    if rank == 1:
        dist.send(torch.ones(2), 0, group=group)
    if received is not None:
        received.wait()
    return float((out - shard(rg.attention(q, q, q), shards, rank)).abs().max()), buffer.tolist()


def test_a_users_own_messages_are_not_taken(gloo: Group) -> None:
    (first, came), (second, _) = gloo.run(beside_own_messages, ranks=2)
    assert max(first, second) < 1e-6 and came == [1, 1]


def refused(group: Any, function: str) -> dict[str, str]:
    rank, call = dist.get_rank(group), FUNCTIONS[function]
    q = drawn(1, 2, 4, 4)
    found = {
        "values": said(lambda: call(q, q, q[:, :, : 3 if rank else 4], group=group, timeout=20.0)),
        "one axis": said(lambda: call(q[0, 0, 0], q, q, group=group, timeout=20.0)),
        "meta": said(lambda: call(*[q.to("meta")] * 3, group=group, timeout=20.0)),
        "vmap": said(lambda: torch.func.vmap(lambda x: call(x, x, x, group=group))(torch.stack([q, q]))),
    }
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        found["forward mode"] = said(lambda: call(q, q, dual, group=group, timeout=20.0))
    assert call(q, q, q, group=group, timeout=20.0).isfinite().all()
    return found


@pytest.mark.parametrize("function", list(FUNCTIONS))
def test_what_messages_cannot_follow_is_refused_on_every_rank(gloo: Group, function: str) -> None:
    first, second = gloo.run(refused, function, ranks=2)
    assert first == second
    assert first["values"] == (
        "ShapeError: v has (4, 3) values on the ranks of the group, k (4, 4) keys; expected one value a key."
    )
    assert first["one axis"].startswith("ShapeError: q has shape (4,); expected (*batch, heads, n, d)")
    assert first["meta"].startswith("Unsupported: q is on meta: ranks exchange tensors over the group's backend for it")
    assert "call init_process_group('cpu:gloo,cuda:nccl')" in first["meta"]
    for what in ("vmap", "forward mode"):
        assert "has no forward mode, and no transform of torch.func" in first[what]


def unlike(group: Any) -> list[str]:
    rank, q = dist.get_rank(group), drawn(1, 2, 4, 4)
    k, other = drawn(1, 2, 5 if rank else 3, 4), ring_attention if rank else ulysses_attention
    return [
        said(lambda: other(q, q, q, group=group, timeout=20.0)),
        said(lambda: tree_decode(q[:, :, : 1 + rank], q, q, group=group, timeout=20.0)),
        said(lambda: tree_decode(q + rank, q, q, group=group, timeout=20.0)),
        said(lambda: ring_attention(q, q, q, group=group, wire=torch.int32)),
        said(lambda: ring_attention(q, k, k, group=group, shards=Shards.zigzag(8, 2))),
        said(lambda: ring_attention(q, q, q, group=group, deterministic=0)),
    ]


def test_unlike_functions_queries_and_shards_are_named(gloo: Group) -> None:
    for functions, counts, content, wire, keys, grid in gloo.run(unlike, ranks=2):
        assert "the function is ring_attention on rank 1, ulysses_attention on rank 0" in functions
        assert "q, which all ranks have is (1, 2, 2, 4) " in counts
        assert "q, which all ranks have is (1, 2, 4, 4) " in content
        assert wire == "TypeError: wire is torch.int32; expected a floating-point dtype, such as torch.bfloat16."
        assert keys == (
            "ShapeError: k has [3, 5] tokens on the ranks of the group; expected Shards(8 tokens, 4, 4 on 2 ranks)."
        )
        assert grid == "ValueError: deterministic is 0; expected 1 or more."


def of_wrong_kinds(group: Any) -> dict[str, list[str]]:
    rank, q = dist.get_rank(group), drawn(1, 2, 4, 4)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    calls = {name: partial(call, group=group) for name, call in FUNCTIONS.items()}
    calls["usp"] = partial(usp_attention, group=mesh, shards=Shards.contiguous(16, 4))
    wrong: tuple[dict[str, Any], ...] = (
        {"mask": torch.ones(4, 4).bool()},
        {"dropout": 0.1},
        {"positions": torch.arange(4)},
        {"score": "dot"},
    )
    found = {
        name: [said(partial(call, q, q, q, timeout=20.0, **given)) for given in wrong]
        for name, call in calls.items()
        if name != "tree"
    }
    found["tree"] = [said(partial(calls["tree"], q, q, q, timeout=20.0, mask=wrong[0]["mask"]))]
    fewer = Shards.contiguous(16, 2)
    found["key shards"] = [said(partial(calls["usp"], q, q, q, key_shards=fewer, timeout=20.0))]
    two = Shards.zigzag(16, 4) if rank == 0 else Shards.contiguous(16, 4)
    found["unshard"] = [said(lambda: unshard(q, two, group))]
    return found


@pytest.mark.full
def test_values_of_other_kinds_are_refused_as_by_attention(gloo: Group) -> None:
    q = drawn(1, 2, 4, 4)
    wrong: Any = torch.ones(4, 4).bool()
    expected = said(lambda: rg.attention(q, q, q, mask=wrong))
    for found in gloo.run(of_wrong_kinds, ranks=4):
        for name in ("ring", "ulysses", "usp", "tree"):
            assert found[name][0] == expected
        for name in ("ring", "ulysses", "usp"):
            assert found[name][1].startswith("TypeError: dropout is a float") and "Dropout(0.1)" in found[name][1]
            assert found[name][2].startswith("TypeError: positions is a Tensor")
            assert found[name][3].startswith("TypeError: score is")
        assert found["key shards"] == ["ShapeError: key_shards are of 2 ranks; expected 4, as shards."]
        assert found["unshard"][0].startswith("PeerError: ") and "shards" in found["unshard"][0]


def dropped(group: Any, seed: int) -> list[float]:
    q, dropout, rank = drawn(1, 2, 8, 4), rg.Dropout(0.4, seed=seed), dist.get_rank(group)
    mine = q[:, :, 4 * rank : 4 * rank + 4]
    wanted = rg.attention(q, q, q, dropout=dropout)[:, :, 4 * rank : 4 * rank + 4]
    calls = (ring_attention, ulysses_attention)
    return [float((call(mine, mine, mine, group=group, dropout=dropout) - wanted).abs().max()) for call in calls]


def test_a_seed_may_have_any_number_of_bits(gloo: Group) -> None:
    for seed in (2**64 - 1, -(2**70) - 5):
        assert max(max(of_rank) for of_rank in gloo.run(dropped, seed, ranks=2)) < 1e-5


def shared_batches(group: Any) -> list[float]:
    """Of keys of two sequences for queries of one, with positions of each; and under autocast."""
    rank, shards = dist.get_rank(group), Shards.zigzag(12, 2)
    q, k, v = drawn(1, 4, 12, 4), drawn(2, 2, 12, 4, seed=1), drawn(2, 2, 12, 3, seed=2)
    at = torch.stack([torch.arange(12), torch.arange(12).flip(0)])
    given: dict[str, Any] = {"mask": rg.Causal(), "positions": rg.Positions(at, at)}
    mine = [shard(t, shards, rank).requires_grad_() for t in (q, k, v)]
    whole = [t.requires_grad_() for t in (q, k, v)]
    out, wanted = (
        ring_attention(*mine, group=group, shards=shards, timeout=20.0, **given),
        rg.attention(*whole, **given),
    )
    pairs = [(out, wanted)]
    found, expected = torch.autograd.grad(out.sum(), mine), torch.autograd.grad(wanted.sum(), whole)
    pairs += zip(found, expected, strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        half, wanted = ring_attention(*mine, group=group, shards=shards, **given), rg.attention(*whole, **given)
    assert half.dtype == wanted.dtype == torch.bfloat16
    pairs.append((half, wanted))
    return [float((a - shard(b, shards, rank)).detach().abs().max()) for a, b in pairs]


def test_batches_are_shared_and_autocast_is_heard(gloo: Group) -> None:
    for *exact, half in gloo.run(shared_batches, ranks=2):
        assert max(exact) < 2e-6 and half < 0.02


def joined(group: Any) -> list[str]:
    rank, shards = dist.get_rank(group), Shards.contiguous(8, 2)
    x = torch.ones(4, 2, requires_grad=True)
    (once,) = torch.autograd.grad(unshard(x, shards, group).pow(3).sum(), x, create_graph=True)
    return [
        said(lambda: unshard(torch.ones(3 if rank else 4, 2), shards, group)),
        said(lambda: once.sum().backward()),
        said(lambda: tuple(unshard(x.detach(), shards, DeviceMesh.from_group(group, "cpu")).shape)),
        said(lambda: unshard(x, shards, group, dim=5 if rank else -2)),
        said(lambda: unshard(x.double() if rank else x, shards, group)),
        said(lambda: unshard(x.to("meta"), shards, group)),
        said(lambda: tuple(unshard(x.detach(), shards, group).shape)),
    ]


def test_parts_that_do_not_fit_are_not_joined(gloo: Group) -> None:
    for rank, (short, twice, mesh, axis, dtype, meta, right) in enumerate(gloo.run(joined, ranks=2)):
        assert short == (
            "ShapeError: x has [4, 3] tokens on the ranks of the group; expected Shards(8 tokens, 4, 4 on 2 ranks)."
        )
        assert "once_differentiable" in twice
        assert mesh == right == "no error: (8, 2)"
        assert meta.startswith("Unsupported: x is on meta: ranks exchange tensors over the group's backend for it")
        assert axis.startswith(
            "IndexError" if rank else "PeerError: rank 1 of 4 processes raised IndexError: Dimension"
        )
        assert "x is torch.float64 (4, 2) on rank 1, torch.float32 (4, 2) on rank 0; expected what differs" in dtype


def compiled(group: Any) -> float:
    q = drawn(1, 2, 4, 4)
    twice = torch.compile(lambda x: 2 * ring_attention(x, x, x, group=group, timeout=20.0), backend="eager")
    return float((twice(q) - 2 * ring_attention(q, q, q, group=group, timeout=20.0)).abs().max())


@pytest.mark.full
def test_a_compiled_function_breaks_its_graph_there(gloo: Group) -> None:
    assert max(gloo.run(compiled, ranks=2)) < 1e-6
