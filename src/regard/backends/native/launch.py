"""The forward operation of the native kernels."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from struct import Struct as Packer
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.abi import AXES, BOUNDS, INTERVAL_MEMBERS, CallArguments, Operand
from regard.backends.native.args import KernelArgs
from regard.backends.native.c_structs import Struct, address_of
from regard.backends.native.call_operands import NUMBERS, OPERANDS
from regard.backends.native.ffi import DTYPE_CODES, OPERAND_CODES, OTHER, Library, chosen, load
from regard.backends.native.modifiers.table import MODIFIERS
from regard.backends.native.operands import BATCH, HEAD, Sizes
from regard.core.errors import ShapeError
from regard.core.paged import Paged
from regard.core.shapes import count_of, listed
from regard.core.state import RowStats

Kept = tuple[Tensor, Tensor, Tensor]

MOST_FLOAT = torch.finfo(torch.float32).max
SATURATED = 3.4027e38  # kSaturated of native/core/vec.h: scores in base 2 that stand for all that are larger
_OPERAND = Packer(f"={ctypes.sizeof(Operand) // 8}q")  # all members have eight bytes
MEMBERS = {member.name: member for member in CallArguments.members}
STRIDED = {name for name, member in MEMBERS.items() if member.type == "regard_tensor"}
_OFFSETS = {name: getattr(CallArguments, name).offset for name in MEMBERS}
_SET = tuple(name for name, number in NUMBERS.items() if number.as_it_is)
_ADDRESS = Packer("=q")
_layouts: dict[Any, CallArguments] = {}  # of calls whose tensors lie alike
_MOST_LAYOUTS = 256
# The bytes of a call's members that say which keys each query sees.
VISIBLE = slice(
    getattr(CallArguments, INTERVAL_MEMBERS[0].name).offset,
    getattr(CallArguments, INTERVAL_MEMBERS[-1].name).offset + ctypes.sizeof(Operand),
)
# Floating-point operations for which it is worth waking another thread.
THREAD_WORK = 1 << 20


def library() -> Library:
    """The kernels that run here; there must be some."""
    isa = chosen()
    assert isa is not None
    return load(isa)


def empty_results(args: KernelArgs) -> tuple[Tensor, Tensor]:
    """out (*batch, h, nq, dv) and lse (*batch, h, nq), float32, to be filled."""
    lse = torch.empty(args.shape, dtype=torch.float32, device=args.q.device)
    return lse.new_empty((*args.shape, args.v.shape[-1])), lse


def empty_row_stats(args: KernelArgs) -> Tensor:
    """row_stats (*batch, h, nq, 2), from which the backward kernels compute the weights again, to be filled."""
    return torch.empty((*args.shape, 2), dtype=torch.float32, device=args.q.device)


def filled_without_pairs(args: KernelArgs, out: Tensor, lse: Tensor, row_stats: Tensor | None) -> bool:
    """Fills in the results where there are no queries or no keys: a sink has all the mass. Whether that was so."""
    if lse.numel() and args.k.shape[-2]:
        return False
    sink = args.operands.get("sink")
    lse = lse.fill_(-torch.inf) if sink is None else lse.copy_(sink[..., 0])
    if row_stats is not None:  # m in units of ln 2, and 1 / l, of a key with the sink's logit; both 0 of none
        empty = lse == -torch.inf
        m = (lse / math.log(2)).clamp(-MOST_FLOAT, MOST_FLOAT).masked_fill(empty, 0)
        row_stats.copy_(torch.stack([m, (~empty).to(lse.dtype)], -1))
    out.zero_()
    return True


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
    return max(1, min(torch.get_num_threads(), work // THREAD_WORK))


def pair_work(args: KernelArgs) -> int:
    """Floating-point operations that a query and a key cost, over the batch and all heads."""
    return 2 * math.prod(args.shape[:-1]) * (args.k.shape[-1] + args.v.shape[-1])


def sizes_of(args: KernelArgs) -> Sizes:
    *batch, heads, nq = args.shape
    return Sizes(tuple(batch), heads, args.k.shape[-3], nq, args.k.shape[-2], library().tile)


def check_shapes(args: KernelArgs) -> None:
    """ShapeError where operands are not of one call: the kernels would read beside them.

    A graph that was recorded without guards (make_fx) holds masks of the length that it was recorded for.
    """
    _check_shapes(tuple([(name, tuple(t.shape)) for name, t in args.tensors().items()]), library().tile)


@lru_cache(256)
def _check_shapes(shapes: tuple[tuple[str, tuple[int, ...]], ...], block: tuple[int, int]) -> None:
    given = dict(shapes)
    *batch, heads, nq, width = given["q"]
    *_, key_heads, nk, _ = given["k"]
    sizes = Sizes(tuple(batch), heads, key_heads, nq, nk, block)
    expected: dict[str, tuple[int, ...] | None] = {}
    for name, features in (("k", width), ("v", given["v"][-1])):
        shape = (*batch, key_heads, nk, features)
        expected[name] = None if given[name] == shape else shape
    for name, shape in shapes:
        declared = OPERANDS.get(name)  # a tensor of a mask that is a text has none
        wrong = expected.get(name) if declared is None else declared.wrong_shape(shape, sizes)
        if wrong is not None:
            raise ShapeError(
                f"the native kernels: {name} has shape {listed(shape)}; q {listed(given['q'])} and k "
                f"{listed(given['k'])} need {listed(wrong)}. A graph recorded by make_fx serves one shape; "
                "torch.export and torch.compile(dynamic=True) serve all."
            )
    if heads and (key_heads == 0 or heads % key_heads):
        raise ShapeError(
            f"the native kernels: k has {count_of(key_heads, 'head')}, q has {heads}; expected a multiple."
        )


def arguments(args: KernelArgs, out: Tensor, lse: Tensor | None, row_stats: Tensor | None) -> CallArguments:
    """The struct that the kernels read; all but its addresses is worked out once for calls whose tensors lie alike."""
    # a graph, or a hook on what is saved, may have laid out anew what was made without gaps
    tensors = {name: t if name in STRIDED else t.contiguous() for name, t in args.tensors().items()}
    if isinstance(args.k, Paged) and isinstance(args.v, Paged):
        tensors |= {name: t.pages for name, t in tensors.items() if isinstance(t, Paged)}
        tensors["block_table"] = args.k.block_table
    tensors |= {name: t for name, t in (("out", out), ("lse", lse), ("row_stats", row_stats)) if t is not None}
    layout = (
        torch.get_num_threads(),
        args.k.shape,
        *[args.number(name) for name in NUMBERS if name != "seed"],
        *[(name, t.dtype, t.shape, t.stride()) for name, t in tensors.items()],
    )
    template = _layouts.get(layout)
    if template is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        template = _layouts[layout] = _lay_out(args, tensors)
    call = CallArguments.from_buffer_copy(template)
    call.held = list(tensors.values())
    for name, t in tensors.items():
        _ADDRESS.pack_into(call, _OFFSETS[name], address_of(t))
    call.seed = args.number("seed") & (2**64 - 1)
    sizes = sizes_of(args)
    for modifier in MODIFIERS:
        modifier.check(args.operands, sizes)
    return call


def _lay_out(args: KernelArgs, tensors: dict[str, Tensor]) -> CallArguments:
    """The struct of a call, whose addresses and seed mean nothing."""
    check_shapes(args)
    call = CallArguments()
    *batch, heads, nq = args.shape
    (key_heads, nk, dk), dv = args.k.shape[-3:], args.v.shape[-1]
    call.batch = (ctypes.c_int64 * AXES)(*_axes(tuple(batch), 1))
    call.heads, call.key_heads, call.nq, call.nk, call.dk, call.dv = heads, key_heads, nq, nk, dk, dv
    call.dtype, call.out_dtype = DTYPE_CODES[args.q.dtype], DTYPE_CODES[tensors["out"].dtype]
    call.threads = threads(pair_work(args) * nq * nk)
    for name in _SET:
        setattr(call, name, args.number(name))
    set_bounds(call, args.number("first"), args.number("last"))
    for name, t in tensors.items():
        set_operand(call, name, t[..., None] if name == "lse" else t)
    if isinstance(args.k, Paged):
        set_pages(call, args.k)
    call.held.clear()
    return call


def set_bounds(call: CallArguments, first: int | None, last: int | None) -> None:
    """Query i sees the keys from first + i up to, but without, last + i."""
    call.bounds = 0
    for name, bound in (("first", first), ("last", last)):
        if bound is not None:
            call.bounds |= BOUNDS[f"REGARD_{name.upper()}"]
            setattr(call, name, bound)


def set_operand(call: CallArguments, name: str, t: Tensor) -> None:
    """Fills the members that belong to an operand: its address, its strides, how many of it there are."""
    declared = OPERANDS.get(name)
    if name in STRIDED:
        return setattr(call, name, operand(call.hold(t)))
    t = call.point(name, t.contiguous())
    if declared is None:  # a block table
        return
    if HEAD in declared.axes:
        setattr(call, f"{name}_stride", t.stride(0) if len(t) > 1 else 0)
    if BATCH in declared.axes:
        setattr(call, f"{name}_batch", (ctypes.c_int64 * AXES)(*_axes(tuple(_strides(t)[:-1]), 0)))
    if declared.count is not None:
        setattr(call, declared.count.member, declared.count.of(t))


def set_pages(call: CallArguments, k: Paged) -> None:
    """Fills in how the pages of keys and values lie, but for addresses and the strides of k and v."""
    call.page_size, call.pages = k.page_size, len(k.pages)
    call.block_table_batch = (ctypes.c_int64 * AXES)(*_axes((k.block_table.stride(0),), 0))


def _axes(values: tuple[int, ...], missing: int, count: int = AXES) -> tuple[int, ...]:
    return (missing,) * (count - len(values)) + values


def _strides(t: Tensor) -> list[int]:
    """0 along the axes that are shared."""
    return [0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]


def operand(t: Tensor) -> Operand:
    """A tensor (*batch, h, n, m), its axes broadcast to the call's where their size is 1."""
    strides = _axes(tuple(_strides(t)), 0, AXES + 3)
    return Operand.from_buffer_copy(
        _OPERAND.pack(address_of(t), *strides, extent(t), OPERAND_CODES.get(t.dtype, OTHER))
    )


def extent(t: Tensor) -> int:
    """Elements from a tensor's first to its last, in memory; 0 where it has none."""
    if not t.numel():
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))


def set_visible(struct: Struct, found: dict[str, Any]) -> list[Tensor]:
    """Fills in, of a struct that begins with a call, the keys that each query sees: what lower_intervals found.

    Returns the tensors that the struct then leads to.
    """
    call = CallArguments()
    set_bounds(call, found.get("first"), found.get("last"))
    for name, t in found.items():
        if isinstance(t, Tensor):
            set_operand(call, name, t)
    memoryview(struct).cast("B")[VISIBLE] = memoryview(call).cast("B")[VISIBLE]
    return call.held


def set_places(struct: Struct, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Tells a struct, which begins with a call, the positions of queries and keys, (*batch, n)."""
    call = CallArguments.from_buffer(struct)
    call.held = []  # it has the memory of the struct alone
    for name, t in (("q_at", q), ("k_at", k)):
        t = call.point(name, t.long().contiguous())
        setattr(call, f"{name}_batch", (ctypes.c_int64 * AXES)(*_axes(tuple(_strides(t)[:-1]), 0)))
    return tuple(call.held)
