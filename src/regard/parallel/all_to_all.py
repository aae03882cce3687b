"""all_to_all: tensors from each rank to each other one, in one exchange that autograd follows backwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.parallel.peers import LAST, PeerError, Peers

Shape = Sequence[int]


def all_to_all(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], peers: Peers, before: Any = None
) -> tuple[list[list[Tensor]], Any]:
    """Sends parts[r], of one dtype, to rank r, and returns what each rank sent here, which has shapes[r], and the node.

    Differentiable, to any order: the gradient of what was received goes back to where it came from. before: the node of
    the exchange before this one. Backward, where that is the next one, other ranks hear of an error between the two.
    """
    sent = [sum(t.numel() for t in of_rank) for of_rank in parts]
    received = [sum(map(math.prod, of_rank)) for of_rank in shapes]
    numbers = torch.cat([t.reshape(-1) for of_rank in parts for t in of_rank])
    whole = _Exchange.apply(numbers, sent, received, peers, before)
    found = [
        [t.reshape(shape) for t, shape in zip(piece.split([math.prod(s) for s in of_rank]), of_rank, strict=True)]
        for piece, of_rank in zip(whole.split(received), shapes, strict=True)
    ]
    return found, whole.grad_fn


class _Exchange(torch.autograd.Function):
    """Numbers in the order of ranks: apply(numbers, counts to send, counts to receive, peers, node before)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], peers: Peers, before: Any) -> Tensor:
        ctx.back, ctx.before, ctx.waiting = (received, sent, peers), before, None
        peers.tell("an exchange of heads")
        return torch.cat(peers.exchange(x.split(sent), received))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.waiting is not None:
            ctx.waiting.peers = None
        found = _Exchange.apply(g, *ctx.back, None)
        if ctx.before is not None and torch._C._will_engine_execute_node(ctx.before):  # pyright: ignore
            LAST.set(None)
            ctx.before.waiting = _Waiting(ctx.back[-1])
            torch.autograd.Variable._execution_engine.queue_callback(_Dropped(ctx.before.waiting))  # pyright: ignore
        return found, None, None, None, None


@dataclass
class _Waiting:
    """The ranks that wait for the next exchange of a backward pass; None once this rank has come to it."""

    peers: Peers | None


class _Dropped:
    """Tells those who wait that the pass has ended in an error.

    Autograd calls nobody then. It drops the callbacks that were to follow the pass, and with them this object.
    """

    def __init__(self, waiting: _Waiting) -> None:
        self.waiting = waiting

    def __call__(self) -> None:
        self.waiting.peers = None

    def __del__(self) -> None:
        if self.waiting.peers is not None:
            with suppress(PeerError):
                raised = LAST.get() or (dist.get_rank(), "an error in its backward pass")
                self.waiting.peers.tell("", raised=raised)
