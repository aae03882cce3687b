"""The additive similarity on the native kernels: how abi.AdditiveArguments are filled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regard.backends.base import Result
from regard.backends.native.abi import AdditiveArguments, AdditiveGradientArguments, CallArguments
from regard.backends.native.args import ACTIVATIONS, KernelArgs
from regard.backends.native.bind import bind
from regard.backends.native.c_structs import Struct
from regard.backends.native.families import Gradients, KernelFamily
from regard.backends.native.ffi import DTYPE_CODES
from regard.backends.native.launch import KernelResults, arguments, run_backward, sink_weights, threads
from regard.backends.streaming.backward import output_cotangents, sink_gradient
from regard.call.problem import Problem
from regard.scores.activations import LeakyReLU
from regard.scores.additive import Additive

_WORK = 64  # what a query, a key and a feature cost, in operations of a dot product


@dataclass(frozen=True)
class AdditiveKernels(KernelFamily):
    """The kernels of additive scores."""

    whole = False  # w and the activation are the problem's
    backward_struct = AdditiveGradientArguments
    gradients = "da", "dc", "dv", "dw"

    def why_gathers(self, problem: Problem) -> str | None:
        return "the kernels of additive scores read ordinary tensors"

    def why_not_invariant(self, problem: Problem) -> str | None:
        return "how an additive score is found depends on how far the queries beside it reach"

    def why_streamed(self, problem: Problem, needs: tuple[bool, ...]) -> str | None:
        known = 3 + len(problem.similarity.tensors())
        if any(needs[known : 3 + len(problem.score_tensors)]):
            return "a tensor of a modifier asks for its gradient"
        return None

    def backward(
        self, problem: Problem, args: KernelArgs, saved: KernelResults, cotangents: Result, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        similarity = _similarity(problem)
        sums = problem.frame.heads, problem.q.shape[-1]
        struct = partial(_arguments, problem)
        da, dc, dv, dw = additive_gradients(problem, args, saved, cotangents, struct, sums)
        known = (da, dc, dv, *similarity.in_place_of_w(_total(dw, similarity.w)))
        found = [*known, *(None for _ in problem.tensors()[len(known) :])]
        if problem.sink is not None and needs[-1]:
            found[-1] = gradient_of_sink(problem.sink, saved, cotangents)
        given = zip(found, problem.tensors(), needs, strict=True)
        return tuple(g.to(t.dtype) if need and g is not None else None for g, t, need in given)

    def leaves(self, problem: Problem, args: KernelArgs) -> dict[int, Tensor | None]:
        return {**super().leaves(problem, args), AdditiveArguments.w.offset: _weights(problem)}

    def learned(self, problem: Problem) -> Tensor | None:
        return _weights(problem)

    def copied(self, problem: Problem) -> bool:
        return _weights(problem) is None

    def cotangent(self, g_out: Tensor) -> Tensor:
        return g_out.float()

    def pair_work(self, problem: Problem, args: KernelArgs) -> int:
        return _pair_work(problem)

    def struct(self, problem: Problem, call: CallArguments) -> Struct:
        return _arguments(problem, call)

    def empty_gradients(self, given: Sequence[Tensor], heads: int, needs: tuple[bool, ...]) -> Gradients:
        shapes = *(t.shape for t in given), (heads, given[0].shape[-1])
        return tuple(torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes)

    def own(self, made: Gradients, given: Sequence[Tensor], learned: Tensor | None) -> Gradients:
        da, dc, dv, dw = made
        assert dv is not None and dw is not None and learned is not None
        return da, dc, dv.to(given[2].dtype), _total(dw, learned)


def additive_gradients(
    problem: Problem,
    args: KernelArgs,
    saved: KernelResults,
    cotangents: Result,
    struct: Callable[[CallArguments], Struct],
    sums: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of a, c and v, and of what is learned besides, of shape `sums`: of w (heads, h)."""
    out, lse, row_stats = saved
    there = lse.numel() and problem.frame.nk
    made = torch.empty if there else torch.zeros
    da, dc, dv = (made(t.shape, dtype=torch.float32, device="cpu") for t in (problem.q, problem.k, problem.v))
    dw = made(sums, dtype=torch.float32, device="cpu")
    if there:
        call = arguments(args, out=out.contiguous(), lse=lse, row_stats=row_stats.contiguous())
        given = {"dout": cotangents[0].float(), "dlse": cotangents[1].float()[..., None]}
        gradients = {"da": da, "dc": dc, "dv": dv, "dw": dw}
        run_backward(AdditiveGradientArguments, struct(call), {**given, **gradients})
    return da, dc, dv, dw


def gradient_of_sink(sink: Tensor, saved: KernelResults, cotangents: Result) -> Tensor:
    """The gradient of a sink, from what the forward saved and the cotangents of its results."""
    out, _, row_stats = saved
    delta = output_cotangents(out, row_stats[..., 1] == 0, (cotangents[0].float(), cotangents[1]))[1]
    return sink_gradient(sink_weights(row_stats, sink), delta)


def _pair_work(problem: Problem) -> int:
    """What a query and a key cost over the batch and all heads, in floating-point operations."""
    return _WORK * math.prod(problem.frame.batch) * problem.frame.heads * _similarity(problem).w.shape[-1]


def _weights(problem: Problem) -> Tensor | None:
    """w, where the kernels read it as the caller has it."""
    w = _similarity(problem).w
    return w if w.dtype == torch.float32 and w.is_contiguous() else None


def _total(dw: Tensor, w: Tensor) -> Tensor:
    """The gradient of w from those of all heads."""
    return dw.sum_to_size(w.shape) if w.dim() < 2 or w.shape[0] == 1 else dw


def _similarity(problem: Problem) -> Additive:
    assert isinstance(problem.similarity, Additive)
    return problem.similarity


def _arguments(problem: Problem, call: CallArguments) -> AdditiveArguments:
    """The call with what its similarity needs besides."""
    similarity = _similarity(problem)
    activation, w = similarity.activation, similarity.w.float().contiguous()
    slope = activation.slope if isinstance(activation, LeakyReLU) else 0.0
    call.dtype = DTYPE_CODES[problem.v.dtype]
    call.threads = threads(_pair_work(problem) * problem.frame.nq * problem.frame.nk)
    x = AdditiveArguments(call, activation=ACTIVATIONS[type(activation)], slope=slope)
    bind(x, {"w": w if w.dim() > 1 else w[None]})
    return x
