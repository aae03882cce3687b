"""The leaves of a call, and the gradients of what regard or the oracle computes from them. Nothing of regard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .call import Call

Tensors = dict[str, Tensor]
Dress = Callable[[Tensor, Tensor], Tensor]  # of a tensor of the call, and the copy of it that is asked about


def bare(t: Tensor, own: Tensor) -> Tensor:
    """The copy as it is."""
    return own


def leaves_of(call: Call, dtype: torch.dtype | None, dress: Dress = bare) -> tuple[Call, Tensors]:
    """The same call on tensors of its own that require gradients; the names of those that do."""
    made: dict[int, Tensor] = {}

    def leaf(t: Tensor) -> Tensor:
        own = dress(t, t.detach() if dtype is None else t.detach().to(dtype))
        made[id(t)] = own.requires_grad_() if id(t) in wanted else own
        return made[id(t)]

    wanted = {id(t) for name, t in call.floats().items() if name in call.needs}
    own = call.map(leaf)
    if dress is not bare:
        positions = None if call.positions is None else tuple(dress(t, t) for t in call.positions)
        own = replace(own, mask=call.mask.map(lambda t: dress(t, t)), positions=positions)
    return own, {name: made[id(t)] for name, t in call.floats().items() if name in call.needs}


def with_gradients(results: Tensors, leaves: Tensors, cotangents: Tensors) -> Tensors:
    """The results, and the gradients of the leaves by their names, from the cotangents of the results."""
    names = [name for name, t in results.items() if t.requires_grad]
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if names and leaves:
        wanted, given = [results[name] for name in names], [cotangents[name].to(results[name].dtype) for name in names]
        found = torch.autograd.grad(wanted, list(leaves.values()), given, allow_unused=True)
    named = zip(leaves.items(), found, strict=True)
    gradients = {f"gradient of {name}": torch.zeros_like(t) if g is None else g for (name, t), g in named}
    return {**{name: t.detach() for name, t in results.items()}, **gradients}
