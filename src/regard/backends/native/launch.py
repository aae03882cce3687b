"""The forward operation of the native kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.backends.native.args import KernelArgs
from regard.backends.native.ffi import AXES, CODES, Arguments, Library, Operand, chosen, load
from regard.backends.native.lower_modifiers import ROOM
from regard.core.state import RowStats

Result = tuple[Tensor, Tensor]
Kept = tuple[Tensor, Tensor, Tensor]
Run = Callable[[Arguments], None]

MOST_FLOAT = torch.finfo(torch.float32).max
SATURATED = 3.4027e38  # kSaturated of native/vec.h: scores in base 2 that stand for all that are larger
# Operands that the kernels read without asking for strides.
_GAPLESS = {"bits", "caps", "slopes", "offsets", "points_of_q", "points_of_k", "q_at", "k_at", "q_cell", "k_cell"}
# Floating-point operations for which it is worth waking another thread.
_GRAIN = 1 << 20


def library() -> Library:
    """The kernels that run here; there must be some."""
    isa = chosen()
    assert isa is not None
    return load(isa)


def dots(call: Arguments) -> None:
    """The kernel of dot products."""
    library().run("regard_forward", call)


def forward(args: KernelArgs, run: Run = dots) -> Result:
    """out (*batch, h, nq, dv) and lse (*batch, h, nq), float32; run: the kernel of the similarity."""
    out, lse = empty(args)
    return _filled(args, run, out, lse, None)


def forward_for_backward(args: KernelArgs, run: Run = dots) -> Kept:
    """out, lse, and norm (*batch, h, nq, 2), from which the backward kernels compute the weights again."""
    out, lse, norm = room(args)
    return *_filled(args, run, out, lse, norm), norm


def _filled(args: KernelArgs, run: Run, out: Tensor, lse: Tensor, norm: Tensor | None) -> Result:
    if lse.numel() == 0 or args.k.shape[-2] == 0:
        return _nothing(args, out, lse, norm)
    run(arguments(args, out, lse, norm))
    return out, lse


def _nothing(args: KernelArgs, out: Tensor, lse: Tensor, norm: Tensor | None) -> Result:
    """Where there are no queries or no keys: the sink, if there is one, has all the mass."""
    lse = lse.fill_(-torch.inf) if args.sink is None else lse.copy_(args.sink[..., 0])
    if norm is not None:  # m in units of ln 2, and 1 / l, of a key with the sink's logit; both 0 of none
        empty = lse == -torch.inf
        m = (lse / math.log(2)).clamp(-MOST_FLOAT, MOST_FLOAT).masked_fill(empty, 0)
        norm.copy_(torch.stack([m, (~empty).to(lse.dtype)], -1))
    return out.zero_(), lse


def empty(args: KernelArgs) -> Result:
    """Room for out and lse."""
    lse = torch.empty(args.shape, dtype=torch.float32, device=args.q.device)
    return lse.new_empty((*args.shape, args.v.shape[-1])), lse


def room(args: KernelArgs) -> Kept:
    """Room for out, lse and norm."""
    out, lse = empty(args)
    return out, lse, lse.new_empty((*args.shape, 2))


def row_stats(norm: Tensor) -> RowStats:
    """What the kernels compute weights by, m in base 2 and 1 / l, as natural row statistics."""
    m, inverse = norm.double().unbind(-1)
    empty, saturated, exact = inverse == 0, m.abs() >= SATURATED, m * math.log(2)
    rounded = torch.where(saturated, torch.copysign(m.new_tensor(MOST_FLOAT), m), exact).float()
    # what rounding took from m goes to l; where m's own last digit is 1 or more, its scores have no such digits
    taken = exact - rounded
    l = torch.exp(taken.masked_fill(taken.abs() > 0.5, 0)) / inverse.masked_fill(empty, 1)
    return RowStats(rounded.masked_fill(empty, -torch.inf), l.float().masked_fill(empty, 0))


def sink_weights(norm: Tensor, sink: Tensor) -> Tensor:
    """The weight of a sink with logits (*batch, h) in each row, as the kernels compute it: float64 (*batch, h, nq)."""
    m, inverse = norm.double().unbind(-1)
    logit = (sink.double() / math.log(2)).clamp(-MOST_FLOAT, MOST_FLOAT)[..., None]
    return torch.exp2(logit - m) * inverse


def threads(work: int) -> int:
    """How many of torch's are worth waking for so many floating-point operations."""
    return max(1, min(torch.get_num_threads(), work // _GRAIN))


def arguments(args: KernelArgs, out: Tensor, lse: Tensor | None, norm: Tensor | None) -> Arguments:
    """The struct that the kernels read."""
    call = Arguments()
    *batch, heads, nq = args.shape
    (key_heads, nk, dk), dv = args.k.shape[-3:], args.v.shape[-1]
    call.batch = (ctypes.c_int64 * AXES)(*_axes(tuple(batch), 1))
    call.heads, call.key_heads, call.nq, call.nk, call.dk, call.dv = heads, key_heads, nq, nk, dk, dv
    call.dtype, call.out_dtype = CODES[args.q.dtype], CODES[out.dtype]
    call.threads = threads(2 * math.prod(batch) * heads * nq * nk * (dk + dv))
    call.scale, call.cap, call.cap_last = args.scale, args.cap, args.cap_last
    call.invariant = args.invariant
    call.seed, call.threshold, call.keep = args.seed & (2**64 - 1), args.threshold, args.keep
    call.out = operand(call.hold(out))
    if lse is not None:
        call.lse = operand(call.hold(lse)[..., None])
    if norm is not None:
        call.norm = operand(call.hold(norm))
    for name, t in args.tensors().items():
        _tell(call, name, t)
    _check_cells(args, call)
    return call


def _check_cells(args: KernelArgs, call: Arguments) -> None:
    """ValueError where the table of offsets does not reach: nothing else would stop a read beside it."""
    q, k = args.q_cell, args.k_cell
    if q is None or k is None or not q.numel() or not k.numel():
        return
    least, most = int(q.min()) - int(k.max()), int(q.max()) - int(k.min())
    if least < 0 or most >= call.offset_count:
        reach = call.offset_count // 2
        raise ValueError(
            f"The places of queries and keys differ by {least - reach} to {most - reach}; the buckets of the relative "
            f"bias say that they differ by {reach} at most (DifferenceBuckets.farthest)."
        )


def _tell(call: Arguments, name: str, t: Tensor) -> None:
    # a graph, or a hook on what is saved, may have laid out anew what was made without gaps
    t = call.hold(t.contiguous() if name in _GAPLESS else t)
    if name == "bits":
        call.bits, call.bit_count = t.data_ptr(), len(t)
    elif name == "caps":
        call.caps, call.cap_stride = t.data_ptr(), int(t.numel() > 1)
    elif name == "slopes":
        call.slopes, call.slope_stride = t.data_ptr(), int(t.numel() > 1)
    elif name == "offsets":
        call.offsets, call.offset_stride = t.data_ptr(), t.shape[1] if len(t) > 1 else 0
        call.offset_count = t.shape[1] - ROOM
    elif name in ("points_of_q", "points_of_k"):
        setattr(call, name, t.data_ptr())
        call.dims = len(t)
    elif name in ("q_at", "k_at", "q_cell", "k_cell"):
        setattr(call, name, t.data_ptr())
        setattr(call, f"{name}_batch", (ctypes.c_int64 * AXES)(*_axes(tuple(_strides(t)[:-1]), 0)))
    else:
        setattr(call, name, operand(t))
        if name == "bias":
            call.bias_dtype = CODES[t.dtype]


def _axes(values: tuple[int, ...], missing: int) -> tuple[int, ...]:
    return (missing,) * (AXES - len(values)) + values


def _strides(t: Tensor) -> list[int]:
    """0 along the axes that are shared."""
    return [0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]


def operand(t: Tensor) -> Operand:
    """A tensor (*batch, h, n, m), its axes broadcast to the call's where their size is 1."""
    return Operand(t.data_ptr(), *(0,) * (AXES + 3 - t.dim()), *_strides(t))
