"""Training: the backward operation of the native kernels, for everything that the forward computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.backends.native.abi import GradientArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.call_operands import OPERANDS
from regard.backends.native.ffi import DTYPE_CODES
from regard.backends.native.launch import KernelResults, arguments, run_backward, sink_weights
from regard.backends.native.modifiers.base import of_operand, total
from regard.backends.native.modifiers.program import ProgramGradients
from regard.backends.native.modifiers.table import (
    BY_LEARNED,
    STEPS,
    needs_of_modifiers,
    programmed,
    why_not_learned,
)
from regard.backends.streaming.backward import output_cotangents, sink_gradient
from regard.call.problem import Problem
from regard.scores.additive import Additive
from regard.scores.algebra import Score
from regard.scores.elementwise import Elementwise
from regard.scores.similarity import Distance, ScaledDot

Pair = tuple[Tensor, Tensor]
# How a family finds the gradients that are wanted, by name: of operands, and of what its similarity learns.
Find = Callable[[KernelArgs, KernelResults, Pair, set[str]], dict[str, Tensor]]
_BY_HEAD = {name for name, operand in OPERANDS.items() if operand.learned and not operand.strided}
# What has gradients, in graphs too: there the operands of a program are the tensors that the score's parts hold.
LEARNED = ("q", "k", "v", *BY_LEARNED, "sink")
# What the first tensors of a score, by field, are to the kernels; those of Bilinear and Cosine are in q and k already.
_KINDS = {ScaledDot: {"scale": "scale"}, **{modifier.stage: modifier.learned() for modifier in STEPS}}


def why_not_backward(problem: Problem, needs: tuple[bool, ...]) -> str | None:
    """Why the kernels cannot find the gradients for which `needs` is true, as a clause; None if they can."""
    return "its scores are distances" if type(problem.similarity) is Distance else why_not_learned(problem, needs)


def backward(
    problem: Problem,
    args: KernelArgs,
    saved: KernelResults,
    cotangents: Pair,
    needs: tuple[bool, ...],
    find: Find | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of problem.tensors() for which `needs` is true, from what the forward saved and the cotangents.

    find: of a similarity that is no dot product; it gives those of what it learns the names of `learned_by_similarity`.
    """
    given = problem.tensors()
    kinds = _kinds_of_tensors(problem, len(given))
    wanted = {kind for kind, need in zip(kinds, needs, strict=True) if need} - {"prepared", "program"}
    operands = wanted - {"scale"} | ({"q"} if "scale" in wanted else set[str]())
    of_modifiers = needs_of_modifiers(problem, needs) if programmed(problem) else ()
    program = ProgramGradients.of(problem, of_modifiers) if any(of_modifiers) else None
    if program is not None:
        args, operands = args.with_operands(**program.operands), operands | program.names.keys()
    found = operand_gradients(args, saved, cotangents, operands, find)
    of_program = iter(() if program is None else program.of_tensors(found))

    def gradient(kind: str, t: Tensor) -> Tensor | None:
        if kind == "program":
            return next(of_program).to(t.dtype)
        if kind not in wanted or (kind not in found and kind != "scale"):  # w_q of an additive score, which made q
            return None
        return _own(problem, kind, t, found).reshape(t.shape).to(t.dtype)

    return tuple(gradient(kind, t) if need else None for kind, t, need in zip(kinds, given, needs, strict=True))


def _kinds_of_tensors(problem: Problem, count: int) -> list[str]:
    """What each of problem.tensors() is to the kernels: an operand, by name; "prepared"; "program", a part of one.

    count: how many they are.
    """
    kinds = ["q", "k", "v"]
    similarity, *modifiers = problem.score.parts
    for stage in (similarity,) if programmed(problem) else problem.score.parts:
        kinds += _kinds_of_stage(stage)
    if programmed(problem):
        kinds += ["program"] * sum(len(stage.tensors()) for stage in modifiers)
    kinds += ["prepared"] * (count - len(kinds))
    if problem.sink is not None:
        kinds[-1] = "sink"
    return kinds


def _kinds_of_stage(stage: Score) -> list[str]:
    """What each tensor of a part of a score is to the kernels."""
    if isinstance(stage, (Additive, Elementwise)):
        return [learned_by_similarity(n) for n in range(len(stage.tensors()))]
    fields = _KINDS.get(type(stage), {}).items()
    first = [kind for field, kind in fields if isinstance(getattr(stage, field), Tensor)]
    return first + ["prepared"] * (len(stage.tensors()) - len(first))


def learned_by_similarity(n: int) -> str:
    """The name of the gradient of the n-th tensor of a similarity whose tensors have no place in KernelArgs."""
    return f"similarity {n}"


def operand_gradients(
    args: KernelArgs, saved: KernelResults, cotangents: Pair, wanted: set[str], find: Find | None = None
) -> dict[str, Tensor]:
    """The gradients of the operands that are wanted: in their shapes, but those of offsets have no room at the end."""
    found = (find or _of_dots)(args, saved, cotangents, wanted - {"sink"})
    if "sink" in wanted:
        sink = args.operands["sink"]
        out, _, row_stats = saved
        delta = output_cotangents(out, row_stats[..., 1] == 0, (cotangents[0].float(), cotangents[1]))[1]
        found["sink"] = sink_gradient(sink_weights(row_stats, sink[..., 0, 0]), delta)[..., None, None]
    for name in found.keys() & _BY_HEAD:
        found[name] = of_operand(found[name], args.operands[name])
    return found


def empty_of_modifiers(args: KernelArgs, wanted: set[str]) -> dict[str, Tensor]:
    """Room for the gradients of the modifiers' operands that are wanted; those of numbers, and of offsets, by head."""
    operands, heads = args.operands, args.shape[-2]
    return {name: by.empty_gradient(name, operands[name], heads) for name, by in BY_LEARNED.items() if name in wanted}


def _of_dots(args: KernelArgs, saved: KernelResults, cotangents: Pair, wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of the operands of the kernels of dot products."""
    tensors = args.tensors()
    found = {name: torch.empty_like(tensors[name]) for name in wanted & {"q", "k", "v"}}
    found |= empty_of_modifiers(args, wanted)
    if 0 in args.shape or args.k.shape[-2] == 0:
        return {name: g.zero_() for name, g in found.items()}
    out, lse, row_stats = (t.contiguous() for t in saved)
    dout, dlse = cotangents
    dout = dout if dout.dtype in DTYPE_CODES and dout.stride(-1) == 1 else dout.float().contiguous()
    dlse = dlse.float()
    forward = arguments(args, out=out, lse=lse, row_stats=row_stats)
    gradients = {f"d{name}": g for name, g in found.items()}
    run_backward(GradientArguments, forward, {"dout": dout, "dlse": dlse[..., None], **gradients})
    return found


def _own(problem: Problem, kind: str, t: Tensor, found: dict[str, Tensor]) -> Tensor:
    """The gradient of a tensor of the problem from those of the kernels' operands."""
    if kind in BY_LEARNED:
        return BY_LEARNED[kind].stage_gradient(problem, t, found[kind])
    scale = problem.similarity.scale if isinstance(problem.similarity, ScaledDot) else None
    if kind == "scale":  # q reached the kernels multiplied by it
        assert isinstance(scale, Tensor)
        q = problem.q.float().masked_fill(found["q"] == 0, 0)  # 0 · NaN is NaN, and a hidden query may hold that
        each = total((found["q"] * q).sum(-1).movedim(-2, 0).flatten(1))
        return total(each) if scale.numel() == 1 else each
    if kind == "q" and isinstance(scale, Tensor):
        return found["q"] * (scale[..., None, None] if scale.dim() else scale).float()
    return found[kind]
