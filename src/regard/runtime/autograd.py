"""The autograd.Function of attention: out and the row statistics of a problem, with a backward in linear memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.backends.base import Backend, Kept
from regard.backends.streaming.backward import Cotangents
from regard.core.dtypes import exact
from regard.core.problem import Problem
from regard.core.state import RowStats
from regard.core.tracing import data_unavailable, functorch, graphed, scripted, watched


def attend(backend: Backend, problem: Problem) -> Tensor:
    """The output of a problem on a backend, differentiable with respect to every tensor that requires a gradient."""
    tensors = problem.tensors()
    way = _differentiable_way(backend, tensors)
    if way is not None:
        return way(problem)[0]
    if _recorded(tensors):
        return _Attend.apply(backend, problem, *tensors)
    return backend.forward(problem)[0]


def attend_with_stats(backend: Backend, problem: Problem) -> tuple[Tensor, RowStats]:
    """The same, and the row statistics, whose l is differentiable too."""
    tensors = problem.tensors()
    way = _differentiable_way(backend, tensors)
    if way is not None:
        return way(problem)
    if _recorded(tensors):
        out, m, l = _AttendWithStats.apply(backend, problem, *tensors)
        return out, RowStats(m, l)
    kept = backend.forward_for_backward(problem)
    return kept[0], backend.row_stats(kept)


def _recorded(tensors: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _differentiable_way(
    backend: Backend, tensors: tuple[Tensor, ...]
) -> Callable[[Problem], tuple[Tensor, RowStats]] | None:
    """The backend's method for whoever watches the operations themselves: a compiler, a transform, autograd."""
    if backend.recorded:
        return backend.differentiable
    if scripted():  # TorchScript runs where regard's operations may not be
        return backend.differentiable
    if (graphed(*tensors) or (watched() and not backend.visible)) and not functorch():
        return backend.traced
    if data_unavailable(*tensors) or any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        return backend.differentiable
    return None


class _Attend(torch.autograd.Function):
    """out of a problem."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, problem: Problem, *tensors: Tensor) -> Tensor:
        kept = backend.forward_for_backward(problem)
        _save(ctx, backend, problem, tensors, kept)
        return kept[0]

    @staticmethod  # torch's stub has *args here, but calls it with one cotangent a result
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _backward(ctx, ctx.saved_tensors, g_out, None)


class _AttendWithStats(torch.autograd.Function):
    """out, m and l of a problem; m is a constant."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, problem: Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
        kept = backend.forward_for_backward(problem)
        stats = backend.row_stats(kept)
        _save(ctx, backend, problem, tensors, (*kept, stats.l))
        ctx.mark_non_differentiable(stats.m)
        return kept[0], stats.m, stats.l

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, g_out: Tensor, _: Tensor, g_l: Tensor
    ) -> tuple[Tensor | None, ...]:
        *saved, l = ctx.saved_tensors
        return _backward(ctx, tuple(saved), g_out, g_l * l)  # l = exp(lse - m)


def _save(ctx: Any, backend: Backend, problem: Problem, tensors: tuple[Tensor, ...], results: Kept) -> None:
    ctx.backend, ctx.problem = backend, problem.with_tensors(tuple(t.detach() for t in tensors))
    # all of them, masks and positions too: autograd then notices when one is changed in place before backward
    ctx.save_for_backward(*tensors, *results)


def _backward(ctx: Any, saved: tuple[Tensor, ...], g_out: Tensor, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    count = len(ctx.problem.tensors())
    tensors, kept = saved[:count], saved[count:]
    problem = ctx.problem.with_tensors(tensors)
    needs = tuple(ctx.needs_input_grad[2:])
    with exact(g_out.device.type):
        if torch.is_grad_enabled():  # create_graph: the gradient itself will be differentiated
            return (None, None, *differentiable_backward(ctx.backend, problem, (g_out, g_lse), needs))
        return (None, None, *ctx.backend.backward(problem, kept, (g_out, g_lse), needs))


def differentiable_backward(
    backend: Backend, problem: Problem, cotangents: Cotangents, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of problem.tensors() for which `needs` is true, by operations that can be differentiated again."""
    g_out, g_lse = cotangents

    def results(own: Problem) -> list[tuple[Tensor, Tensor]]:
        out, stats = backend.differentiable(own)
        return [(out, g_out)] if g_lse is None else [(out, g_out), (stats.lse, g_lse)]

    return differentiable_gradients(results, problem, needs)


def differentiable_gradients(
    results: Callable[[Problem], list[tuple[Tensor, Tensor]]], problem: Problem, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The same of any results of a problem, made of such operations, each beside its cotangent."""
    tensors = problem.tensors()
    # views of their own: a gradient is asked for at this call's inputs, not at what they were computed from
    own = tuple(t.view_as(t) if need else t for t, need in zip(tensors, needs, strict=True))
    wanted = [t for t, need in zip(own, needs, strict=True) if need]
    # where v alone requires a gradient, the lse has none to give; where no query sees a key, neither has any
    pairs = [(t, g) for t, g in results(problem.with_tensors(own)) if t.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(t) if need else None for t, need in zip(tensors, needs, strict=True))
    outputs, cotangents = [t for t, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(outputs, wanted, cotangents, create_graph=True, materialize_grads=True))
    return tuple(next(found) if need else None for need in needs)
