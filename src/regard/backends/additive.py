"""The additive similarity on the native kernels: what regard_additive of native/activation.h is told."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from regard.backends.backward import pulls, sink_gradient
from regard.backends.base import Kept, Result
from regard.backends.library import CODES, Arguments, Operand, parallel
from regard.backends.lowering import ACTIVATIONS, Lowered, lower_around
from regard.backends.operation import arguments, empty, exact_lse, library, nothing, operand, room
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


def forward(problem: Problem) -> Result:
    """(out, lse) of a problem whose similarity is Additive."""
    lowered = _lowered(problem)
    return _forward(problem, lowered, *empty(lowered), None)


def remembered(problem: Problem) -> Kept:
    """out, lse and norm, as operation.remembered."""
    lowered = _lowered(problem)
    out, lse, norm = room(lowered)
    return *_forward(problem, lowered, out, lse, norm), norm


def _forward(problem: Problem, lowered: Lowered, out: Tensor, lse: Tensor, norm: Tensor | None) -> Result:
    if lse.numel() == 0 or problem.frame.nk == 0:
        return nothing(lowered, out, lse, norm)
    _run("regard_additive_forward", _arguments(problem, lowered, out, lse, norm))
    return out, lse


def why_streamed(problem: Problem, needs: tuple[bool, ...]) -> str | None:
    """Why the kernels do not have this backward, as a clause; None if they do."""
    known = 3 + len(problem.similarity.tensors())
    if any(needs[known : 3 + len(problem.score.tensors())]):
        return "a tensor of a modifier asks for its gradient"
    return None


def backward(problem: Problem, kept: Kept, cotangents: Result, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of problem.tensors() for which `needs` is true, where why_streamed has nothing to say."""
    out, lse, norm = kept
    g_out, delta = pulls((out, lse), (cotangents[0].float(), cotangents[1]))
    q, k, v = problem.q, problem.k, problem.v
    da, dc, dv = (torch.zeros(t.shape, dtype=torch.float32) for t in (q, k, v))
    dw = torch.zeros(problem.frame.heads, q.shape[-1])
    if lse.numel() and k.numel():
        lowered = _lowered(problem)
        x = _arguments(problem, lowered, out, lse, norm)
        operands = (operand(t) for t in (g_out, delta[..., None], da, dc, dv))
        _run("regard_additive_backward", AdditiveGradients(x, *operands, dw.data_ptr()))
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


def _lowered(problem: Problem) -> Lowered:
    return lower_around(problem, library().tile, problem.q.float(), problem.k.float(), problem.v)


def _arguments(problem: Problem, lowered: Lowered, out: Tensor, lse: Tensor, norm: Tensor | None) -> AdditiveArguments:
    """What the kernels are told; the tensors of `lowered` must live until they have run."""
    similarity = problem.similarity
    assert isinstance(similarity, Additive)
    activation, w = similarity.activation, similarity.w.float().expand(problem.frame.heads, -1)
    slope = activation.slope if isinstance(activation, LeakyReLU) else 0.0
    call = arguments(lowered, out, lse, norm)
    call.dtype = CODES[lowered.v.dtype]
    # kept alive as an attribute of the struct
    x = AdditiveArguments(call, 0, w.shape[-1], ACTIVATIONS[type(activation)], slope)
    x.kept = w.contiguous()
    x.w = x.kept.data_ptr()
    return x


def _run(name: str, x: ctypes.Structure) -> None:
    kernel = getattr(library().handle, name)
    kernel.argtypes, kernel.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int32
    if kernel(ctypes.byref(x), parallel()):
        raise MemoryError("regard's native kernel could not have its scratch memory; nothing was computed.")
