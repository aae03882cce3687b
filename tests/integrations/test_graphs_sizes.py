"""Functions of a person's in graphs that read sizes, or attributes that are no fields, or tensors that are learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.core.region import Region

pytestmark = [
    pytest.mark.full,  # torch's compiler takes seconds for each graph
    needs_kernels,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.compile follows no copy of a score before torch 2.13"),
]


@dataclass(frozen=True)
class ByLength(rg.Modifier):
    """Other scores for many keys than for few."""

    factor: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * 2 if at.frame.nk > 100 else s + at.heads(self.factor)


@dataclass(frozen=True)
class LogLength(rg.Modifier):
    """Qwen's factor for sequences that are longer than those of the training."""

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * max(1.0, math.log(max(at.frame.nk, 64), 64))


@dataclass(frozen=True)
class ShortTable(rg.Modifier):
    """A table of which no more than 32 distances are read."""

    table: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + self.table[(at.i - at.j).abs().clamp(max=min(self.table.shape[0], 32) - 1)]


CALLS: dict[str, tuple[Callable[[Tensor], rg.Modifier], list[tuple[int, int]]]] = {
    "a branch": (lambda t: ByLength(t[:4]), [(150, 40), (120, 40), (37, 40), (60, 40)]),
    "a logarithm": (lambda t: LogLength(), [(37, 40), (60, 40), (150, 40), (300, 40)]),
    "a short table": (ShortTable, [(37, 50), (60, 70), (61, 18), (62, 40)]),
    "a table that grows": (ShortTable, [(37, 16), (60, 18), (61, 50), (62, 70)]),
}


def close(got: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close([t.double() for t in got], list(right), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", CALLS)
def test_sizes_that_a_function_reads_are_those_of_each_call(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    made, sizes = CALLS[name]

    def call(x: Tensor, t: Tensor) -> Tensor:
        return rg.attention(x, x, x, score=rg.ScaledDot() >> made(t))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n, size in sizes:
        given = torch.randn(1, 4, n, 8, requires_grad=True), torch.randn(size, requires_grad=True)
        exact = [t.detach().double().requires_grad_() for t in given]
        got, right = (
            (out := run(x, t), *torch.autograd.grad(out.square().sum(), (x, t), materialize_grads=True))
            for run, x, t in ((compiled, *given), (call, *exact))
        )
        close(got, right)


@dataclass(frozen=True)
class ByPart(rg.Modifier):
    """Reads a size of what it is given, which is a part of the call."""

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * s.shape[-1] ** 0.1


def last_two(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j >= j.shape[-1] - 2


@pytest.mark.parametrize("how", [{"score": rg.ScaledDot() >> ByPart()}, {"mask": rg.Where(last_two)}])
def test_sizes_of_a_part_are_refused(how: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: rg.attention(x, x, x, **how), backend="aot_eager")
    with pytest.raises(rg.Unsupported, match=r"read at\.frame\.nq and at\.frame\.nk"):
        compiled(torch.randn(1, 2, 40, 8))


FULL: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True, "dynamic": True}


def test_as_many_heads_as_queries() -> None:
    """torch gives sizes that are equal one symbol, of which a guard then knows the value."""
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor) -> Tensor:
        return rg.attention(q, k, k, positions=rg.tail(3, 5))

    x = torch.randn(1, 5, 5, 4, dtype=torch.float64)
    given = x[..., :3, :].clone(), x
    torch.testing.assert_close(torch.compile(call, **FULL)(*given), call(*given))


def test_slopes_made_in_the_graph() -> None:
    torch._dynamo.reset()

    def call(x: Tensor) -> Tensor:
        return rg.attention(x, x, x, score=rg.ScaledDot() >> rg.Alibi(torch.full((4,), 0.5)))

    x = torch.randn(1, 4, 9, 8)
    torch.testing.assert_close(torch.compile(call, **FULL)(x), call(x))


@dataclass(frozen=True)
class Halved(rg.Modifier):
    """A modifier that computes an attribute, which is no field."""

    n: int
    rate: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", self.n * 0.5)

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * self.rate


@dataclass(frozen=True)
class Reached(rg.Mask):
    n: int
    reach: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "reach", self.n + 1)

    def visible(self, at: Region) -> Tensor:
        return (at.i - at.j).abs() <= self.reach


@pytest.mark.parametrize("inside", [True, False], ids=["made in the graph", "made outside"])
def test_attributes_that_are_no_fields(inside: bool) -> None:
    torch._dynamo.reset()
    modifier, mask = Halved(5), Reached(5)

    def call(x: Tensor) -> Tensor:
        own = (Halved(5), Reached(5)) if inside else (modifier, mask)
        return rg.attention(x, x, x, score=rg.ScaledDot() >> own[0], mask=own[1])

    x = torch.randn(1, 2, 40, 8)
    right = rg.attention(*[x.double()] * 3, score=rg.ScaledDot(2.5 * 8**-0.5), mask=rg.Window(6, 6))
    close((torch.compile(call, backend="aot_eager", fullgraph=True)(x),), (right,))


@dataclass(frozen=True)
class Nearer(rg.Mask):
    """Keys that are nearer than a float of their own."""

    reach: Tensor

    def visible(self, at: Region) -> Tensor:
        return (at.i - at.j).abs() <= at.keys(self.reach)


@pytest.mark.parametrize("score", [rg.ScaledDot(), rg.ScaledDot() >> LogLength()])
def test_a_mask_of_a_tensor_that_requires_a_gradient(score: rg.Score) -> None:
    """It has none, as outside of graphs: pairs are seen or not."""
    torch._dynamo.reset()

    def call(x: Tensor, reach: Tensor) -> Tensor:
        return rg.attention(x, x, x, score=score, mask=Nearer(reach))

    x, reach = torch.randn(1, 2, 40, 8, requires_grad=True), (torch.rand(40) * 9).requires_grad_()
    exact = x.detach().double().requires_grad_()
    got, right = (
        (out := run(y, reach), *torch.autograd.grad(out.square().sum(), (y, reach), materialize_grads=True))
        for run, y in ((torch.compile(call, backend="aot_eager", fullgraph=True), x), (call, exact))
    )
    close((*got[:2], got[2].double()), (*right[:2], right[2].double()))


@dataclass(frozen=True)
class Scaled(rg.Modifier):
    """A number that is computed of a learned one, for each head."""

    log: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * at.heads(self.log.exp())


def test_gradients_of_a_modifier_alone_beside_a_function() -> None:
    """The forward asks how many tensors the program with derivatives reads; it is the one that the backward finds."""
    torch._dynamo.reset()

    def call(x: Tensor, log: Tensor) -> Tensor:
        mask = rg.Where(lambda b, h, i, j: (i - j) % 3 == 0)
        return rg.attention(x, x, x, score=rg.ScaledDot() >> Scaled(log), mask=mask)

    x, log = torch.randn(2, 4, 40, 8), torch.randn(4, requires_grad=True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    got, right = (
        torch.autograd.grad(run(y, t).square().sum(), t)
        for run, y, t in ((compiled, x, log), (call, x.double(), log.detach().double().requires_grad_()))
    )
    close(got, right)


class Model(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rg.attention(x, x, x, score=rg.ScaledDot() >> HalfOf(), mask=Nearest())


@dataclass(frozen=True)
class HalfOf(rg.Modifier):
    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * 0.5


@dataclass(frozen=True)
class Nearest(rg.Mask):
    def visible(self, at: Region) -> Tensor:
        return (at.i - at.j).abs() % 5 < 2


def test_a_recording_forbids_no_length_of_an_export() -> None:
    torch._dynamo.reset()
    n = torch.export.Dim("n", min=2, max=512)
    exported = torch.export.export(Model(), (torch.randn(1, 2, 40, 8),), dynamic_shapes=({2: n},), strict=True).module()
    for length in (2, 3, 40):
        x = torch.randn(1, 2, length, 8)
        close((exported(x),), (Model()(x.double()),))
