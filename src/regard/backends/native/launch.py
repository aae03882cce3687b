"""The forward operation of the native kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from struct import Struct as Packer

import torch
from torch import Tensor

from regard.backends.native.abi import AXES, CallArguments, Operand, Struct
from regard.backends.native.args import KernelArgs
from regard.backends.native.ffi import DTYPE_CODES, Library, chosen, load
from regard.backends.native.lower_modifiers import ROOM
from regard.core.state import RowStats

Result = tuple[Tensor, Tensor]
Kept = tuple[Tensor, Tensor, Tensor]
Run = Callable[[CallArguments], None]

MOST_FLOAT = torch.finfo(torch.float32).max
SATURATED = 3.4027e38  # kSaturated of native/core/vec.h: scores in base 2 that stand for all that are larger
_OPERAND = Packer(f"={ctypes.sizeof(Operand) // 8}q")  # an address and the strides, eight bytes each
MEMBERS = {member.name: member for member in CallArguments.members}
# Floating-point operations for which it is worth waking another thread.
_GRAIN = 1 << 20


def library() -> Library:
    """The kernels that run here; there must be some."""
    isa = chosen()
    assert isa is not None
    return load(isa)


def dots(call: CallArguments) -> None:
    """The kernel of dot products."""
    library().run("regard_forward", call)


def forward(args: KernelArgs, run: Run = dots) -> Result:
    """out (*batch, h, nq, dv) and lse (*batch, h, nq), float32; run: the kernel of the similarity."""
    out, lse = empty(args)
    return _filled(args, run, out, lse, None)


def forward_for_backward(args: KernelArgs, run: Run = dots) -> Kept:
    """out, lse, and row_stats (*batch, h, nq, 2), from which the backward kernels compute the weights again."""
    out, lse, row_stats = room(args)
    return *_filled(args, run, out, lse, row_stats), row_stats


def _filled(args: KernelArgs, run: Run, out: Tensor, lse: Tensor, row_stats: Tensor | None) -> Result:
    if lse.numel() == 0 or args.k.shape[-2] == 0:
        return _nothing(args, out, lse, row_stats)
    run(arguments(args, out, lse, row_stats))
    return out, lse


def _nothing(args: KernelArgs, out: Tensor, lse: Tensor, row_stats: Tensor | None) -> Result:
    """Where there are no queries or no keys: the sink, if there is one, has all the mass."""
    lse = lse.fill_(-torch.inf) if args.sink is None else lse.copy_(args.sink[..., 0])
    if row_stats is not None:  # m in units of ln 2, and 1 / l, of a key with the sink's logit; both 0 of none
        empty = lse == -torch.inf
        m = (lse / math.log(2)).clamp(-MOST_FLOAT, MOST_FLOAT).masked_fill(empty, 0)
        row_stats.copy_(torch.stack([m, (~empty).to(lse.dtype)], -1))
    return out.zero_(), lse


def empty(args: KernelArgs) -> Result:
    """Room for out and lse."""
    lse = torch.empty(args.shape, dtype=torch.float32, device=args.q.device)
    return lse.new_empty((*args.shape, args.v.shape[-1])), lse


def room(args: KernelArgs) -> Kept:
    """Room for out, lse and row_stats."""
    out, lse = empty(args)
    return out, lse, lse.new_empty((*args.shape, 2))


def natural_row_stats(row_stats: Tensor) -> RowStats:
    """What the kernels compute weights by, m in base 2 and 1 / l, as natural row statistics."""
    m, inverse = row_stats.double().unbind(-1)
    empty, saturated, exact = inverse == 0, m.abs() >= SATURATED, m * math.log(2)
    rounded = torch.where(saturated, torch.copysign(m.new_tensor(MOST_FLOAT), m), exact).float()
    # what rounding took from m goes to l; where m's own last digit is 1 or more, its scores have no such digits
    taken = exact - rounded
    l = torch.exp(taken.masked_fill(taken.abs() > 0.5, 0)) / inverse.masked_fill(empty, 1)
    return RowStats(rounded.masked_fill(empty, -torch.inf), l.float().masked_fill(empty, 0))


def sink_weights(row_stats: Tensor, sink: Tensor) -> Tensor:
    """The weight of a sink with logits (*batch, h) in each row, as the kernels compute it: float64 (*batch, h, nq)."""
    m, inverse = row_stats.double().unbind(-1)
    logit = (sink.double() / math.log(2)).clamp(-MOST_FLOAT, MOST_FLOAT)[..., None]
    return torch.exp2(logit - m) * inverse


def threads(work: int) -> int:
    """How many of torch's are worth waking for so many floating-point operations."""
    return max(1, min(torch.get_num_threads(), work // _GRAIN))


def pair_work(args: KernelArgs) -> int:
    """Floating-point operations that a query and a key cost, over the batch and all heads."""
    return 2 * math.prod(args.shape[:-1]) * (args.k.shape[-1] + args.v.shape[-1])


def arguments(args: KernelArgs, out: Tensor, lse: Tensor | None, row_stats: Tensor | None) -> CallArguments:
    """The struct that the kernels read."""
    call = CallArguments()
    *batch, heads, nq = args.shape
    (key_heads, nk, dk), dv = args.k.shape[-3:], args.v.shape[-1]
    call.batch = (ctypes.c_int64 * AXES)(*_axes(tuple(batch), 1))
    call.heads, call.key_heads, call.nq, call.nk, call.dk, call.dv = heads, key_heads, nq, nk, dk, dv
    call.dtype, call.out_dtype = DTYPE_CODES[args.q.dtype], DTYPE_CODES[out.dtype]
    call.threads = threads(pair_work(args) * nq * nk)
    call.scale, call.cap, call.cap_last = args.scale, args.cap, args.cap_last
    call.invariant = args.invariant
    call.seed, call.threshold, call.keep = args.seed & (2**64 - 1), args.threshold, args.keep
    call.out = operand(call.hold(out))
    if lse is not None:
        call.lse = operand(call.hold(lse)[..., None])
    if row_stats is not None:
        call.row_stats = operand(call.hold(row_stats))
    for name, t in args.tensors().items():
        _set(call, name, t)
    _check_cells(args, call)
    return call


def _check_cells(args: KernelArgs, call: CallArguments) -> None:
    """ValueError where the table of offsets does not reach: nothing else would stop a read beside it."""
    q, k = args.q_cell, args.k_cell
    if q is None or k is None or not q.numel() or not k.numel():
        return
    least, most = int(q.min()) - int(k.max()), int(q.max()) - int(k.min())
    if least < 0 or most >= call.offsets_count:
        reach = call.offsets_count // 2
        raise ValueError(
            f"The places of queries and keys differ by {least - reach} to {most - reach}; the buckets of the relative "
            f"bias say that they differ by {reach} at most (DifferenceBuckets.farthest)."
        )


def _set(call: CallArguments, name: str, t: Tensor) -> None:
    """Fills the members that belong to an operand: its address, its strides, how many of it there are."""
    if MEMBERS[name].type == "regard_tensor":
        setattr(call, name, operand(call.hold(t)))
        if name == "bias":
            call.bias_dtype = DTYPE_CODES[t.dtype]
        return
    # a graph, or a hook on what is saved, may have laid out anew what was made without gaps
    t = call.hold(t.contiguous())
    setattr(call, name, t.data_ptr())
    if f"{name}_stride" in MEMBERS:  # from one head to the next; 0 where they share it
        setattr(call, f"{name}_stride", t.stride(0) if len(t) > 1 else 0)
    if f"{name}_batch" in MEMBERS:
        setattr(call, f"{name}_batch", (ctypes.c_int64 * AXES)(*_axes(tuple(_strides(t)[:-1]), 0)))
    if name == "bits":
        call.bits_count = len(t)
    elif name == "offsets":
        call.offsets_count = t.shape[1] - ROOM
    elif name == "points_of_q":
        call.dims = len(t)


def _axes(values: tuple[int, ...], missing: int, count: int = AXES) -> tuple[int, ...]:
    return (missing,) * (count - len(values)) + values


def _strides(t: Tensor) -> list[int]:
    """0 along the axes that are shared."""
    return [0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]


def operand(t: Tensor) -> Operand:
    """A tensor (*batch, h, n, m), its axes broadcast to the call's where their size is 1."""
    return Operand.from_buffer_copy(_OPERAND.pack(t.data_ptr(), *_axes(tuple(_strides(t)), 0, AXES + 3)))


def set_strides(struct: Struct, at: int, shape: tuple[int, ...], strides: tuple[int, ...], axes: int) -> None:
    """Tells the operand at a byte of a struct how a tensor lies; one axis less than `axes`: it has none of heads."""
    steps = [0 if size == 1 else step for size, step in zip(shape, strides, strict=True)]
    if len(steps) < axes:
        steps.insert(-2, 0)
    _OPERAND.pack_into(struct, at, 0, *(0,) * (AXES + 3 - len(steps)), *steps)


def gapless(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor that has no gaps."""
    steps, step = list[int](), 1
    for size in shape[::-1]:
        steps.append(step)
        step *= size
    return tuple(steps[::-1])


def set_interval(struct: Struct, start: Tensor | None, stop: Tensor | None) -> tuple[Tensor, ...]:
    """Tells a struct, which begins with a call, the keys that each query sees, int32 (.., nq, 1); None: all."""
    if start is None or stop is None:
        call = CallArguments.from_buffer(struct)
        call.start.data = call.stop.data = 0
        return ()
    call = CallArguments.from_buffer(struct)
    call.start, call.stop = operand(start), operand(stop)
    return start, stop


def set_places(struct: Struct, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Tells a struct, which begins with a call, the positions of queries and keys, (*batch, n)."""
    call, held = CallArguments.from_buffer(struct), list[Tensor]()
    for name, t in (("q_at", q), ("k_at", k)):
        held.append(t := t.long().contiguous())
        setattr(call, name, t.data_ptr())
        setattr(call, f"{name}_batch", (ctypes.c_int64 * AXES)(*_axes(tuple(_strides(t)[:-1]), 0)))
    return tuple(held)
