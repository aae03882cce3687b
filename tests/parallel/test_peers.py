"""A rank that dies, stops, is slow or makes another call: the others say so in time, or go on when it returns."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import regard as rg
import regard.parallel.ring_call as ring
from gloo_processes import Group
from regard.parallel import PeerError, Shards, ring_attention, unshard
from regard.parallel.peers import Peers

SECONDS = 4.0


@pytest.fixture
def three() -> Iterator[Group]:
    """Processes of its own: a group that has lost a rank is of no use."""
    group = Group(3)
    yield group
    group.close()


def struck(group: Any, number: int, timeout: float) -> tuple[str, float]:
    """Two calls, in the first of which rank 1 receives a signal, behind its first block. The answer or error, and when.

    A rank that had all that it needs of rank 1 answers the first call.
    """
    q = torch.randn(1, 2, 64, 8)
    right, blocks = ring.attention_state, 0

    def attention_state(*given: Any, **options: Any) -> rg.State:
        nonlocal blocks
        blocks += 1
        if blocks == 2 and dist.get_rank(group) == 1:
            os.kill(os.getpid(), number)
        return right(*given, **options)

    ring.attention_state = attention_state
    start = time.monotonic()
    try:
        found = [ring_attention(q, q, q, group=group, timeout=timeout) for _ in range(2)]
        return f"{found[0].norm():.3f} {found[1].norm():.3f}", time.monotonic() - start
    except PeerError as error:
        return str(error), time.monotonic() - start
    finally:
        ring.attention_state = right


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_is_named_in_time(three: Group, number: signal.Signals) -> None:
    three.start(struck, int(number), SECONDS)
    for rank in (0, 2):
        ok, answer = three.answer(rank, 3 * SECONDS)
        assert ok, answer
        said, seconds = answer
        assert re.match(rf"rank {rank} of 3 lost rank [012] after .* \(timeout 4 s\)", said)
        assert seconds < 2 * SECONDS
    three.signal(1, signal.SIGCONT)


def killed_in_a_message(group: Any) -> str:
    """Rank 0 kills rank 1 when the beginning of its message has arrived."""
    peers, large = Peers.of(group, 20.0), torch.zeros(1 << 27, dtype=torch.uint8)
    pids = [pid for (pid,) in peers.gather([os.getpid()])]
    if peers.rank == 1:
        peers.post([(large, 0)], []).wait()
        time.sleep(60)
    arriving = large.fill_(1).numpy()
    messages = peers.post([], [(large, 1)])
    while arriving[0]:
        pass
    os.kill(pids[1], signal.SIGKILL)
    try:
        messages.wait()
    except PeerError as error:
        return f"{error} {error.__cause__}"
    return "it had arrived"


@pytest.mark.full
def test_a_rank_that_dies_in_a_message_is_named_at_once(three: Group) -> None:
    """gloo does not tell of it whoever waits for that message, but for one behind it."""
    three.start(killed_in_a_message, ranks=2)
    ok, said = three.answer(0)
    assert ok and said.startswith("rank 0 of 2 lost rank 1 after"), said
    assert "Timed out" not in said


@pytest.mark.full
def test_a_rank_that_returns_in_time_is_waited_for(three: Group) -> None:
    three.start(struck, int(signal.SIGSTOP), 60.0)
    while Path(f"/proc/{three.processes[1].pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.1)
    time.sleep(1)
    three.signal(1, signal.SIGCONT)
    answers = [three.answer(rank)[1] for rank in range(3)]
    assert len({said for said, _ in answers}) == 1 and len({*answers[0][0].split()}) == 1
    assert answers[0][1] > 1


def unlike(group: Any, what: str) -> str:
    """Rank 1 makes another call than the others."""
    odd = dist.get_rank(group) == 1
    q = torch.randn(1, 2, 8, 8)
    given: dict[str, Any] = {"mask": rg.Causal()}
    if odd and what == "mask":
        given["mask"] = rg.Window(before=3, after=0)
    if odd and what == "score":
        given["score"] = rg.ScaledDot() >> rg.SoftCap(3.0)
    if what == "content":
        given["mask"] = rg.Documents(torch.arange(8 * dist.get_world_size(group)) // (2 + odd))
    if odd and what == "dtype":
        q = q.double()
    if odd and what == "shape":
        q = torch.randn(1, 1, 9, 8)
    if odd and what == "gradients":
        q.requires_grad_()
    ranks = dist.get_world_size(group)
    attempt: Callable[[], Any] = partial(ring_attention, q, q, q, group=group, timeout=20.0, **given)
    if {"function": 1, "function of rank 0": 0}.get(what) == dist.get_rank(group):
        attempt = partial(unshard, q, Shards.contiguous(8 * ranks, ranks), group)
    with pytest.raises(PeerError) as raised:
        attempt()
    return str(raised.value)


SAID = {
    "function": "the function is unshard on rank 1, ring_attention on rank 0.",
    "function of rank 0": "the function is ring_attention on rank 1, unshard on rank 0.",
    "mask": "the ranks make unlike calls: mask is Window(before=3, after=0) on rank 1, Causal() on rank 0.",
    "score": "score is ScaledDot() >> SoftCap(cap=3.0) on rank 1, ScaledDot() on rank 0.",
    "content": "mask is Documents(",
    "dtype": "q is torch.float64 (1, 2, 8, 8) on rank 1, torch.float32 (1, 2, 8, 8) on rank 0; expected",
    "shape": "q is torch.float32 (1, 1, 9, 8) on rank 1, torch.float32 (1, 2, 8, 8) on rank 0; expected "
    "what differs in the number of tokens alone.",
    "gradients": "requires_grad is [True, True, True] on rank 1, False on rank 0.",
}


@pytest.mark.parametrize("what", list(SAID))
def test_unlike_calls_are_named_on_every_rank(gloo: Group, what: str) -> None:
    for said in gloo.run(unlike, what, ranks=3):
        assert SAID[what] in said


def wrong(group: Any) -> list[str]:
    """Calls that are refused, alike on every rank, and one behind them that is right."""
    q, said = torch.randn(1, 2, 8, 8), []
    ranks = dist.get_world_size(group)
    calls: list[dict[str, Any]] = [
        {"shards": Shards.contiguous(9 * ranks, ranks)},
        {"mask": rg.Documents(torch.zeros(5, dtype=torch.int64))},
        {"timeout": 0.0},
        {"score": rg.ScaledDot() >> rg.Bias(torch.zeros(8, 8))},
    ]
    for given in calls:
        with pytest.raises(ValueError, match=r"\.$") as raised:
            ring_attention(q, q, q, group=group, **given)
        said.append(str(raised.value))
    assert ring_attention(q, q, q, group=group, timeout=10.0).isfinite().all()
    return said


def test_wrong_calls_are_refused_and_nothing_is_left_behind(gloo: Group) -> None:
    of_rank, other = gloo.run(wrong, ranks=2)
    assert of_rank == other
    assert of_rank[0] == ("q has [8, 8] tokens on the ranks of the group; expected Shards(18 tokens, 9, 9 on 2 ranks).")
    assert "Documents.q_ids has shape (5,)" in of_rank[1]
    assert of_rank[2] == "timeout is 0.0; expected seconds, more than 0."
    assert of_rank[3] == "Bias.bias has shape (8, 8); the whole call has 16 queries."


def test_without_a_group_it_says_what_to_call() -> None:
    q = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"call torch.distributed.init_process_group"):
        ring_attention(q, q, q)


def many(group: Any, calls: int) -> tuple[int, int]:
    """Growth of memory, in kB, and of open files over many calls with gradients."""
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    def state() -> tuple[int, int]:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(os.listdir("/proc/self/fd"))

    for call in range(calls):
        if call == calls // 5:
            before = state()
        ring_attention(q, q, q, group=group, mask=rg.Causal(), timeout=10.0).sum().backward()
    memory, files = state()
    return memory - before[0], files - before[1]


@pytest.mark.parametrize(("calls", "most"), [(100, 4000), pytest.param(400, 1600, marks=pytest.mark.full)])
def test_many_calls_leave_nothing_behind(gloo: Group, calls: int, most: int) -> None:
    """Nor 5 kB a call, of four fifths of them."""
    for memory, files in gloo.run(many, calls, ranks=2):
        assert files == 0 and memory < most
