"""A rank that raises an error alone, in the middle of a call: the others name it at once, and the group is of use."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import regard as rg
from gloo_processes import Group
from regard.core.region import Region
from regard.parallel import PeerError, Shards, ring_attention, shard, tree_decode, ulysses_attention, usp_attention
from regard.parallel.peers import Peers

N, TIMEOUT, SOON = 24, 60.0, 20.0
ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError("a score of one's own\nand its second line"),
    "OutOfMemory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
    "KeyboardInterrupt": KeyboardInterrupt(),
}


@dataclass
class Evaluations:
    """How often this process has evaluated the score, and which evaluation raises what."""

    count: int = 0
    fatal: int = -1
    error: str = "ValueError"


SEEN = Evaluations()
# The score is not tried beforehand, so that each evaluation is of a pair of blocks.
untried = partial(patch, "regard.api.check_of_some_keys", lambda problem: None)


@dataclass(frozen=True)
class Counted(rg.Modifier):
    """Scores as they are, each evaluation counted: one for each pair of blocks, two with gradients."""

    def modify(self, s: Tensor, at: Region) -> Tensor:
        assert at.rows is not None  # which no program may ask, so that Python runs it for each pair of blocks
        SEEN.count += 1
        if SEEN.count - 1 == SEEN.fatal:
            raise ERRORS[SEEN.error]
        return s


@cache
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(4).reshape(2, 2))


@untried()
def call(group: Any, way: str, counts: list[int], device: str = "cpu") -> float:
    """The largest error of one call with its gradients; `counts` gets the evaluations, forward and in all."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    few = 4 if way in ("few queries", "tree") else N
    keys = Shards.zigzag(N, ranks)
    queries = Shards.of([torch.arange(few)] * (way == "tree") or Shards.zigzag(few, ranks).of_ranks)
    attend: Callable[..., Tensor] = {"ulysses": ulysses_attention, "usp": usp_attention}.get(way, ring_attention)
    attend = partial(attend, group=mesh() if way == "usp" else group, shards=queries, key_shards=keys, timeout=TIMEOUT)
    if way == "ordered":
        attend = partial(attend, deterministic=N // (2 * ranks))
    if way == "tree":
        attend = partial(tree_decode, group=group, key_shards=keys, timeout=TIMEOUT)
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 4, n, 4, generator=draw, dtype=torch.float64).requires_grad_() for n in (few, N, N)]
    of = (queries, 0 if way == "tree" else rank), (keys, rank), (keys, rank)
    mine = [shard(t.detach(), *x).to(device).requires_grad_(way != "tree") for t, x in zip(whole, of, strict=True)]
    given: dict[str, Any] = {"score": rg.ScaledDot() >> Counted(), "mask": rg.Causal()}
    SEEN.count = 0
    found = [attend(*mine, **given, positions=rg.tail(few, N, device))]
    counts.append(SEEN.count)
    if way != "tree":
        found += torch.autograd.grad(found[0].sum(), mine)
    counts.append(SEEN.count)
    SEEN.fatal = -1
    out = rg.attention(*whole, **given, positions=rg.tail(few, N))
    expected = [out, *torch.autograd.grad(out.sum(), whole)]
    pairs = zip(found, expected, (of[0], *of), strict=False)
    return max(float((a.cpu() - shard(b, *x)).detach().abs().max()) for a, b, x in pairs)


def said(attempt: Callable[[], object]) -> str:
    try:
        return f"no error: {attempt()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def raising(
    group: Any, way: str, odd: int, where: str, error: str, device: str = "cpu"
) -> tuple[str, int, float, float]:
    """What a rank says of a call in which rank `odd` raises an error, how often it has evaluated the score, for how
    many seconds, and how wrong the next call is.
    """
    counts: list[int] = []
    assert call(group, way, counts, device) < 1e-12
    forward, both = counts
    SEEN.error = error
    if dist.get_rank(group) == odd:
        steps = {"forward, first": 0, "forward, last": forward - 1, "backward, first": forward}
        SEEN.fatal = {**steps, "backward, last": both - 1}[where]
    start = time.monotonic()
    answer = said(lambda: call(group, way, [], device))
    seconds, evaluated, SEEN.fatal = time.monotonic() - start, SEEN.count, -1
    return answer, evaluated, seconds, call(group, way, [], device)


def check(gloo: Group, way: str, ranks: int, odd: int, where: str, error: str = "ValueError") -> list[int]:
    """How often each rank has evaluated the score."""
    return checked(gloo.run(raising, way, odd, where, error, ranks=ranks), way, odd, where, error)


def checked(found: list[Any], way: str, odd: int, where: str, error: str = "ValueError") -> list[int]:
    raised = f"{type(ERRORS[error]).__name__}: {ERRORS[error]}"
    known = raised.partition("\n")[0]
    for rank, (answer, _, seconds, wrong) in enumerate(found):
        if rank == odd:
            assert answer == raised
        else:
            assert answer.startswith(f"PeerError: rank {odd} of 4 processes raised {known}. Every rank of this call")
        assert seconds < SOON and wrong < 1e-12
    return [evaluated for _, evaluated, _, _ in found]


@pytest.mark.parametrize(
    ("way", "where"),
    [("ring", "forward, first"), ("ring", "backward, first"), ("ulysses", "forward, first"), ("tree", "forward, last")],
)
def test_the_others_name_it_and_the_next_call_is_right(gloo: Group, way: str, where: str) -> None:
    check(gloo, way, 3, 1, where)


@pytest.mark.full
@pytest.mark.parametrize("way", ["ring", "few queries", "ordered", "ulysses"])
@pytest.mark.parametrize("where", ["forward, first", "forward, last", "backward, first", "backward, last"])
@pytest.mark.parametrize(("ranks", "odd"), [(2, 0), (3, 2), (4, 1)])
def test_wherever_it_is_raised(gloo: Group, way: str, where: str, ranks: int, odd: int) -> None:
    check(gloo, way, ranks, odd, where)


@pytest.mark.full
@pytest.mark.parametrize("where", ["forward, first", "forward, last", "backward, first", "backward, last"])
@pytest.mark.parametrize("odd", [0, 3])
def test_on_a_mesh(gloo: Group, where: str, odd: int) -> None:
    check(gloo, "usp", 4, odd, where)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("error", list(ERRORS))
@pytest.mark.parametrize("way", ["ring", "tree"])
def test_whatever_is_raised(gloo: Group, way: str, error: str, ranks: int) -> None:
    check(gloo, way, ranks, 0, "forward, first", error)


def test_ranks_stop_where_a_block_comes_from_one_that_has_given_up(gloo: Group) -> None:
    """Rank 1 fails at its own block. It passes on the next one, which rank 2 then does not compute, and so on."""
    assert check(gloo, "ring", 4, 1, "forward, first") == [4, 1, 2, 3]


@untried()
def at_random(group: Any, calls: int) -> tuple[list[str], float, float]:
    """How each call ended in which a rank fails somewhere or nowhere, the slowest, and how wrong a call behind is."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    draw, ends, slowest = torch.Generator().manual_seed(6), [], 0.0
    for _ in range(calls):
        seen = torch.rand(ranks, ranks, generator=draw) < 0.6
        mask = rg.Dense(seen.repeat_interleave(5, 0).repeat_interleave(5, 1)[None, None])
        odd, fatal = int(torch.randint(ranks, (), generator=draw)), int(torch.randint(2 * ranks, (), generator=draw))
        SEEN.count, SEEN.fatal, start = 0, fatal if rank == odd else -1, time.monotonic()
        q = torch.randn(1, 2, 5, 4, generator=draw, requires_grad=True)
        try:
            score = rg.ScaledDot() >> Counted()
            ring_attention(q, q, q, group=group, mask=mask, score=score, timeout=TIMEOUT).sum().backward()
            ends.append("answered")
        except (PeerError, ValueError) as error:
            ends.append(type(error).__name__)
        slowest = max(slowest, time.monotonic() - start)
    SEEN.fatal = -1
    return ends, slowest, call(group, "ring", [])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_answer_or_none_does(gloo: Group, ranks: int) -> None:
    """Whoever sees whom, whoever fails."""
    ends, slowest, wrong = zip(*gloo.run(at_random, 60, ranks=ranks), strict=True)
    assert max(slowest) < SOON and max(wrong) < 1e-12
    one_fails = ["PeerError"] * (ranks - 1) + ["ValueError"]
    kinds = [sorted(of_call) for of_call in zip(*ends, strict=True)]
    assert all(of_call in (one_fails, ["answered"] * ranks) for of_call in kinds)
    assert 10 < kinds.count(one_fails) < 55


def before_any_block(group: Any, what: str) -> tuple[str, float]:
    """What a rank says where rank 1 fails before it has sent a block, and how wrong the next call is."""
    q, odd = torch.zeros(1, 2, 8, 4), dist.get_rank(group) == 1
    given: dict[str, Any] = {"mask": rg.Causal() & Hidden(odd and what == "mask")}
    if odd and what == "device":
        q = q.to("meta")
    if odd and what == "wire":
        given["wire"] = torch.int32
    answer = said(lambda: ring_attention(q, q, q, group=group, timeout=TIMEOUT, **given))
    return answer, call(group, "ring", [])


@dataclass(frozen=True)
class Hidden(rg.Mask):
    """Everything, and an error where tiles are asked for."""

    fails: bool

    def visible(self, at: Region) -> Tensor:
        return torch.tensor(True)

    def cover(self, at: Any) -> Tensor:
        if self.fails:
            raise ZeroDivisionError("no tiles")
        return super().cover(at)

    def __repr__(self) -> str:
        return "Hidden()"


SAID = {"mask": "ZeroDivisionError: no tiles", "device": "Unsupported: q is on meta", "wire": "TypeError: wire is"}


@pytest.mark.parametrize("what", list(SAID))
def test_before_any_block(gloo: Group, what: str) -> None:
    for rank, (answer, wrong) in enumerate(gloo.run(before_any_block, what, ranks=3)):
        assert answer.startswith(SAID[what] if rank == 1 else f"PeerError: rank 1 of 4 processes raised {SAID[what]}")
        assert wrong < 1e-12


def before_the_ring(group: Any) -> tuple[str, float]:
    """Rank 1 fails in its row of the mesh; the other row has no part in that."""
    q, shards = torch.zeros(1, 2, 8, 4), Shards.contiguous(32, 4)
    if dist.get_rank(group) == 1:
        q = q.to("meta")
    answer = said(lambda: usp_attention(q, q, q, group=mesh(), shards=shards, timeout=TIMEOUT))
    return answer, call(group, "usp", [])


def test_before_the_ring_of_a_mesh(gloo: Group) -> None:
    for rank, (answer, wrong) in enumerate(gloo.run(before_the_ring, ranks=4)):
        failure = "Unsupported: q is on meta"
        assert answer.startswith(failure if rank == 1 else f"PeerError: rank 1 of 4 processes raised {failure}")
        assert wrong < 1e-12


def pickled(group: Any) -> str:
    """What comes of the error if it is sent to another process."""
    try:
        with Peers.of(group, TIMEOUT).together("a step"):
            if dist.get_rank(group) == 1:
                raise ValueError("a name in bytes that are no UTF-8: \udcff")
    except (PeerError, ValueError) as error:
        return str(pickle.loads(pickle.dumps(error)))
    return "no error"


def test_the_error_can_be_sent_on(gloo: Group) -> None:
    assert gloo.run(pickled, ranks=2)[0].startswith("rank 1 of 4 processes raised ValueError: a name in bytes")


def at_unlike_places(group: Any) -> tuple[str, float]:
    """Rank 1 leaves the backward pass out, and makes the next call."""
    q = torch.zeros(1, 2, 8, 4, requires_grad=True)
    out = ring_attention(q, q, q, group=group, timeout=TIMEOUT)
    attempt = out.sum().backward
    if dist.get_rank(group) == 1:
        attempt = partial(ring_attention, q, q, q, group=group, timeout=TIMEOUT)
    return said(attempt), call(group, "ring", [])


def test_ranks_at_unlike_places_say_so(gloo: Group) -> None:
    for answer, wrong in gloo.run(at_unlike_places, ranks=3):
        assert answer == (
            "PeerError: the ranks make unlike calls: rank 1 has come to the beginning of a call, rank 0 to the first "
            "block of a ring."
        )
        assert wrong < 1e-12
