"""The emulated nccl says which of its rules a message breaks, and the pretended device where two devices meet."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import emulated_nccl
from gloo_processes import Group
from pretended_device import DEVICE, OtherDevice

SECONDS = timedelta(seconds=20)


def sent(group: Any, *tensors: Tensor, tag: int = 0, start: int = 0) -> list[Any]:
    """A batch between ranks 0 and 1: what each sends, and what it receives of the other, of `start` numbers more."""
    other = 1 - dist.get_rank(group)
    ops = [dist.P2POp(dist.isend, t, group=group, tag=tag, group_peer=other) for t in tensors]
    received = [torch.empty(len(t) + start, dtype=t.dtype, device=t.device) for t in tensors]
    ops += [dist.P2POp(dist.irecv, t, group=group, tag=tag, group_peer=other) for t in received]
    return [dist.batch_isend_irecv(ops)[0], ops]


def right(group: Any, t: Tensor) -> None:
    work, ops = sent(group, t, t)
    assert ops[2].tensor.raw.isnan().all()
    work.wait(SECONDS)
    assert ops[2].tensor.cpu().tolist() == [0.0, 1.0, 2.0]


def alone(group: Any, t: Tensor) -> None:
    dist.isend(t, group=group, group_dst=1 - dist.get_rank(group))


def with_a_tag(group: Any, t: Tensor) -> None:
    sent(group, t, tag=3)


def empty(group: Any, t: Tensor) -> None:
    sent(group, t[:0])


def of_unequal_sizes(group: Any, t: Tensor) -> None:
    work, _ = sent(group, t, start=1)
    work.wait(SECONDS)


def in_unequal_order(group: Any, t: Tensor) -> None:
    given = (t, t[:2]) if dist.get_rank(group) else (t[:2], t)
    work, _ = sent(group, *given)
    work.wait(SECONDS)


def written_to(group: Any, t: Tensor) -> None:
    work, _ = sent(group, t)
    t.add_(1)
    work.wait(SECONDS)


def freed(group: Any, t: Tensor) -> None:
    work = sent(group, t)[0]
    gc.collect()
    work.wait(SECONDS)


def waited_for_without_a_timeout(group: Any, t: Tensor) -> None:
    work, _ = sent(group, t)
    work.wait()


def never_waited_for(group: Any, t: Tensor) -> None:
    sent(group, t)
    gc.collect()
    raise emulated_nccl.BrokenRule(*emulated_nccl.BROKEN)


def read_meanwhile(group: Any, t: Tensor) -> None:
    work, _ = sent(group, t)
    bool(t[0] > 0)
    work.wait(SECONDS)


def crosswise(group: Any, t: Tensor) -> None:
    """Each rank first receives, and sends in its next batch."""
    other, found = 1 - dist.get_rank(group), torch.empty_like(t)
    receive = dist.batch_isend_irecv([dist.P2POp(dist.irecv, found, group=group, group_peer=other)])[0]
    send = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, group=group, group_peer=other)])[0]
    send.wait(timedelta(seconds=0.5))
    receive.wait(SECONDS)


def of_two_devices(group: Any, t: Tensor) -> None:
    t.add(torch.ones(3))


RULES: dict[Callable[..., None], str] = {
    right: "no error",
    alone: "isend outside of a batch",
    with_a_tag: "a message has the tag 3",
    empty: "a message has no numbers",
    of_unequal_sizes: "a message of [3, 4, 1] arrives where one of [4, 4, 1] is due",
    in_unequal_order: "a message of [3, 4, 1] arrives where one of [2, 4, 1] is due",
    written_to: "a tensor that is sent was written to before its work was waited for",
    freed: "a tensor that is received was freed before its work was waited for",
    waited_for_without_a_timeout: "a work is waited for without a time-out, and would not be waited for",
    never_waited_for: "a work was never waited for",
    read_meanwhile: "aten::_local_scalar_dense reads a number of the device while messages are on their way",
    crosswise: "nccl: timed out",
    of_two_devices: f"aten::add has tensors on {DEVICE} and on cpu",
}


def attempt(_: Any, call: Callable[..., None], connected: bool) -> str:
    """What ranks 0 and 1 of a group of their own hear."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return ""
    with emulated_nccl.nccl():
        t = torch.arange(3.0, device="cpu").to(DEVICE)
        if connected:
            dist.all_reduce(torch.zeros(1, device=DEVICE), group=group)
        try:
            call(group, t)
        except (emulated_nccl.BrokenRule, OtherDevice, RuntimeError) as error:
            return str(error)
    return "no error"


@pytest.mark.full
@pytest.mark.parametrize("call", list(RULES), ids=lambda call: call.__name__)
def test_a_broken_rule_is_named(gpus: Group, call: Callable[..., None]) -> None:
    assert RULES[call] in gpus.run(attempt, call, True)[:2]


def test_a_first_batch_needs_all_ranks(gpus: Group) -> None:
    assert gpus.run(attempt, right, False)[0] == "the first messages of a group are some ranks' alone"
