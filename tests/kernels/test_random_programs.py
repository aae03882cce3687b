"""Random programs in the native kernels: values and gradients, within what float32 and their condition allow."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.native.ffi import runnable
from regard.core.errors import Unsupported
from regard.core.region import Region

pytestmark = needs_kernels

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "sin": torch.sin,
    "neg": torch.neg,
    "square": torch.square,
    "floor": torch.floor,
    "relu": torch.relu,
    "exp of clamp": lambda x: x.clamp(-3, 2).exp(),
    "log1p of abs": lambda x: x.abs().log1p(),
    "root of relu": lambda x: x.relu().sqrt(),
    "erf": torch.erf,
    "expm1 of minimum": lambda x: torch.expm1(torch.minimum(x, torch.ones_like(x))),
    "cos": torch.cos,
    "detach": torch.detach,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "quotient": lambda a, b: a / (1 + b.abs()),
    "remainder": lambda a, b: torch.remainder(a, 1 + b * b),
    "power": lambda a, b: (a.abs() + 0.5) ** b.tanh(),
    "where": lambda a, b: torch.where(a < b, a, 0.5 * b),
}
FEW_ULP = 2.0**-23


@dataclass(frozen=True)
class Random(rg.Modifier):
    """Operations on a stack of numbers of a pair.

    by_query, by_key, by_head: numbers that it reads, which are learned
    noise: of one rounding, times a normal number, by which every step is off: how far the result then is off shows the
    condition of the program, its jumps included.
    """

    steps: tuple[tuple[str, int], ...]
    by_query: Tensor
    by_key: Tensor
    by_head: Tensor
    noise: float = 0.0

    def modify(self, s: Tensor, at: Region) -> Tensor:
        s = s + self._noise(s) * (s.detach().abs() + 1)  # a dot product is off by some roundings of its terms
        stack: list[Tensor] = [s, 0.1 * (at.i - at.j), (1.0 + at.h) / 4, s + at.j % 5]
        by_query, by_key, by_head = self._numbers(at)
        stack += [by_query * s, by_key + s, by_head - s]
        for name, n in self.steps:
            a, b = stack[n % len(stack)], stack[-1]
            made = BINARY[name](a, b) if name in BINARY else UNARY[name](a)
            made = torch.where(at.i % 3 == 0, made, b) if n % 4 == 0 else made
            stack.append(made * (1 + self._noise(made)))
        return stack[-1].tanh() + s

    def _numbers(self, at: Region) -> tuple[Tensor, Tensor, Tensor]:
        return at.queries(self.by_query), at.keys(self.by_key), at.heads(self.by_head)

    def _noise(self, x: Tensor) -> Tensor | float:
        return self.noise * torch.randn_like(x) if self.noise else 0.0


class OfPairs(Random):
    """The same with numbers that each pair has for itself: their gradients are what sums consist of."""

    def _numbers(self, at: Region) -> tuple[Tensor, Tensor, Tensor]:
        return at.pairs(self.by_query), at.pairs(self.by_key), at.pairs(self.by_head)


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: those of blocks by vectors, of a few rows, of keys in parts."""

    nq: int
    nk: int


def results(
    shape: Shape, modifier: Random, dtype: torch.dtype, backend: rg.Backend | None, each_pair: bool = False
) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k, v and what the modifier reads, of sums or each_pair."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8).to(dtype).requires_grad_() for n in (shape.nq, shape.nk, shape.nk))
    by_query, by_key, by_head = (torch.randn(n).to(dtype) for n in (shape.nq, shape.nk, 2))
    held = [by_query, by_key, by_head]
    if each_pair:
        held = [t.expand(2, shape.nq, shape.nk).clone() for t in (by_query[:, None], by_key, by_head[:, None, None])]
    held = [t.requires_grad_() for t in held]
    score = rg.ScaledDot() >> replace(modifier, by_query=held[0], by_key=held[1], by_head=held[2])
    positions = rg.tail(shape.nq, shape.nk)
    out = rg.attention(q, k, v, score=score, mask=rg.Window(90, 2), positions=positions, backend=backend)
    cotangent = torch.randn(out.shape).to(dtype)
    return out.detach(), *torch.autograd.grad(out, (q, k, v, *held), cotangent, materialize_grads=True)


def absolute_sums(shape: Shape, modifier: Random) -> tuple[Tensor, ...]:
    """Of each gradient of what the modifier reads, the sum of its absolute terms. They may nearly cancel."""
    own = OfPairs(modifier.steps, modifier.by_query, modifier.by_key, modifier.by_head)
    *_, by_query, by_key, by_head = results(shape, own, torch.float64, rg.Reference(), each_pair=True)
    return by_query.abs().sum((0, 2)), by_key.abs().sum((0, 1)), by_head.abs().sum((1, 2))


STEPS = st.lists(st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 40)), max_size=30)


ISAS = runnable() or ("",)
CANCELLING = [("add", 0), ("sigmoid", 7), ("tanh", 1), ("tanh", 8)]  # the terms of the gradient by head


@example(CANCELLING, Shape(3, 131), ISAS[0])
@given(STEPS, st.sampled_from([Shape(70, 131), Shape(3, 131)]), st.sampled_from(ISAS))
def test_values_and_gradients(steps: list[tuple[str, int]], shape: Shape, isa: str) -> None:
    check_program(tuple(steps), shape, isa)


def check_program(steps: tuple[tuple[str, int], ...], shape: Shape, isa: str) -> None:
    modifier = Random(steps, *(torch.zeros(n) for n in (shape.nq, shape.nk, 2)))
    with mock.patch.dict(os.environ, REGARD_ISA=isa):
        try:
            found = results(shape, modifier, torch.float32, rg.Native())
        except Unsupported as error:
            assume("numbers of a pair at once" not in str(error))
            raise
    right = results(shape, modifier, torch.float64, rg.Reference())
    noisy = replace(modifier, noise=FEW_ULP)
    others = [results(shape, noisy, torch.float64, rg.Reference()) for _ in range(3)]
    plain = results(shape, modifier, torch.float32, rg.Reference())
    rounded = [0.0] * 4 + [FEW_ULP * testing.error(t, torch.zeros_like(t)) for t in absolute_sums(shape, modifier)]
    for n, name in enumerate(("output", "q", "k", "v", "numbers by query", "numbers by key", "numbers by head")):
        noise = (2 * testing.error(one[n], right[n]) for one in others)
        usual = max(testing.tolerance(right[n], plain[n]), *noise, rounded[n])
        off = testing.error(found[n], right[n])
        assert off <= usual, f"{name} is off by {off:.2e}; allowed {usual:.2e}"
