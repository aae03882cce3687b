"""The native kernels as nodes of a graph, regard::forward and regard::backward, for torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.args import KernelArgs
from regard.backends.native.backward import LEARNED, operand_gradients
from regard.backends.native.launch import (
    Kept,
    arguments,
    empty_results,
    empty_row_stats,
    filled_without_pairs,
    library,
    natural_row_stats,
)
from regard.backends.native.lower_mask import MASK_TENSORS, lower_text
from regard.backends.native.modifiers.table import MODIFIERS
from regard.core.cotangents import linear_in
from regard.core.errors import ShapeError
from regard.core.shapes import count_of, listed
from regard.core.state import RowStats

_EXACT = {"k", "v", "q_at", "q_documents", "k_at", "k_documents"}.union(*(modifier.exact for modifier in MODIFIERS))
_TYPES = {f.name: str(f.type) for f in fields(KernelArgs)} | {"seed": "SymInt"}
_NAMES = tuple(_TYPES)
_OPTIONAL = {"Tensor | None": "Tensor?", "int | None": "SymInt?"}  # other types are called alike in a schema
_SCHEMA = ", ".join(f"{_OPTIONAL.get(of, of)} {name}" for name, of in _TYPES.items())


def traced(args: KernelArgs) -> tuple[Tensor, RowStats]:
    """out (*batch, h, nq, dv) and the row statistics as one node, differentiable in each operand of floats."""
    out, lse, row_stats = torch.ops.regard.forward(*(getattr(args, name) for name in _NAMES))
    stats = natural_row_stats(row_stats.detach())
    lse = lse.masked_fill(stats.empty, 0)
    # l = exp(lse - m) has lost digits: the value comes from the kernel, the derivative from the lse
    return out, RowStats(stats.m, stats.l * torch.exp(lse - lse.detach()))


def _args(given: Sequence[Any]) -> KernelArgs:
    return KernelArgs(**dict(zip(_NAMES, given, strict=True)))


def _forward(*given: Any) -> Kept:
    args = _args(given)
    _check_shapes(tuple([(name, t.shape) for name, t in args.tensors().items()]), library().tile)
    args = _with_mask(args)
    results = _empty(args)
    if not filled_without_pairs(args, *results):
        library().run("regard_forward", arguments(args, *results))
    return results


def _with_mask(args: KernelArgs) -> KernelArgs:
    """The same call, its mask as these kernels read it, where it is a text."""
    if not args.mask_text:
        return args
    tensors = [t for t in (getattr(args, name) for name in MASK_TENSORS) if t is not None]
    shape = (*args.shape, args.k.shape[-2])
    mask = lower_text(args.mask_text, tensors, shape, args.k.shape[-3], library().tile)
    return replace(args, mask_text="", **dict.fromkeys(MASK_TENSORS), **mask)


def _empty(args: KernelArgs) -> Kept:
    return *empty_results(args), empty_row_stats(args)


@lru_cache(256)
def _check_shapes(shapes: tuple[tuple[str, torch.Size], ...], tile: tuple[int, int]) -> None:
    """ShapeError where operands are not of one call: the kernels would read beside them.

    A graph that was recorded without guards (make_fx) holds masks of the length that it was recorded for.
    """
    given = dict(shapes)
    *batch, heads, nq, width = given["q"]
    key_heads, nk, (rows, keys) = given["k"][-3], given["k"][-2], tile
    expected: dict[str, tuple[int, ...]] = {  # axes of size 1 are shared, but for the last
        "k": (*batch, key_heads, nk, width),
        "v": (*batch, key_heads, nk, given["v"][-1]),
        "allowed": (*batch, heads, nq, nk),
        **dict.fromkeys(("start", "stop"), (*batch, heads, nq, 1)),
        "tiles": (*batch, heads, -(-nq // rows), -(-nk // keys)),
        **dict.fromkeys(("q_at", "q_documents"), (*batch, nq)),
        **dict.fromkeys(("k_at", "k_documents"), (*batch, nk)),
        **dict.fromkeys(("shifts", "key_counts", "query_counts"), (*batch, 1)),
        "sink": (*batch, heads, 1, 1),
    }
    for modifier in MODIFIERS:
        expected |= modifier.shapes((*batch, heads, nq, nk), given)
    for name, own in shapes:
        shape = expected.get(name, tuple(own))
        fits = all(a in (1, b) for a, b in zip(own[::-1], shape[::-1], strict=False))
        if not fits or len(own) > len(shape) or (name in _EXACT and own[-1] != shape[-1]):
            raise ShapeError(
                f"regard::forward: {name} has shape {listed(own)}; q {listed(given['q'])} and k "
                f"{listed(given['k'])} need {listed(shape)}. A graph recorded by make_fx serves one shape; "
                "torch.export and torch.compile(dynamic=True) serve all."
            )
    if heads and (key_heads == 0 or heads % key_heads):
        raise ShapeError(f"regard::forward: k has {count_of(key_heads, 'head')}, q has {heads}; expected a multiple.")


def _backward(*arguments: Any) -> list[Tensor]:
    """GradientArguments in the order of LEARNED, of those that `wanted` names; nothing for the rest."""
    *own, out, lse, row_stats, dout, dlse, wanted = arguments
    args = _with_mask(_args(own))
    found = operand_gradients(args, (out, lse, row_stats), (dout, dlse), set(wanted.split()))
    return [_like(getattr(args, name), found[name]) if name in found else out.new_empty(0) for name in LEARNED]


def _like(operand: Tensor, g: Tensor) -> Tensor:
    """A gradient laid out as torch expects it; offsets have room for whole vectors at their end."""
    return torch.nn.functional.pad(g, (0, operand.shape[-1] - g.shape[-1])).to(operand.dtype).contiguous()


def _backward_fake(*arguments: Any) -> list[Tensor]:
    args, wanted = _args(arguments[:-6]), arguments[-1].split()
    operands = (getattr(args, name) for name in LEARNED)
    return [
        args.q.new_empty(0) if name not in wanted else torch.empty_like(t, memory_format=torch.contiguous_format)
        for name, t in zip(LEARNED, operands, strict=True)
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Kept) -> None:
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *output)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]


def _pull(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, row_stats = ctx.saved_tensors
    arguments = [number if t is None else t for number, t in zip(ctx.numbers, tensors, strict=True)]
    wanted = [name for name, need in zip(_NAMES, ctx.needs_input_grad, strict=True) if need]
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse

    def gradients(cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        found = torch.ops.regard.backward(*arguments, out, lse, row_stats, *cotangents, " ".join(wanted))
        given: dict[str, Tensor] = dict(zip(LEARNED, found, strict=True))
        return tuple(given[name] if name in wanted else None for name in _NAMES)

    return linear_in((dout, dlse), gradients)


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "regard::backward cannot be differentiated again in a graph or under a TorchDispatchMode; outside of both it "
        "can."
    )


torch.library.define("regard::forward", f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)")
torch.library.impl("regard::forward", "CPU", _forward)
torch.library.register_fake("regard::forward", lambda *arguments: _empty(_args(arguments)))
torch.library.register_autograd("regard::forward", _pull, setup_context=_keep)
_GIVEN = "Tensor out, Tensor lse, Tensor row_stats, Tensor dout, Tensor dlse, str wanted"
torch.library.define("regard::backward", f"({_SCHEMA}, {_GIVEN}) -> Tensor[]")
torch.library.impl("regard::backward", "CPU", _backward)
torch.library.register_fake("regard::backward", _backward_fake)
torch.library.register_autograd("regard::backward", _refuse)
