"""all_to_all: tensors from each rank to each other one, in one exchange that autograd follows backwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.parallel.peers import Peers

Shape = Sequence[int]


def all_to_all(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], peers: Peers
) -> list[list[Tensor]]:
    """Sends parts[r], of one dtype, to rank r, and returns what each rank sent here, which has shapes[r].

    Differentiable, to any order: the gradient of what was received goes back to where it came from.
    """
    sent = [sum(t.numel() for t in of_rank) for of_rank in parts]
    received = [sum(map(math.prod, of_rank)) for of_rank in shapes]
    whole = _Exchange.apply(torch.cat([t.reshape(-1) for of_rank in parts for t in of_rank]), sent, received, peers)
    return [
        [t.reshape(shape) for t, shape in zip(piece.split([math.prod(s) for s in of_rank]), of_rank, strict=True)]
        for piece, of_rank in zip(whole.split(received), shapes, strict=True)
    ]


class _Exchange(torch.autograd.Function):
    """Numbers in the order of ranks: apply(numbers, counts to send, counts to receive, peers)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], peers: Peers) -> Tensor:
        ctx.back = received, sent, peers
        peers.tell("an exchange of heads")
        return torch.cat(peers.exchange(x.split(sent), received))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.apply(g, *ctx.back), None, None, None
