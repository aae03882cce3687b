"""W_Q, W_K and W_V of each head, found by comparing what a model's modules make with the q, k and v of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from regard.call.hooks import AttentionCall
from regard.core.errors import Unsupported
from regard.core.shapes import listed
from regard.core.value import with_shapes
from regard.inspect.facts.inputs import CallFact
from regard.inspect.heads.projections import inside, matrix
from regard.inspect.heads.unembedding import NormCall
from regard.inspect.record import record
from regard.scores.similarity import Dot, ScaledDot

TOLERANCE = 0.01  # of the largest: how well the columns of a module's output must be the q, k or v of the call


@dataclass(frozen=True, eq=False)
class InputProjections:
    """The matrices that make the queries, keys and values of one attention call from the residual stream.

    w_v       (h, d, dv), float64: of each query head, the gain of the norm before it folded in; key heads repeated
    w_q, w_k  (h, d, dk) likewise; None where they are not known: see why_not
    why_not   why queries and keys are no product of a matrix and the stream (normalised, of another score)
    """

    w_v: Tensor
    w_q: Tensor | None = None
    w_k: Tensor | None = None
    why_not: str | None = None

    def __repr__(self) -> str:
        return with_shapes("InputProjections", vars(self))


class _Made(NamedTuple):
    """A module with a matrix, with what it was given, (n, d), and what it made of it, (n, out)."""

    module: nn.Module
    given: Tensor
    out: Tensor


def find_input_projections(model: nn.Module, run: Callable[[], object]) -> tuple[InputProjections, ...]:
    """The matrices behind each attention call that `run` makes, in the order of the calls.

    They are looked for among the modules with a matrix that ran inside the attention layer since the call before.
    Columns of a module's output must be the values, and at position 0, where rotary positions turn nothing, the queries
    and the keys, up to a factor. Known orders of columns: one module each; queries, keys and values in three blocks
    (GPT-2, Phi-3); or side by side for each head (GPT-NeoX) or group of heads (Falcon). Raises Unsupported where the
    values are not found so.
    """
    names = {id(module): path for path, module in model.named_modules()}
    made: list[_Made] = []
    norms: list[NormCall] = []
    ran: list[tuple[list[_Made], list[NormCall]]] = []  # before each call: the modules that ran, the last norms

    def collect() -> None:
        if len(tape) > len(ran):
            ran.append(([one for one in made if inside(names[id(one.module)], tape.calls[-1].name)], list(norms)))
            made.clear()

    def before(module: nn.Module, inputs: Any) -> None:
        collect()

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        given = inputs[0] if inputs else None
        if not isinstance(given, Tensor) or not isinstance(output, Tensor) or id(module) not in names:
            return
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and given.shape == output.shape:
            norms[:] = [*norms[-3:], NormCall(module, given.flatten(0, -2), output.flatten(0, -2), frozenset())]
        elif isinstance(weight, Tensor) and weight.dim() == 2 and given.is_floating_point():
            made.append(_Made(module, given.flatten(0, -2), output.flatten(0, -2)))

    whole = _Whole()
    with record(model, facts=(whole,)) as tape:
        hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after)
        try:
            run()
            collect()
        finally:
            for hook in hooks:
                hook.remove()
    return tuple(_matched(call[whole], call.name, *before_it) for call, before_it in zip(tape.calls, ran, strict=True))


@dataclass(frozen=True)
class _Whole(CallFact[AttentionCall]):
    """A call as it is, v included."""

    def of_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        return call


def _matched(call: AttentionCall, name: str, made: list[_Made], norms: list[NormCall]) -> InputProjections:
    """The matrices of one call, from the modules that ran before it."""
    if call.v is None or call.q.dim() != 4:
        raise Unsupported(f"the values of {name} are not known; expected a layer of regard.nn or of transformers.")
    heads, q, k, v = call.q.shape[1], call.q[0], call.k[0], call.v[0]
    sizes = _Sizes(heads, len(k), q.shape[-1], v.shape[-1])
    w_v = _found(made, norms, sizes, "v", v, name)
    if w_v is None:
        raise Unsupported(
            f"no module of {name} makes its values, {listed(v.shape)}, from the residual stream by one matrix: they "
            "are made in several steps (latent attention) or changed afterwards."
        )
    similarity = call.score.stages[0]
    if not isinstance(similarity, (ScaledDot, Dot)):
        return InputProjections(w_v, why_not=f"{name} compares by {similarity!r}, not by the product of q and k")
    w_q, w_k = (_found(made, norms, sizes, which, t[:, :1], name) for which, t in (("q", q), ("k", k)))
    if w_q is None or w_k is None:
        why = f"the queries or keys of {name} are not made by one matrix each: they are normalised, or made in steps"
        return InputProjections(w_v, why_not=why)
    return InputProjections(w_v, w_q, w_k)


class _Sizes(NamedTuple):
    """Query heads, key heads, the widths of a key and of a value."""

    heads: int
    key_heads: int
    dk: int
    dv: int

    def columns(self, which: str, width: int) -> Iterator[Tensor]:
        """Where q, k or v may stand in the output of a module: (heads of it, dk or dv) of so many columns."""
        q, k, v = self.heads * self.dk, self.key_heads * self.dk, self.key_heads * self.dv
        each, start = {"q": (self.heads, 0), "k": (self.key_heads, q), "v": (self.key_heads, q + k)}[which]
        size = self.dv if which == "v" else self.dk
        every = torch.arange(width, dtype=torch.int64, device="cpu")
        if width == each * size:
            yield every.reshape(each, size)
        if width == q + k + v:
            yield every[start : start + each * size].reshape(each, size)
            group = q // self.key_heads  # a key head's queries, its key and its value
            begin = {"q": 0, "k": group, "v": group + self.dk}[which]
            count = group if which == "q" else size
            yield every.reshape(self.key_heads, -1)[:, begin : begin + count].reshape(each, size)


def _found(
    made: list[_Made], norms: list[NormCall], sizes: _Sizes, which: str, wanted: Tensor, name: str
) -> Tensor | None:
    """The matrix (h, d, width), norm folded in, of the module whose output holds `wanted` (heads, rows, width)."""
    rows = wanted.shape[-2]
    for one in made:
        for columns in sizes.columns(which, one.out.shape[-1]):
            there = one.out[:rows, columns.to(one.out.device)].transpose(0, 1).double()
            if not _proportional(wanted.double(), there):
                continue
            of_heads = matrix(one.module, name)[:, columns.to(one.out.device)].double().permute(1, 2, 0)
            norm = next((norm for norm in norms if norm.made.data_ptr() == one.given.data_ptr()), None)
            folded = of_heads if norm is None else norm.folded(of_heads)
            return folded.transpose(1, 2).repeat_interleave(sizes.heads // len(columns), 0)
    return None


def _proportional(wanted: Tensor, there: Tensor) -> bool:
    """Whether one is the other times a number above 0, but for rounding."""
    scale = (wanted * there).sum() / there.square().sum()
    off = (wanted - scale * there).abs().max()
    return bool(scale > 0) and bool(off <= TOLERANCE * wanted.abs().max())
