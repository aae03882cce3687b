"""The native kernels as nodes of a graph, regard::forward and regard::backward, for torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.args import TEXTS, KernelArgs, kernel_args
from regard.backends.native.backward import LEARNED, Pair, operand_gradients
from regard.backends.native.call_operands import NUMBERS, OPERANDS
from regard.backends.native.ffi import library
from regard.backends.native.launch import (
    KernelResults,
    arguments,
    check_shapes,
    empty_in_graph,
    filled_without_pairs,
    natural_row_stats,
)
from regard.backends.native.lower_mask import MASK_TENSORS
from regard.backends.native.text_calls import forward_of_text, gradients_of_text, with_mask
from regard.core.cotangents import linear_in
from regard.core.state import RowStats

_TENSORS = (*OPERANDS, *MASK_TENSORS)  # that a call may have or not
_SYMBOLIC = tuple(name for name, number in NUMBERS.items() if number.in_graphs.startswith("Sym"))
_FIXED = tuple(name for name in NUMBERS if name not in _SYMBOLIC)  # one argument: torch takes no more than 64
_NAMES = ("q", "k", "v", *_TENSORS, *_SYMBOLIC, "numbers", "texts")
_SCHEMA = ", ".join(
    (
        *("Tensor q", "Tensor k", "Tensor v"),
        *(f"Tensor? {name}" for name in _TENSORS),
        *(f"{NUMBERS[name].in_graphs} {name}" for name in _SYMBOLIC),
        *("float[] numbers", "str texts"),
    )
)


def traced(args: KernelArgs) -> tuple[Tensor, RowStats]:
    """out (*batch, h, nq, dv) and the row statistics as one node, differentiable in each operand of floats."""
    out, lse, row_stats = torch.ops.regard.forward(*inputs_of(args))
    stats = natural_row_stats(row_stats.detach())
    lse = lse.masked_fill(stats.empty, 0)
    # l = exp(lse - m) has lost digits: the value comes from the kernel, the derivative from the lse
    return out, RowStats(stats.m, stats.l * torch.exp(lse - lse.detach()))


def inputs_of(args: KernelArgs) -> list[Any]:
    """What the operators are given, in the order of their schema."""
    tensors, symbolic = [args.operands.get(name) for name in _TENSORS], [args.number(name) for name in _SYMBOLIC]
    fixed = [float(args.number(name)) for name in _FIXED]
    return [args.q, args.k, args.v, *tensors, *symbolic, fixed, "\n".join([getattr(args, name) for name in TEXTS])]


def _args(given: Sequence[Any]) -> KernelArgs:
    named = dict(zip(_NAMES, given, strict=True))
    for name, number in zip(_FIXED, named.pop("numbers"), strict=True):
        named[name] = type(NUMBERS[name].default)(number)
    named |= zip(TEXTS, named.pop("texts").split("\n"), strict=True)  # JSON, whose strings have no line ends
    return kernel_args(named.pop("q"), named.pop("k"), named.pop("v"), named)


def _forward(*given: Any) -> KernelResults:
    args = _args(given)
    check_shapes(args)
    if args.score_text or args.similarity_text:
        return forward_of_text(args)
    args = with_mask(args)
    out, lse, row_stats = results = empty_in_graph(args)
    if not filled_without_pairs(args, out, lse, row_stats):
        library().run(arguments(args, out=out, lse=lse, row_stats=row_stats))
    return results


def _backward(*arguments: Any) -> list[Tensor]:
    """GradientArguments in the order of LEARNED, of those that `wanted` names; nothing for the rest."""
    *own, (out, lse, row_stats, dout, dlse), wanted = arguments
    args, names = _args(own), set(wanted.split())
    find = gradients_of_text if args.score_text or args.similarity_text else _gradients
    found = find(args, (out, lse, row_stats), (dout, dlse), names)
    return [_like(args.tensors()[name], found[name]) if name in found else out.new_empty(0) for name in LEARNED]


def _gradients(args: KernelArgs, saved: KernelResults, cotangents: Pair, wanted: set[str]) -> dict[str, Tensor]:
    return operand_gradients(with_mask(args), saved, cotangents, wanted)


def _like(operand: Tensor, g: Tensor) -> Tensor:
    """A gradient laid out as torch expects it; offsets have room for whole vectors at their end."""
    if operand.dim() == 0:
        return g.reshape(()).to(operand.dtype)
    return torch.nn.functional.pad(g, (0, operand.shape[-1] - g.shape[-1])).to(operand.dtype).contiguous()


def _backward_fake(*arguments: Any) -> list[Tensor]:
    args, wanted = _args(arguments[:-2]), arguments[-1].split()
    tensors = args.tensors()
    return [
        torch.empty_like(tensors[name], memory_format=torch.contiguous_format)
        if name in wanted
        else args.q.new_empty(0)
        for name in LEARNED
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: KernelResults) -> None:
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *output)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]


def _pull(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, row_stats = ctx.saved_tensors
    arguments = [number if t is None else t for number, t in zip(ctx.numbers, tensors, strict=True)]
    wanted = [name for name, need in zip(_NAMES, ctx.needs_input_grad, strict=True) if need]
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse

    def gradients(cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        found = torch.ops.regard.backward(*arguments, [out, lse, row_stats, *cotangents], " ".join(wanted))
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
torch.library.register_fake("regard::forward", lambda *arguments: empty_in_graph(_args(arguments)))
torch.library.register_autograd("regard::forward", _pull, setup_context=_keep)
_GIVEN = "Tensor[] given, str wanted"  # out, lse, row_stats, dout, dlse
torch.library.define("regard::backward", f"({_SCHEMA}, {_GIVEN}) -> Tensor[]")
torch.library.impl("regard::backward", "CPU", _backward)
torch.library.register_fake("regard::backward", _backward_fake)
torch.library.register_autograd("regard::backward", _refuse)
