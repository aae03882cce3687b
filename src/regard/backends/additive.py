"""The additive similarity on the native kernels: what regard_additive of native/activation.h is told."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.backends.backward import pulls, sink_gradient
from regard.backends.base import Result
from regard.backends.family import Family
from regard.backends.library import CODES, Arguments, Operand
from regard.backends.lowering import ACTIVATIONS, Lowered, lower_around
from regard.backends.operation import Kept, arguments, exact_lse, library, operand
from regard.problem import Problem
from regard.scores.activations import LeakyReLU
from regard.scores.additive import Additive


class AdditiveArguments(ctypes.Structure):
    """regard_additive of native/activation.h."""

    _fields_ = (
        ("call", Arguments),
        ("w", ctypes.c_void_p),
        ("w_stride", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("slope", ctypes.c_float),
    )


class AdditiveGradients(ctypes.Structure):
    """regard_additive_gradients of native/additive_backward.h."""

    _fields_ = (
        ("forward", AdditiveArguments),
        *((name, Operand) for name in ("dout", "delta", "da", "dc", "dv")),
        ("dw", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class AdditiveFamily(Family):
    """The kernels of additive scores."""

    whole = False  # w and the activation are the problem's

    def why_not_invariant(self) -> str | None:
        return "how an additive score is found depends on how far the queries beside it reach"

    def why_streamed(self, problem: Problem, needs: tuple[bool, ...]) -> str | None:
        known = 3 + len(problem.similarity.tensors())
        if any(needs[known : 3 + len(problem.score.tensors())]):
            return "a tensor of a modifier asks for its gradient"
        return None

    def lower(self, problem: Problem, mask: dict[str, Tensor]) -> Lowered:
        return lower_around(problem, mask, problem.q.float(), problem.k.float(), problem.v)

    def run(self, problem: Problem, call: Arguments) -> None:
        library().run("regard_additive_forward", _arguments(problem, call))

    def backward(
        self, problem: Problem, lowered: Lowered, kept: Kept, cotangents: Result, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        out, lse, norm = kept
        g_out, delta = pulls((out, lse), (cotangents[0].float(), cotangents[1]))
        da, dc, dv, dw = _run(problem, lowered, kept, g_out, delta)
        similarity = problem.similarity
        assert isinstance(similarity, Additive)
        w = similarity.w
        dw = dw.sum_to_size(w.shape) if w.dim() < 2 or w.shape[0] == 1 else dw
        # w_q, w_k and b have had their part in q and k
        known = (da, dc, dv, *(dw if t is w else None for t in similarity.tensors()))
        found = [*known, *(None for _ in problem.tensors()[len(known) :])]
        if problem.sink is not None and needs[-1]:
            found[-1] = sink_gradient(problem.sink.double(), exact_lse(norm), delta)
        given = zip(found, problem.tensors(), needs, strict=True)
        return tuple(g.to(t.dtype) if need and g is not None else None for g, t, need in given)


def _run(
    problem: Problem, lowered: Lowered, kept: Kept, g_out: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of a, c and v, and of w for each head."""
    out, lse, norm = kept
    there = lse.numel() and problem.k.numel()
    made = torch.empty if there else torch.zeros
    da, dc, dv = (made(t.shape, dtype=torch.float32) for t in (problem.q, problem.k, problem.v))
    dw = made(problem.frame.heads, problem.q.shape[-1])
    if there:
        x = _arguments(problem, arguments(lowered, out, lse, norm))
        operands = (operand(t) for t in (g_out, delta[..., None], da, dc, dv))
        library().run("regard_additive_backward", AdditiveGradients(x, *operands, dw.data_ptr()))
    return da, dc, dv, dw


def _arguments(problem: Problem, call: Arguments) -> AdditiveArguments:
    """What the kernels are told besides; the tensors of `call` must live until they have run."""
    similarity = problem.similarity
    assert isinstance(similarity, Additive)
    activation, w = similarity.activation, similarity.w.float().expand(problem.frame.heads, -1)
    slope = activation.slope if isinstance(activation, LeakyReLU) else 0.0
    call.dtype = CODES[problem.v.dtype]
    # kept alive as an attribute of the struct
    x = AdditiveArguments(call, 0, w.shape[-1], ACTIVATIONS[type(activation)], slope)
    x.kept = w.contiguous()
    x.w = x.kept.data_ptr()
    return x
