"""The autograd.Function of attention: out and lse of a problem, with a backward in linear memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.backends.base import Backend, Result
from regard.problem import Problem
from regard.shapes import branchless, exact, functorch, graphed


def attend(backend: Backend, problem: Problem) -> Result:
    """(out, lse) of a problem on a backend, differentiable with respect to every tensor that requires a gradient."""
    tensors = problem.tensors()
    if backend.recorded:
        return backend.forward(problem)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if graphed(*tensors) and not functorch():
        return backend.traced(problem)
    if branchless(*tensors) or any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        return backend.differentiable(problem)
    if recorded:
        out, lse = _Attend.apply(backend, problem, *tensors)
        return out, lse
    return backend.forward(problem)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, problem: Problem, *tensors: Tensor) -> Result:
        kept = backend.remembered(problem)
        ctx.backend, ctx.problem = backend, problem.with_tensors(tuple(t.detach() for t in tensors))
        # all of them, masks and positions too: autograd then notices when one is changed in place before backward
        ctx.save_for_backward(*tensors, *kept)
        return kept[0], kept[1]

    @staticmethod  # torch's stub has *args here, but calls it with one cotangent a result
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, g_out: Tensor, g_lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        count = len(ctx.problem.tensors())
        saved = ctx.saved_tensors
        tensors, kept = saved[:count], saved[count:]
        problem = ctx.problem.with_tensors(tensors)
        needs = tuple(ctx.needs_input_grad[2:])
        with exact(g_out.device.type):
            if torch.is_grad_enabled():  # create_graph: the gradient itself will be differentiated
                return (None, None, *differentiable_backward(ctx.backend, problem, (g_out, g_lse), needs))
            return (None, None, *ctx.backend.backward(problem, kept, (g_out, g_lse), needs))


def differentiable_backward(
    backend: Backend, problem: Problem, cotangents: Result, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of problem.tensors() for which `needs` is true, by operations that can be differentiated again."""
    tensors = problem.tensors()
    # views of their own: a gradient is asked for at this call's inputs, not at what they were computed from
    own = tuple(t.view_as(t) if need else t for t, need in zip(tensors, needs, strict=True))
    result = backend.differentiable(problem.with_tensors(own))
    wanted = [t for t, need in zip(own, needs, strict=True) if need]
    # where v alone requires a gradient, the lse has none to give
    results, given = zip(*((t, g) for t, g in zip(result, cotangents, strict=True) if t.requires_grad), strict=True)
    found = iter(torch.autograd.grad(results, wanted, given, create_graph=True, allow_unused=True))
    return tuple(next(found) if need else None for need in needs)
