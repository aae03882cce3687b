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
from regard.backends.native.backward import backward, empty_of_modifiers, learned_by_similarity
from regard.backends.native.bind import bind
from regard.backends.native.c_structs import Struct
from regard.backends.native.families import Gradients, KernelFamily
from regard.backends.native.ffi import DTYPE_CODES
from regard.backends.native.launch import KernelResults, arguments, run_backward, threads
from regard.backends.native.modifiers.table import why_not_learned
from regard.call.problem import Problem
from regard.scores.activations import LeakyReLU
from regard.scores.additive import Additive

_WORK = 64  # what a query, a key and a feature cost, in operations of a dot product


@dataclass(frozen=True)
class AdditiveKernels(KernelFamily):
    """The kernels of additive scores."""

    whole = False  # w and the activation are the problem's
    backward_struct = AdditiveGradientArguments
    gradients = "dq", "dk", "dv", "dw"

    def why_gathers(self, problem: Problem) -> str | None:
        return "the kernels of additive scores read ordinary tensors"

    def why_not_invariant(self, problem: Problem) -> str | None:
        return "how an additive score is found depends on how far the queries beside it reach"

    def why_streamed(self, problem: Problem, needs: tuple[bool, ...]) -> str | None:
        return why_not_learned(problem, needs)

    def backward(
        self, problem: Problem, args: KernelArgs, saved: KernelResults, cotangents: Result, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        similarity = _similarity(problem)
        sums = problem.frame.heads, problem.q.shape[-1]

        def find(args: KernelArgs, saved: KernelResults, cotangents: Result, wanted: set[str]) -> dict[str, Tensor]:
            dw = torch.empty(sums, dtype=torch.float32, device="cpu")
            found = additive_gradients(args, saved, cotangents, wanted, partial(_arguments, problem), {"dw": dw})
            of_w = enumerate(similarity.in_place_of_w(_total(dw, similarity.w)))
            return found | {learned_by_similarity(n): g for n, g in of_w if g is not None}

        return backward(problem, args, saved, cotangents, needs, find)

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
    args: KernelArgs,
    saved: KernelResults,
    cotangents: Result,
    wanted: set[str],
    struct: Callable[[CallArguments], Struct],
    learned: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The gradients of a, c, v and what is wanted of the modifiers, by name.

    struct: makes what the forward read of its call. learned: what is written of the similarity, by name in the struct.
    """
    of_tensors = {"q": args.q, "k": args.k, "v": args.v}
    found = {name: torch.empty(t.shape, dtype=torch.float32, device="cpu") for name, t in of_tensors.items()}
    found |= empty_of_modifiers(args, wanted)
    if 0 in args.shape or args.k.shape[-2] == 0:
        for g in (*found.values(), *learned.values()):
            g.zero_()
        return found
    out, lse, row_stats = saved
    call = arguments(args, out=out.contiguous(), lse=lse, row_stats=row_stats.contiguous())
    given = {"dout": cotangents[0].float(), "dlse": cotangents[1].float()[..., None]}
    gradients = {f"d{name}": g for name, g in found.items()}
    run_backward(AdditiveGradientArguments, struct(call), {**given, **gradients, **learned})
    return found


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
