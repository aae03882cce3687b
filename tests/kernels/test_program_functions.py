"""The functions of programs in the native kernels (native/core/functions.h): errors in ulp, infinities and NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.core.region import Region

pytestmark = needs_kernels

Function = Callable[..., Tensor]
ROWS, BATCH = 64, 512  # numbers of a call: a query with a single key each


@dataclass(frozen=True)
class Slope(rg.Modifier):
    """fn(x, y) · s, whose derivative by s is fn(x, y) as the kernels compute it, to the last bit."""

    name: str
    x: Tensor
    y: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * value_of(self.name, at.pairs(self.x), at.pairs(self.y))


@dataclass(frozen=True)
class Class(rg.Modifier):
    """0 where fn(x, y) is finite, else 1 for infinity, 2 for minus infinity, 3 for NaN."""

    name: str
    x: Tensor
    y: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return class_of(value_of(self.name, at.pairs(self.x), at.pairs(self.y))) + 0 * s


def value_of(name: str, x: Tensor, y: Tensor) -> Tensor:
    return BINARY[name](x, y) if name in BINARY else UNARY[name](x)


def class_of(y: Tensor) -> Tensor:
    infinite = torch.where(y == -torch.inf, 2.0, 0.0)
    return torch.where(y != y, 3.0, torch.where(y == torch.inf, 1.0, infinite))


UNARY: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("sqrt", "exp", "log", "tanh", "sigmoid", "log1p", "expm1", "erf")},
    **{name: getattr(torch, name) for name in ("sin", "cos", "floor", "ceil", "abs", "sign", "neg", "exp2", "log2")},
    **{name: getattr(torch, name) for name in ("log10", "rsqrt", "reciprocal")},
    "silu": torch.nn.functional.silu,
}
BINARY: dict[str, Function] = {
    "pow": torch.pow,
    "remainder": torch.remainder,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "div": torch.div,
}
# How far a result is off at most, in units of its last place: docs/how-to/own.md says so.
ULP = {
    **dict.fromkeys(("floor", "ceil", "abs", "sign", "neg", "maximum", "minimum"), 0),
    **dict.fromkeys(("sqrt", "div", "reciprocal", "remainder"), 0.5),
    **dict.fromkeys(("log1p", "expm1", "erf", "sin", "cos", "pow"), 1),
    **dict.fromkeys(("log", "rsqrt"), 2),
    "tanh": 2.5,
    **dict.fromkeys(("exp2", "log2", "log10"), 3),
    **dict.fromkeys(("exp", "sigmoid"), 4),
    "silu": 5,
}
# The least result that is compared: the least normal number; below 2^-110 silu multiplies a number that is none.
LEAST = {"silu": 2.0**-110}
SPECIAL = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.5, 1e-30, 2.0**-126, 3.4028235e38, -3.4028235e38, 88.8, -104.5),
    *(torch.inf, -torch.inf, torch.nan),
)


def by_kernels(kind: type[Slope | Class], name: str, x: Tensor, y: Tensor) -> Tensor:
    """What the kernels compute of the numbers of x and y, (BATCH, 1, ROWS, 1)."""
    q, k = torch.zeros(BATCH, 1, ROWS, 1, requires_grad=True), torch.ones(BATCH, 1, 1, 1)
    score = rg.Dot() >> kind(name, x, y)
    state = rg.attention_state(q, k, k, score=score, positions=rg.head(ROWS, 1), backend=rg.Native())
    lse = state.finish()[1]
    if kind is Class:
        return lse.detach()[..., None].round()
    return torch.autograd.grad(lse.sum(), q)[0]


def spread(seed: int) -> Tensor:
    """Floats of any size: half of them random bits, half between -30 and 30."""
    random = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (BATCH // 2, 1, ROWS, 1), generator=random).int().view(torch.float32)
    near = torch.rand(BATCH // 2, 1, ROWS, 1, generator=random) * 60 - 30
    return torch.cat((bits.nan_to_num(0.0, 1.0, -1.0), near))


def errors(name: str) -> Tensor:
    """How far results are off that are normal numbers of float32, in units of their last place."""
    x, y = spread(0), spread(1)
    if name == "pow":
        x, y = x.abs(), torch.where(torch.arange(BATCH)[:, None, None, None] % 2 == 0, y, 3 * y.sign())
    found = by_kernels(Slope, name, x, y)
    right = value_of(name, x.double(), y.double())
    normal = (right.abs() >= LEAST.get(name, 2.0**-126)) & (right.abs() <= 3.4028234e38)
    off = (found.double() - right).abs() / 2.0 ** (right.abs().log2().floor() - 23)
    return off[normal & right.isfinite()]


@pytest.mark.parametrize("name", ULP)
def test_errors_in_ulp(isa: str, name: str) -> None:
    off = errors(name)
    assert off.numel() > 500
    assert off.max() <= ULP[name] + 0.001, f"off by {float(off.max()):.2f} ulp"


@pytest.mark.parametrize("name", ULP)
def test_infinities_and_nan_are_those_of_torch(isa: str, name: str) -> None:
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL))
    every = torch.zeros(BATCH * ROWS, 2)
    every[: len(pairs)] = pairs
    x, y = every.T.contiguous().view(2, BATCH, 1, ROWS, 1)
    # torch's remainder of float32 is NaN where the quotient overflows; that of float64 is the remainder
    right = value_of(name, x.double(), y.double()) if name == "remainder" else value_of(name, x, y)
    assert torch.equal(by_kernels(Class, name, x, y), class_of(right.float()))
