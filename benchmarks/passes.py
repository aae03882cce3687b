"""From a function of tensors to what is timed: its forward, its backward, or both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.candidates import Way
from benchmarks.inputs import Inputs

Attend = Callable[..., Tensor]  # of q, k, v and, where the case has one, what is learned besides


def way(name: str, x: Inputs, attend: Attend, show: Callable[[Tensor], Tensor] | None = None) -> Way:
    """attend, made ready for the passes of the case; show brings its output to the axes of x.four()."""
    leaves = [x.q, x.k, x.v] if x.learned is None else [x.q, x.k, x.v, x.learned]
    if x.case.passes == "forward":
        return Way(name, lambda: attend(*leaves), lambda out: [_four(out) if show is None else show(out)])
    assert show is None, "training cases have four axes"
    leaves = [t.clone().requires_grad_() for t in leaves]
    if x.case.passes == "both":
        return Way(name, lambda: _both(attend, leaves, x.cotangent), list)
    with torch.enable_grad():
        out = attend(*leaves)

    def backward() -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, leaves, x.cotangent, retain_graph=True)]

    return Way(name, backward, list)


def _both(attend: Attend, leaves: list[Tensor], cotangent: Tensor | None) -> list[Tensor]:
    with torch.enable_grad():
        out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def _four(out: Tensor) -> Tensor:
    return out[:, None] if out.dim() == 3 else out.flatten(0, -4)
