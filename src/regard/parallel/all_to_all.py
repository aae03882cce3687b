"""all_to_all: numbers from each rank to each other one, and what a rank computes between two such exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.core.cotangents import linear_in
from regard.core.dtypes import autocast, exact
from regard.core.vjp import vjp
from regard.parallel.peers import Peers


def all_to_all(numbers: Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers) -> Tensor:
    """Sends sent[r] of a vector's numbers to rank r, in order, and returns received[r] of each rank's, in order.

    Differentiable, to any order: the gradient of what was received goes back to where it came from.
    """
    return _Exchange.apply(numbers, sent, received, peers)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers) -> Tensor:
        ctx.back = received, sent, peers
        peers.tell("an exchange of heads")
        return torch.cat(peers.exchange(x.split(list(sent)), received))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *linear_in((g,), lambda plain: (_Exchange.apply(plain[0], *ctx.back),)), None, None, None


def between(compute: Callable[..., Tensor], tensors: Sequence[Tensor], peers: Peers) -> Tensor:
    """compute(*tensors), differentiable as often as that is. An error of its first backward is sent to all ranks,
    which wait for the next exchange meanwhile.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _Between.apply(compute, peers, *tensors)
    return compute(*tensors)


class _Between(torch.autograd.Function):
    """A graph of its own, so that an error in it passes through here: autograd reports it nowhere else."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], peers: Peers, *tensors: Tensor) -> Tensor:
        ctx.compute, ctx.peers, ctx.device = compute, peers, tensors[0].device.type
        ctx.autocast = torch.get_autocast_dtype(ctx.device) if autocast(ctx.device) else None
        ctx.save_for_backward(*tensors)
        ctx.inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        with torch.enable_grad():
            ctx.out = compute(*ctx.inputs)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        again, inputs, out = torch.is_grad_enabled(), ctx.inputs, ctx.out
        with ctx.peers.telling():
            saved = ctx.saved_tensors  # also where they are not read: autograd notices one that was changed in place
            if again:  # the gradient itself will be differentiated, with respect to the tensors that were given
                with exact(ctx.device) if ctx.autocast is None else torch.autocast(ctx.device, ctx.autocast):
                    inputs, out = saved, ctx.compute(*saved)
            keeps = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore
            wanted = [t for t in inputs if t.requires_grad]
            found = vjp([out], wanted, [g], retain_graph=keeps, create_graph=again)
            if not keeps:
                ctx.inputs = ctx.out = None
        shares = iter(found)
        return None, None, *(next(shares) if t.requires_grad else None for t in inputs)
