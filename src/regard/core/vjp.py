"""vjp: gradients of tensors that autograd recorded, from those of what was made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

# torch.autograd.grad compares shapes by torch.fx.experimental.symbolic_shapes wherever a cotangent is given, and so
# imports sympy: half a second or more of a process's first backward. What it calls then is this.
_run_backward = getattr(torch.autograd.graph, "_engine_run_backward", None)


def vjp(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True).

    outputs and cotangents: as many, of the same shapes and dtypes
    retain_graph: whether autograd's record can be gone through once more
    create_graph: whether the gradients are differentiable themselves, which retains the record too

    None stands for an input that no output depends on.
    """
    kept = retain_graph or create_graph
    if _run_backward is None:
        found = torch.autograd.grad(outputs, inputs, cotangents, kept, create_graph, allow_unused=True)
    else:
        given = tuple(outputs), tuple(cotangents), kept, create_graph, tuple(inputs)
        found = _run_backward(*given, allow_unreachable=True, accumulate_grad=False)
    return cast("tuple[Tensor | None, ...]", tuple(found))
