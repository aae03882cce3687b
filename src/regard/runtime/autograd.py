"""The one autograd.Function of attention, and how the gradients of a problem are found in linear memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from regard.backends.base import Backend, ForwardResult
from regard.backends.streaming.backward import Cotangents
from regard.call.problem import Problem
from regard.core.arrays import in_memory
from regard.core.cotangents import has_tangent, linear_in
from regard.core.dispatch_mode import DispatchMode
from regard.core.dtypes import exact
from regard.core.errors import Unsupported
from regard.core.state import RowStats
from regard.core.tracing import functorch, graphed, scripted, untransformed, watched
from regard.core.value import calls_functions_of_others
from regard.core.vjp import vjp


def attend(backend: Backend, problem: Problem) -> Tensor:
    """The output of a problem on a backend, differentiable with respect to every tensor that requires a gradient."""
    tensors = problem.tensors()
    way = _differentiable_way(backend, tensors)
    if way is not None:
        return way(problem)[0]
    if not _recorded(tensors):
        return backend.forward(problem)[0]
    forward = _forward(backend, problem, tensors)
    call = _OfProblem(backend, problem, forward.kernel)
    (out,) = Attention.apply(call, (forward.out,), (forward.out, *forward.saved), *tensors)
    return out


def attend_with_stats(backend: Backend, problem: Problem) -> tuple[Tensor, RowStats]:
    """The same, and the row statistics, whose l is differentiable too."""
    tensors = problem.tensors()
    way = _differentiable_way(backend, tensors)
    if way is not None:
        return way(problem)
    if not _recorded(tensors):
        forward = backend.forward_for_backward(problem)
        return forward.out, backend.row_stats(forward)
    forward = _forward(backend, problem, tensors)
    with torch.no_grad():
        stats = backend.row_stats(forward)
    call, results = _OfProblem(backend, problem, forward.kernel), (forward.out, stats.m, stats.l)
    out, m, l = Attention.apply(call, results, (forward.out, *forward.saved, stats.l), *tensors)
    return out, RowStats(m, l)


def _forward(backend: Backend, problem: Problem, tensors: tuple[Tensor, ...]) -> ForwardResult:
    """The forward of a call that will be recorded, as one step."""
    detached = problem.with_tensors(tuple([t.detach() for t in tensors]))
    with torch.no_grad():
        if not backend.calls_again or not calls_functions_of_others((problem.score, problem.mask)):
            return backend.forward_for_backward(detached)
        before = _random_states(problem.q.device)
        forward = backend.forward_for_backward(detached)
        if all(map(torch.equal, before, _random_states(problem.q.device))):
            return forward
        with _Draws() as draws:  # or another thread drew meanwhile, which no mode of this one sees
            forward = backend.forward_for_backward(detached)
        if draws.some:
            raise Unsupported(
                "a function of the score or of the mask draws random numbers, and the backward, which calls it again, "
                "would draw others. Draw them before the call, and hold them as a field; dropout=rg.Dropout(p) drops "
                "weights, and backend=rg.Reference() calls functions once, with n × n scores in memory."
            )
        return forward


class _Draws(DispatchMode):
    """Whether an operation of this thread draws random numbers while it is open."""

    some = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.some |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a function called on tensors of a device may draw from."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def _recorded(tensors: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _differentiable_way(
    backend: Backend, tensors: tuple[Tensor, ...]
) -> Callable[[Problem], tuple[Tensor, RowStats]] | None:
    """The backend's method for a call whose operations a compiler, a transform or autograd records; None for others."""
    if backend.recorded or scripted():  # TorchScript runs where regard's operations may not be
        return backend.differentiable
    if not torch.compiler.is_compiling() and not watched() and untransformed(tensors):
        return None
    # a node has no forward derivative: torch.func.linearize traces dual tensors, outside of its transforms
    if functorch() or has_tangent(*tensors):
        return backend.differentiable
    if graphed(*tensors) or (watched() and not backend.visible):
        return backend.traced
    return backend.differentiable if any(t.is_meta for t in tensors) else None


class BackwardInputs(NamedTuple):
    """What a backward is given: the call's tensors, what its forward saved, the cotangents, and what has a gradient."""

    tensors: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]
    needs: tuple[bool, ...]


class DifferentiableCall(Protocol):
    """How the gradients of one call are found."""

    def constants(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of the results that have no derivative."""
        ...

    def backward_of_saved(
        self, saved: tuple[Tensor, ...], cotangents: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """Gradients of all tensors in one step, from what save_for_backward kept; None where that is not possible."""
        ...

    def backward(self, given: BackwardInputs) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors for which `needs` is true, from the cotangents of the results."""
        ...

    def differentiable(self, given: BackwardInputs) -> tuple[Tensor | None, ...]:
        """The same by operations that can be differentiated again."""
        ...


class Attention(torch.autograd.Function):
    """The results of a call that has been made, to autograd: the one Function of attention.

    apply(call, results, saved, *tensors): what the backward needs of the forward besides the tensors is `saved`.
    """

    @staticmethod
    def forward(
        ctx: Any, call: DifferentiableCall, results: tuple[Tensor, ...], saved: tuple[Tensor, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.count = call, len(tensors)
        # all tensors, also those without a gradient: autograd then notices when one is changed in place before backward
        ctx.save_for_backward(*tensors, *saved)
        constants = call.constants(results)
        if constants:
            ctx.mark_non_differentiable(*constants)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        both = ctx.saved_tensors  # looked at once: hooks of checkpointing allow no more
        found = ctx.call.backward_of_saved(both, cotangents)
        if found is not None:
            return (None, None, None, *found)
        tensors, saved = both[: ctx.count], both[ctx.count :]
        needs = tuple(ctx.needs_input_grad[3:])
        # create_graph: the gradient itself will be differentiated
        way = ctx.call.differentiable if torch.is_grad_enabled() else ctx.call.backward
        if untransformed(cotangents):
            return (None, None, None, *way(BackwardInputs(tensors, saved, cotangents, needs)))
        found = linear_in(
            cotangents, lambda each: way(BackwardInputs(tensors, saved, tuple(map(_readable, each)), needs))
        )
        return (None, None, None, *found)


def _readable(cotangent: Tensor) -> Tensor:
    """The cotangent as kernels read it: no Parameter, no lazily negated view, no zeros without memory."""
    t = in_memory(cotangent, "the gradient of the output")
    return t if type(t) is Tensor or torch.is_grad_enabled() else t.detach()


# Function.apply without its look for torch.func's transforms, for who has looked already.
apply_untransformed: Callable[..., Any] = super(torch.autograd.Function, Attention).apply  # pyright: ignore


class _OfProblem:
    """A call that a backend made of a problem: out, or out, m and l, and then l is saved last."""

    def __init__(self, backend: Backend, problem: Problem, kernel: Any) -> None:
        self.backend, self.kernel = backend, kernel
        self.problem = problem.without_tensors()  # autograd keeps them, or its hooks put them elsewhere

    def constants(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return results[1:2]  # m

    def backward_of_saved(self, saved: tuple[Tensor, ...], cotangents: tuple[Tensor, ...]) -> None:
        return None

    def backward(self, given: BackwardInputs) -> tuple[Tensor | None, ...]:
        out, *saved = given.saved
        if len(given.cotangents) > 1:
            del saved[-1]
        forward = ForwardResult(out, tuple(saved), self.kernel)
        problem = self.problem.with_tensors(given.tensors)
        with exact(out.device.type):
            return self.backend.backward(problem, forward, _cotangents(given), given.needs)

    def differentiable(self, given: BackwardInputs) -> tuple[Tensor | None, ...]:
        problem = self.problem.with_tensors(given.tensors)
        with exact(problem.q.device.type):
            return differentiable_backward(self.backend, problem, _cotangents(given), given.needs)


def _cotangents(given: BackwardInputs) -> Cotangents:
    """Of out and of the log-sum-exp, from those of out or of (out, m, l): l = exp(lse - m)."""
    return given.cotangents[0], None if len(given.cotangents) == 1 else given.cotangents[2] * given.saved[-1]


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
        return tuple(_zeros_of(t) if need else None for t, need in zip(tensors, needs, strict=True))
    outputs, cotangents = [t for t, _ in pairs], [g for _, g in pairs]
    found = zip(wanted, vjp(outputs, wanted, cotangents, create_graph=True), strict=True)
    shares = iter([_zeros_of(t) if g is None else g for t, g in found])
    return tuple(next(shares) if need else None for need in needs)


def _zeros_of(t: Tensor) -> Tensor:
    """A gradient of 0 whose own gradient is 0, so that a second derivative raises no error."""
    return t.masked_fill(torch.ones((), dtype=torch.bool, device=t.device), 0)
