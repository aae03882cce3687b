"""Training: the backward operation of the native kernels, for everything that the forward computes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from regard.backends.backward import pulls, sink_gradient
from regard.backends.library import CODES, Arguments, Operand
from regard.backends.lowering import Lowered, relative_buckets
from regard.backends.operation import arguments, exact_lse, library, operand
from regard.problem import Problem
from regard.scores.algebra import Score
from regard.scores.modifiers import Alibi, Bias, RelativeBias, SoftCap
from regard.scores.similarity import Distance, ScaledDot

Pair = tuple[Tensor, Tensor]
Kept = tuple[Tensor, Tensor, Tensor]  # out, lse, norm
# What the tensors of a score are to the kernels; those of Bilinear and Cosine are in q and k already.
LEARNED = ("q", "k", "v", "bias", "slopes", "offsets", "sink")  # operands that have gradients
_KINDS: dict[type, str] = {ScaledDot: "scale", Alibi: "slopes", Bias: "bias", RelativeBias: "offsets"}


class Gradients(ctypes.Structure):
    """regard_gradients of native/gradient_args.h."""

    _fields_ = (
        ("call", Arguments),
        *((name, Operand) for name in ("dout", "dlse", "dq", "dk", "dv", "dbias")),
        ("dslopes", ctypes.c_void_p),
        ("doffsets", ctypes.c_void_p),
        ("dout_dtype", ctypes.c_int32),
        ("gradient_dtype", ctypes.c_int32),
    )


def why_not_backward(problem: Problem) -> str | None:
    """Why the kernels cannot differentiate a call that they can run, as a clause; None if they can."""
    if type(problem.similarity) is Distance:
        return "its scores are distances"
    if any(type(stage) is SoftCap and isinstance(stage.cap, Tensor) for stage in problem.score.parts):
        return "its soft cap is a tensor"
    return None


def backward(
    problem: Problem, lowered: Lowered, kept: Kept, cotangents: Pair, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of problem.tensors() for which `needs` is true, from what the forward kept and the cotangents."""
    given = problem.tensors()
    stages = [stage for stage in problem.score.parts for _ in stage.tensors()]
    kinds = ["q", "k", "v", *(_KINDS.get(type(stage), "prepared") for stage in stages)]
    wanted = {kind for kind, need in zip(kinds, needs, strict=False) if need} - {"prepared"}
    found = _run(lowered, kept, cotangents, wanted | ({"q"} if "scale" in wanted else set()))
    gradients: list[Tensor | None] = [None] * len(given)
    for n, kind in enumerate(kinds):
        if needs[n] and kind in wanted:
            g = _own(problem, lowered, kind, None if n < 3 else stages[n - 3], found)
            gradients[n] = g.reshape(given[n].shape).to(given[n].dtype)
    if problem.sink is not None and needs[-1]:
        gradients[-1] = _sink_gradient(problem.sink, kept, cotangents)
    return tuple(gradients)


def operand_gradients(lowered: Lowered, kept: Kept, cotangents: Pair, wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of the operands that are wanted, in their shapes and dtypes."""
    found = _run(lowered, kept, cotangents, wanted - {"sink"})
    if "sink" in wanted:
        assert lowered.sink is not None
        found["sink"] = _sink_gradient(lowered.sink[..., 0, 0], kept, cotangents)[..., None, None]
    for name in found.keys() & {"slopes", "offsets"}:
        heads = getattr(lowered, name).shape[0]
        found[name] = found[name] if heads > 1 else _total(found[name].movedim(0, -1))[None]
    if lowered.offsets is not None and "offsets" in found:  # beyond the distances there is room for whole vectors
        room = lowered.offsets.shape[1] - found["offsets"].shape[1]
        found["offsets"] = torch.nn.functional.pad(found["offsets"], (0, room))
    return {name: g.to(getattr(lowered, name).dtype).contiguous() for name, g in found.items()}


def _run(lowered: Lowered, kept: Kept, cotangents: Pair, wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of the kernels' operands, by name; slopes and offsets for each head."""
    heads, nq, nk = lowered.shape[-2], lowered.shape[-1], lowered.k.shape[-2]
    found = {name: torch.empty_like(getattr(lowered, name)) for name in wanted & {"q", "k", "v"}}
    if lowered.bias is not None and "bias" in wanted:
        shared = 1 in lowered.bias.shape[-2:]
        found["bias"] = torch.zeros(lowered.bias.shape, dtype=torch.float64 if shared else torch.float32)
    if "slopes" in wanted:
        found["slopes"] = torch.zeros(heads)
    if "offsets" in wanted:
        found["offsets"] = torch.zeros(heads, nq + nk - 1)
    if 0 in lowered.shape or nk == 0:
        return {name: g.zero_() for name, g in found.items()}
    out, lse, norm = (t.contiguous() for t in kept)
    dout, dlse = cotangents
    dout = dout if dout.dtype in CODES and dout.stride(-1) == 1 else dout.float().contiguous()
    dlse = dlse.float()
    told = Gradients()
    told.call = arguments(lowered, out, lse, norm)
    told.dout, told.dlse = operand(dout), operand(dlse[..., None])
    told.dout_dtype, told.gradient_dtype = CODES[dout.dtype], CODES[lowered.q.dtype]
    for name, g in found.items():
        setattr(told, f"d{name}", g.data_ptr() if name in ("slopes", "offsets") else operand(g))
    library().backward(told)
    return found


def _own(problem: Problem, lowered: Lowered, kind: str, stage: Score | None, found: dict[str, Tensor]) -> Tensor:
    """The gradient of a tensor of the problem from those of the kernels' operands."""
    if isinstance(stage, ScaledDot):  # q reached the kernels multiplied by the scale
        each = _total((found["q"] * problem.q.float()).sum(-1).movedim(-2, 0).flatten(1))
        return _total(each) if _single(stage.scale) else each
    if isinstance(stage, Alibi):
        return _total(found["slopes"]) if _single(stage.slopes) else found["slopes"]
    if isinstance(stage, RelativeBias):
        return _table_gradient(problem, stage, found["offsets"])
    scale = problem.similarity.scale if isinstance(problem.similarity, ScaledDot) else None
    if kind == "q" and isinstance(scale, Tensor):
        return found["q"] * (scale[..., None, None] if scale.dim() else scale).float()
    return found[kind]


def _single(t: object) -> bool:
    return isinstance(t, Tensor) and t.numel() == 1


def _table_gradient(problem: Problem, stage: RelativeBias, offsets: Tensor) -> Tensor:
    index = relative_buckets(problem, stage)
    table = torch.zeros(stage.table.shape[0], offsets.shape[0]).index_add_(0, index, offsets.T.contiguous())
    return table if stage.table.shape[1] > 1 else _total(table)


def _sink_gradient(sink: Tensor, kept: Kept, cotangents: Pair) -> Tensor:
    out, lse, norm = kept
    return sink_gradient(sink.double(), exact_lse(norm), pulls((out, lse), cotangents)[1]).to(sink.dtype)


def _total(t: Tensor) -> Tensor:
    """The sum over the last axis, by steps that do not depend on the number of threads."""
    while t.shape[-1] > 1:
        t = torch.nn.functional.pad(t, (0, -t.shape[-1] % 256)).unflatten(-1, (-1, 256)).sum(-1)
    return t.sum(-1)
