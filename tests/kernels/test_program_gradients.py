"""Gradients of the tensors that a modifier holds, where the native kernels run it as a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from kernel_checks import check
from needed import needs_kernels
from regard import testing
from regard.backends.native.backward import why_not_backward
from regard.core.region import Frame, Region

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
    "keys in parts": testing.frame(nq=331, nk=701, batch=(1,), heads=6),
    "few rows": testing.frame(nq=3, nk=150, batch=(2,), heads=6),
    "whole blocks": testing.frame(nq=128, nk=256, batch=(2, 1), heads=6),
}


@dataclass(frozen=True)
class Held(rg.Modifier):
    """A modifier by name, and the tensor that it learns."""

    name: str
    t: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return MODIFY[self.name](s, at, self.t)


def by_distance(s: Tensor, at: Region, table: Tensor) -> Tensor:
    return s + table[at.h, (at.i - at.j).clamp(-7, 7) + 7]


def chosen_logarithm(s: Tensor, at: Region, rate: Tensor) -> Tensor:
    ahead = at.i - at.j
    return torch.where(ahead > 0, s - at.heads(rate).abs() * ahead.log(), s)


MODIFY: dict[str, Callable[[Tensor, Region, Tensor], Tensor]] = {
    "a table by head and distance": by_distance,
    "a table that is read twice": lambda s, at, t: s + t[at.i % 5] * torch.tanh(t[at.j % 7]),
    "a large table": lambda s, at, t: s + 0.5 * t[at.h, at.i % 150, at.j % 150].tanh(),
    "a number a head": lambda s, at, t: (s * at.heads(t)).tanh() * 3,
    "a number": lambda s, at, t: s - t * 0.02 * (at.i - at.j).abs(),
    "a number times keys": lambda s, at, t: s + t * 0.01 * at.j,
    "a number that is a power": lambda s, at, t: s.sigmoid() ** t.exp(),
    "a number a sequence": lambda s, at, t: s * at.sequences(t).sigmoid(),
    "a number a query": lambda s, at, t: s * at.queries(t),
    "a number a key": lambda s, at, t: s.tanh() + at.keys(t).clamp(-1, 0.5),
    "a number a key and head": lambda s, at, t: s + at.pairs(t).square(),
    "a number a pair": lambda s, at, t: s * (1 + 0.1 * at.pairs(t)),
    "a number a pair and head": lambda s, at, t: torch.maximum(s, at.pairs(t)),
    "a logarithm in a branch": chosen_logarithm,
    "a mean of numbers": lambda s, at, t: s * (t.softmax(0).square().sum() + t.mean()),
}


def modifier(name: str, at: Frame) -> Held:
    shape = {
        "a table by head and distance": (at.heads, 15),
        "a table that is read twice": (9,),
        "a large table": (at.heads, 150, 150),
        "a number a head": (at.heads,),
        "a number a sequence": at.batch,
        "a number a query": (at.nq,),
        "a number a key": (at.nk,),
        "a number a key and head": (at.heads, 1, at.nk),
        "a number a pair": (at.nq, at.nk),
        "a number a pair and head": (at.heads, at.nq, at.nk),
        "a logarithm in a branch": (at.heads,),
        "a mean of numbers": (11,),
    }.get(name, ())
    return Held(name, torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def draw(size: str, score: rg.Score) -> testing.Case:
    torch.manual_seed(0)
    return testing.draw(FRAMES[size], key_heads=3, dk=24, dv=19, score=score, mask=rg.Window(90, 2), sink=True)


def check_in_kernels(case: testing.Case, dtype: torch.dtype = torch.float32) -> None:
    problem = case.leaves(dtype).problem
    assert why_not_backward(problem, tuple(True for _ in problem.tensors())) is None
    check(case, dtype)


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", MODIFY)
def test_gradients_of_what_is_held(isa: str, name: str, size: str) -> None:
    if name == "a logarithm in a branch":
        return check_chosen(size)
    check_in_kernels(draw(size, rg.ScaledDot() >> modifier(name, FRAMES[size])))


def check_chosen(size: str) -> None:
    """PyTorch has NaN there, of 0 times infinity: the right gradient is that of a logarithm that stays finite."""
    case, held = draw(size, rg.ScaledDot()), modifier("a logarithm in a branch", FRAMES[size])

    def gradient(dtype: torch.dtype, score: Callable[[Tensor], rg.Score], backend: rg.Backend) -> Tensor:
        t = held.t.to(dtype).requires_grad_()
        q, k, v = (x.float().to(dtype) for x in (case.q, case.k, case.v))
        given = {"mask": case.mask, "positions": case.positions, "backend": backend}
        out = rg.attention(q, k, v, score=rg.ScaledDot() >> score(t), **given)
        return torch.autograd.grad(out.square().sum(), t)[0]

    found = gradient(torch.float32, lambda t: Held(held.name, t), rg.Native())
    right, plain = (gradient(dtype, FiniteLogarithm, rg.Reference()) for dtype in (torch.float64, torch.float32))
    assert testing.error(found, right) <= testing.tolerance(right, plain)


@dataclass(frozen=True)
class FiniteLogarithm(rg.Modifier):
    rate: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s - at.heads(self.rate).abs() * (at.i - at.j).clamp(min=1).log()


@pytest.mark.parametrize("size", ["blocks", "whole blocks"])
@pytest.mark.parametrize("name", ["a table by head and distance", "a number a head", "a number a pair and head"])
def test_half_precision(isa: str, name: str, size: str) -> None:
    check_in_kernels(draw(size, rg.ScaledDot() >> modifier(name, FRAMES[size])), torch.bfloat16)


def test_modifiers_of_regard_in_a_program(isa: str) -> None:
    at = FRAMES["blocks"]
    table = modifier("a table by head and distance", at)
    bias, slopes = torch.randn(at.nq, at.nk, dtype=torch.float64), torch.rand(at.heads, dtype=torch.float64)
    check_in_kernels(draw("blocks", rg.ScaledDot() >> rg.SoftCap(3.0) >> table >> rg.Bias(bias) >> rg.Alibi(slopes)))


def test_a_program_without_pairs() -> None:
    t = torch.ones(2, 15, requires_grad=True)
    x = torch.randn(1, 2, 0, 8, requires_grad=True)
    score = rg.ScaledDot() >> Held("a table by head and distance", t)
    out = rg.attention(x, x, x, score=score, backend=rg.Native())
    assert torch.equal(torch.autograd.grad(out.sum(), t)[0], torch.zeros(2, 15))


def test_some_of_the_tensors() -> None:
    """Each subset of gradients has the numbers that all together have."""
    at = FRAMES["blocks"]
    case = draw("blocks", rg.ScaledDot() >> modifier("a number a head", at) >> modifier("a number a key", at))
    tensors = [t.float() for t in case.score.tensors()]

    def gradients(wanted: tuple[int, ...]) -> tuple[Tensor, ...]:
        own = [t.clone().requires_grad_(n in wanted) for n, t in enumerate(tensors)]
        score = case.score.with_tensors(iter(own))
        given = {"score": score, "mask": case.mask, "positions": case.positions, "backend": rg.Native()}
        out = rg.attention(case.q.float(), case.k.float(), case.v.float(), **given)
        return torch.autograd.grad(out.square().sum(), [own[n] for n in wanted])

    both = gradients((0, 1))
    for n in (0, 1):
        (alone,) = gradients((n,))
        assert torch.allclose(alone, both[n], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["a table by head and distance", "a number", "a number a key", "a number a sequence"])
def test_the_same_bits_for_any_number_of_threads(isa: str, name: str) -> None:
    case = draw("keys in parts", rg.ScaledDot() >> modifier(name, FRAMES["keys in parts"]))
    before, found = torch.get_num_threads(), list[Tensor]()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            one = case.leaves(torch.float32)
            given = {"score": one.score, "mask": one.mask, "positions": one.positions, "backend": rg.Native()}
            out = rg.attention(one.q, one.k, one.v, **given)
            found.append(torch.autograd.grad(out.square().sum(), one.score.tensors())[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
