"""The forward operation of the native kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.abi import AXES, BOUNDS, INTERVAL_MEMBERS, CallArguments
from regard.backends.native.args import KernelArgs
from regard.backends.native.bind import bind
from regard.backends.native.c_structs import SATURATED, Struct
from regard.backends.native.call_operands import NUMBERS, OPERANDS
from regard.backends.native.ffi import DTYPE_CODES, library
from regard.backends.native.modifiers.table import CHECKS
from regard.backends.native.operands import Sizes
from regard.core.errors import ShapeError
from regard.core.paged import Paged
from regard.core.shapes import count_of, listed
from regard.core.state import RowStats

KernelResults = tuple[Tensor, Tensor, Tensor]  # out, lse, row_stats

MOST_FLOAT = torch.finfo(torch.float32).max
_AS_THEY_ARE = tuple(name for name, number in NUMBERS.items() if number.as_it_is)
_DEFAULTS = {name: number.default for name, number in NUMBERS.items()}
COUNTS = {name: operand.count for name, operand in OPERANDS.items() if operand.count is not None}
# The bytes of a call's members that say which keys each query sees.
_FIRST, _LAST = (getattr(CallArguments, INTERVAL_MEMBERS[n].name) for n in (0, -1))
VISIBLE = slice(_FIRST.offset, _LAST.offset + _LAST.size)
# Floating-point operations for which it is worth waking another thread.
THREAD_WORK = 1 << 20


def empty_results(args: KernelArgs) -> tuple[Tensor, Tensor]:
    """out and lse, to be filled."""
    return empty_out(args.q, (*args.shape, args.v.shape[-1]), torch.float32), empty_lse(args)


def empty_in_graph(args: KernelArgs) -> KernelResults:
    """out, lse and row_stats, to be filled, without gaps: a graph is told of a layout that does not depend on q's."""
    out = torch.empty((*args.shape, args.v.shape[-1]), dtype=torch.float32, device=args.q.device)
    return out, empty_lse(args), empty_row_stats(args)


def empty_out(q: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """out (*batch, h, nq, dv), to be filled.

    Its axes lie in memory in the order of q's where it has q's shape, if no number of q belongs to two rows: layers
    have the heads of a token beside each other in q, and their last projection reads them so.
    """
    apart = all(n == 1 or step >= shape[-1] for n, step in zip(q.shape[:-1], q.stride()[:-1], strict=True))
    if q.shape == shape and (shape[-1] == 1 or q.stride(-1) == 1) and apart:
        return torch.empty_like(q, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=q.device)


def empty_lse(args: KernelArgs) -> Tensor:
    """lse (*batch, h, nq), float32, to be filled."""
    return torch.empty(args.shape, dtype=torch.float32, device=args.q.device)


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


def check_shapes(args: KernelArgs) -> Sizes:
    """The sizes of a call. ShapeError where operands are not of one call: the kernels would read beside them.

    A graph that was recorded without guards (make_fx) holds masks of the length that it was recorded for.
    """
    return _check_shapes(tuple([(name, tuple(t.shape)) for name, t in args.tensors().items()]), library().tile)


@lru_cache(256)
def _check_shapes(shapes: tuple[tuple[str, tuple[int, ...]], ...], block: tuple[int, int]) -> Sizes:
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
    return sizes


def arguments(args: KernelArgs, **results: Tensor) -> CallArguments:
    """The struct that the kernels read. results: out, lse (*batch, h, nq) and row_stats, those that are wanted."""
    sizes, call = check_shapes(args), CallArguments()
    *batch, heads, nq = args.shape
    (key_heads, nk, dk), dv = args.k.shape[-3:], args.v.shape[-1]
    call.batch = (ctypes.c_int64 * AXES)(*(1,) * (AXES - len(batch)), *batch)
    call.heads, call.key_heads, call.nq, call.nk, call.dk, call.dv = heads, key_heads, nq, nk, dk, dv
    call.dtype, call.out_dtype = DTYPE_CODES[args.q.dtype], DTYPE_CODES[results["out"].dtype]
    call.threads = threads(pair_work(args) * nq * nk)
    numbers = {**_DEFAULTS, **args.numbers}
    for name in _AS_THEY_ARE:
        setattr(call, name, numbers[name])
    call.seed = numbers["seed"] & (2**64 - 1)
    set_bounds(call, numbers["first"], numbers["last"])
    if "lse" in results:
        results["lse"] = results["lse"][..., None]
    bind(call, {"q": args.q, **keys_and_values(args.k, args.v), **_laid_out(args.operands), **results})
    if isinstance(args.k, Paged):
        call.page_size, call.pages = args.k.page_size, len(args.k.pages)
    for check in {CHECKS[name] for name in args.operands.keys() & CHECKS.keys()}:
        check(args.operands, sizes)
    _set_counts(call, args.operands)
    return call


def keys_and_values(k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The operands that keys and values are: tensors, or pages that a block table names."""
    if isinstance(k, Paged) and isinstance(v, Paged):
        return {"k": k.pages, "v": v.pages, "block_table": k.block_table}
    return {"k": k, "v": v}


def _laid_out(operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The operands, as the kernels read them.

    A graph, or a hook on what is saved, may have laid out anew what was made without gaps.
    """
    found: dict[str, Tensor] = {}
    for name, t in operands.items():
        t = t.pages if isinstance(t, Paged) else t
        found[name] = t if OPERANDS[name].strided else t.contiguous()
    return found


def set_bounds(call: CallArguments, first: int | None, last: int | None) -> None:
    """Query i sees the keys from first + i up to, but without, last + i."""
    call.bounds = 0
    for name, bound in (("first", first), ("last", last)):
        if bound is not None:
            call.bounds |= BOUNDS[f"REGARD_{name.upper()}"]
            setattr(call, name, bound)


def run_backward(backward: type[Struct], forward: Struct, tensors: Mapping[str, Tensor | None], axes: int = 0) -> None:
    """The backward of the call that its forward's struct describes: reads cotangents, writes gradients, each by name.

    axes: see bind.
    """
    struct = backward(forward)
    bind(struct, tensors, axes)
    library().run(struct)


def call_of(struct: Struct) -> CallArguments:
    """The call that a struct begins with, in its memory."""
    return CallArguments.from_buffer(struct)


def set_visible(struct: Struct, found: dict[str, Any]) -> None:
    """Tells a struct that begins with a call which keys each query sees, as lower_intervals found it, and no more."""
    call = CallArguments()
    set_bounds(call, found.get("first"), found.get("last"))
    bind(call, _laid_out({name: t for name, t in found.items() if isinstance(t, Tensor)}))
    memoryview(struct).cast("B")[VISIBLE] = memoryview(call).cast("B")[VISIBLE]
    struct.held += call.held


def set_operands(struct: Struct, operands: dict[str, Tensor]) -> None:
    """Tells a struct that begins with a call some operands, each as the kernels read it."""
    call = call_of(struct)
    bind(call, operands)
    _set_counts(call, operands)
    struct.held += call.held


def clear(struct: Struct, operand: str) -> None:
    """Takes an operand from a struct that begins with a call."""
    call = call_of(struct)
    setattr(call, operand, type(getattr(call, operand))())
    if operand in COUNTS:
        setattr(call, COUNTS[operand].member, 0)


def _set_counts(call: CallArguments, operands: Mapping[str, Tensor]) -> None:
    for name in operands.keys() & COUNTS.keys():
        setattr(call, COUNTS[name].member, COUNTS[name].of(operands[name]))
