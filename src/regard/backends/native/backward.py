"""Training: the backward operation of the native kernels, for everything that the forward computes."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.native.abi import GradientArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.ffi import DTYPE_CODES
from regard.backends.native.launch import arguments, library, operand, sink_weights
from regard.backends.native.lower_mask import full
from regard.backends.native.lower_modifiers import ROOM, relative_table
from regard.backends.streaming.backward import output_cotangents, sink_gradient
from regard.core.problem import Problem
from regard.scores.modifiers import Alibi, Bias, LogDistance, RelativeBias, SoftCap
from regard.scores.similarity import Distance, ScaledDot

Pair = tuple[Tensor, Tensor]
Kept = tuple[Tensor, Tensor, Tensor]  # out, lse, row_stats
_FLOATS = tuple(member.name.removeprefix("d") for member in GradientArguments.members if member.type == "float*")
BY_HEAD = tuple(name for name in _FLOATS if name != "offsets")  # operands of one number a head that have gradients
LEARNED = ("q", "k", "v", "bias", *_FLOATS, "sink")  # operands that have gradients
# What the first tensors of a score, by field, are to the kernels; those of Bilinear and Cosine are in q and k already.
_KINDS: dict[type, dict[str, str]] = {
    ScaledDot: {"scale": "scale"},
    Alibi: {"slopes": "slopes"},
    LogDistance: {"weight": "log_distance_weights", "rate": "log_distance_rates"},
    Bias: {"bias": "bias"},
    RelativeBias: {"table": "offsets"},
}


def why_not_backward(problem: Problem, needs: tuple[bool, ...]) -> str | None:
    """Why the kernels cannot find the gradients for which `needs` is true, as a clause; None if they can."""
    return "its scores are distances" if type(problem.similarity) is Distance else why_not_learned(problem, needs)


def why_not_learned(problem: Problem, needs: tuple[bool, ...]) -> str | None:
    """Which number of a score has a gradient that the kernels do not find, as a clause; None if there is none."""
    wanted = iter(needs[3:])
    for stage in problem.score.parts:
        asked = [next(wanted) for _ in stage.tensors()]
        if type(stage) is SoftCap and any(asked):
            return "its soft cap is learned"
        if type(stage) is Alibi and any(asked[1:]):
            return "its coordinates are learned"
    return None


def backward(
    problem: Problem, args: KernelArgs, kept: Kept, cotangents: Pair, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of problem.tensors() for which `needs` is true, from what the forward kept and the cotangents."""
    given = problem.tensors()
    kinds = ["q", "k", "v"]
    for stage in problem.score.parts:
        fields = _KINDS.get(type(stage), {}).items()
        first = [kind for field, kind in fields if isinstance(getattr(stage, field), Tensor)]
        kinds += first + ["prepared"] * (len(stage.tensors()) - len(first))
    kinds += ["prepared"] * (len(given) - len(kinds))
    if problem.sink is not None:
        kinds[-1] = "sink"
    wanted = {kind for kind, need in zip(kinds, needs, strict=True) if need} - {"prepared"}
    operands = wanted - {"scale"} | ({"q"} if "scale" in wanted else set[str]())
    found = operand_gradients(args, kept, cotangents, operands)
    each = zip(kinds, given, needs, strict=True)
    return tuple(
        _own(problem, kind, t, found).reshape(t.shape).to(t.dtype) if need and kind in wanted else None
        for kind, t, need in each
    )


def operand_gradients(args: KernelArgs, kept: Kept, cotangents: Pair, wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of the operands that are wanted: in their shapes, but those of offsets have no room at the end."""
    found = _run(args, kept, cotangents, wanted - {"sink"})
    if "sink" in wanted:
        assert args.sink is not None
        out, _, row_stats = kept
        delta = output_cotangents(out, row_stats[..., 1] == 0, cotangents)[1]
        found["sink"] = sink_gradient(sink_weights(row_stats, args.sink[..., 0, 0]), delta)[..., None, None]
    for name in found.keys() & set(_FLOATS):
        if getattr(args, name).shape[0] == 1:
            found[name] = _total(found[name].movedim(0, -1))[None]
    return found


def _run(args: KernelArgs, kept: Kept, cotangents: Pair, wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of the kernels' operands, by name; those of numbers and offsets by head for each head."""
    heads, nk = args.shape[-2], args.k.shape[-2]
    found = {name: torch.empty_like(getattr(args, name)) for name in wanted & {"q", "k", "v"}}
    if args.bias is not None and "bias" in wanted:
        shared = 1 in args.bias.shape[-2:]
        found["bias"] = torch.zeros(args.bias.shape, dtype=torch.float64 if shared else torch.float32)
    found |= {name: torch.zeros(heads) for name in wanted & set(BY_HEAD)}
    if "offsets" in wanted:
        assert args.offsets is not None
        found["offsets"] = torch.zeros(heads, args.offsets.shape[1] - ROOM)
    if 0 in args.shape or nk == 0:
        return {name: g.zero_() for name, g in found.items()}
    out, lse, row_stats = (t.contiguous() for t in kept)
    dout, dlse = cotangents
    dout = dout if dout.dtype in DTYPE_CODES and dout.stride(-1) == 1 else dout.float().contiguous()
    dlse = dlse.float()
    struct = GradientArguments(call=arguments(args, out, lse, row_stats))
    struct.dout, struct.dlse = operand(struct.hold(dout)), operand(struct.hold(dlse)[..., None])
    struct.dout_dtype, struct.gradient_dtype = DTYPE_CODES[dout.dtype], DTYPE_CODES[args.q.dtype]
    for name, g in found.items():
        setattr(struct, f"d{name}", g.data_ptr() if name in _FLOATS else operand(g))
    library().run("regard_backward", struct)
    return found


def _own(problem: Problem, kind: str, t: Tensor, found: dict[str, Tensor]) -> Tensor:
    """The gradient of a tensor of the problem from those of the kernels' operands."""
    if kind == "bias":
        return _shared(problem, found["bias"], t)
    if kind == "offsets":
        stage = next(stage for stage in problem.score.parts if isinstance(stage, RelativeBias))
        table, index = found["offsets"].new_zeros(stage.table.shape), relative_table(problem, stage.buckets).buckets
        return table.index_add_(0, index, found["offsets"].T.contiguous())
    scale = problem.similarity.scale if isinstance(problem.similarity, ScaledDot) else None
    if kind == "scale":  # q reached the kernels multiplied by it
        assert isinstance(scale, Tensor)
        q = problem.q.float().masked_fill(found["q"] == 0, 0)  # 0 · NaN is NaN, and a hidden query may hold that
        each = _total((found["q"] * q).sum(-1).movedim(-2, 0).flatten(1))
        return _total(each) if scale.numel() == 1 else each
    if kind == "q" and isinstance(scale, Tensor):
        return found["q"] * (scale[..., None, None] if scale.dim() else scale).float()
    return found[kind]


def _shared(problem: Problem, g: Tensor, bias: Tensor) -> Tensor:
    """The gradient of one bias from that of the sum of all: over the axes along which it is shared."""
    shape = full(problem.frame.lift(bias)).shape
    for axis, size in enumerate(shape[::-1], 1):
        if size == 1 != g.shape[-axis]:  # 0 too: an empty sum
            g = _total(g.movedim(-axis, -1))[..., None].movedim(-1, -axis)
    for _ in range(g.dim() - len(shape)):
        g = _total(g.movedim(0, -1))
    return g


def _total(t: Tensor) -> Tensor:
    """The sum over the last axis, by steps that do not depend on the number of threads."""
    while t.shape[-1] > 1:
        t = torch.nn.functional.pad(t, (0, -t.shape[-1] % 256)).unflatten(-1, (-1, 256)).sum(-1)
    return t.sum(-1)
