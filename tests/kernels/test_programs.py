"""Modifiers that a person wrote, as programs that the native kernels interpret."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import regard as rg
from fact_checks import hold, looked
from kernel_checks import Placed, compare
from needed import needs_kernels
from regard import facts, testing
from regard.backends.native.backward import why_not_backward
from regard.backends.native.programs.lower import lower
from regard.backends.native.programs.operations import OPERATIONS
from regard.backends.native.programs.structure import graph_of
from regard.core.region import Frame, Region

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
    "keys in parts": testing.frame(nq=331, nk=701, batch=(1,), heads=6),
    "a row": testing.frame(nq=1, nk=149, batch=(2,), heads=6),
    "few rows": testing.frame(nq=3, nk=150, batch=(2,), heads=6),
}


@dataclass(frozen=True)
class Recency(rg.Modifier):
    rate: float

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + self.rate * at.j


@dataclass(frozen=True)
class Table(rg.Modifier):
    """A table by head and clamped distance, and a gate of tanh."""

    widths: Tensor
    table: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        ahead = at.i - at.j
        near = self.table[at.h, ahead.clamp(-7, 7) + 7]
        return torch.tanh(s * at.heads(self.widths)) + near - 0.01 * ahead.abs()


@dataclass(frozen=True)
class Grid(rg.Modifier):
    """Neighbours in a grid of 7 columns; others lie far away, or are hidden."""

    hidden: bool

    def modify(self, s: Tensor, at: Region) -> Tensor:
        rows, columns = at.i // 7 - at.j // 7, at.i % 7 - at.j % 7
        near = (rows.abs() <= 9) & (columns.abs() <= 2)
        return torch.where(near, s, -torch.inf) if self.hidden else torch.where(near, s, 0.5 * s - 3)


@dataclass(frozen=True)
class Functions(rg.Modifier):
    """One of each function of floats."""

    def modify(self, s: Tensor, at: Region) -> Tensor:
        a = s.sigmoid() + torch.erf(s) * s.cos() + (s * s + 1).sqrt() - (s.abs() + 0.5).log()
        b = torch.maximum(s, a).exp().clamp(max=9.0) + torch.remainder(s, 0.7) + s.sin().relu() + (s.abs() + 1) ** 1.5
        return 0.3 * a + 0.2 * b - torch.log1p(s.square()) + torch.expm1(-s.abs()) + (s > at.j / 100).float()


def modifiers(at: Frame) -> dict[str, rg.Score]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=random)

    table = Table(0.5 + normal(at.heads).abs(), normal(at.heads, 15))
    return {
        "recency": Recency(0.01),
        "a table": table,
        "a table after a cap, before a bias": rg.SoftCap(3.0) >> table >> rg.Bias(normal(at.nq, at.nk)),
        "a table before slopes": table >> rg.Alibi(normal(at.heads).abs()),
        "a grid": Grid(False),
        "functions": Functions(),
        "placed": Placed(normal(at.nq), normal(at.nk), normal(at.heads, at.nq, at.nk)),
    }


NAMES = list(modifiers(FRAMES["a row"]))


SIMILARITIES = {
    "ScaledDot": rg.ScaledDot(),
    "Additive": rg.Additive(None, None, torch.linspace(-0.5, 0.5, 24, dtype=torch.float64)),
    "Elementwise": rg.Elementwise(lambda q, k: -(q - k).abs() / 24),
}


def draw(size: str, name: str, mask: rg.Mask = rg.Window(90, 2), after: str = "ScaledDot") -> testing.Case:
    at = FRAMES[size]
    score = SIMILARITIES[after] >> modifiers(at)[name]
    return testing.draw(at, key_heads=3, dk=24, dv=19, score=score, mask=mask, sink=True)


@pytest.mark.parametrize("after", SIMILARITIES)
@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", NAMES)
def test_forward(isa: str, name: str, size: str, after: str) -> None:
    for mask in (rg.Window(90, 2), rg.Dilated(3)):
        case = draw(size, name, mask, after)
        assert rg.Native().why_not(case.leaves(torch.float32).problem, lse=True) is None
        compare(case)


@pytest.mark.parametrize("after", SIMILARITIES)
@pytest.mark.parametrize("size", ["blocks", "few rows", "keys in parts"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_queries_keys_and_values(isa: str, name: str, size: str, after: str) -> None:
    case = draw(size, name, after=after)
    problem = case.leaves(torch.float32).problem
    needs = (True, True, True, *(False for _ in problem.score.tensors()), True)
    assert why_not_backward(problem, needs) is None
    found = []
    for dtype, backend in ((torch.float32, rg.Native()), (torch.float64, rg.Reference())):
        q, k, v = (x.to(dtype).detach().requires_grad_() for x in (case.q.float(), case.k.float(), case.v.float()))
        score = case.score.with_tensors(iter([t.detach().to(dtype) for t in case.score.tensors()]))
        out = rg.attention(q, k, v, score=score, mask=case.mask, positions=case.positions, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for mine, right in zip(*found, strict=True):
        assert (mine - right).abs().max() <= 2e-5 * right.abs().max()


@pytest.mark.parametrize("name", ["a table", "a grid"])
def test_facts(isa: str, name: str) -> None:
    asked = (facts.MaxScore(), facts.Entropy(), facts.Received(), facts.Visible())
    case = draw("blocks", name)
    seen = looked(case.leaves(torch.float32), asked)
    assert {seen.way(fact) for fact in asked} == {"the native kernels"}
    hold(case, asked)


def test_pairs_that_a_program_hides(isa: str) -> None:
    for size in FRAMES:
        at = FRAMES[size]
        case = testing.draw(at, dk=24, dv=19, score=rg.ScaledDot() >> Grid(True)).leaves(torch.float32)
        given = {"score": case.score, "positions": case.positions}
        out = rg.attention(case.q, case.k, case.v, **given, backend=rg.Native())
        right = rg.attention(case.q.double(), case.k.double(), case.v.double(), **given, backend=rg.Reference())
        assert (out - right).abs().max() < 1e-5


@dataclass(frozen=True)
class Reads(rg.Modifier):
    """What no program can be."""

    what: str

    def modify(self, s: Tensor, at: Region) -> Tensor:
        match self.what:
            case "a sum":
                return s - s.mean(-1, keepdim=True)
            case "a number":
                return s * 2 if bool((s > 0).any()) else s
            case "in place":
                return s.mul_(2)
            case "beyond":
                return s + torch.arange(100.0)[(at.i - at.j).abs()]
            case _:
                return torch.special.bessel_j0(s)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("a sum", "no instruction for aten.mean.dim"),
        ("a number", "has several results"),
        ("in place", "writes into a tensor"),
        ("beyond", "indexes an axis of 100 by 0 to"),
        ("a function", "no instruction for aten.special_bessel_j0"),
    ],
)
def test_what_is_no_program_says_why(what: str, why: str) -> None:
    at = FRAMES["blocks"]
    case = testing.draw(at, score=rg.ScaledDot() >> Reads(what)).leaves(torch.float32)
    found = rg.Native().why_not(case.problem, lse=True)
    assert found is not None and why in found


def test_explain_describes_the_program() -> None:
    case = draw("blocks", "placed").leaves(torch.float32)
    plan = rg.explain(case.q, case.k, case.v, score=case.score, mask=case.mask, positions=case.positions)
    assert dict(plan.facts)["modifiers as"] == "a program of 8 instructions, which reads 3 tensors"
    x = torch.randn(1, 2, 5, 8)
    assert "modifiers as" not in dict(rg.explain(x, x, x, score=rg.ScaledDot() >> rg.SoftCap(9.0)).facts)


def test_another_length_and_other_numbers_are_read_anew() -> None:
    for nq in (5, 83, 40):
        for seed in (0, 1):
            torch.manual_seed(seed)
            at = testing.frame(nq=nq, nk=nq, batch=(2,), heads=6)
            compare(testing.draw(at, dk=24, score=rg.ScaledDot() >> modifiers(at)["placed"]))


def test_a_tensor_changed_in_place_is_read_anew() -> None:
    q = torch.randn(1, 2, 40, 8)
    score = rg.ScaledDot() >> Table(torch.ones(2), torch.zeros(2, 15))
    first = rg.attention(q, q, q, score=score)
    score.stages[1].table.normal_()
    again = rg.attention(q, q, q, score=score)
    right = rg.attention(q, q, q, score=score, backend=rg.Reference())
    assert (again - right).abs().max() < 1e-5 < (first - again).abs().max()


def test_plans_do_not_keep_what_a_modifier_computed() -> None:
    q, k = torch.randn(2, 6, 1, 16), torch.randn(2, 6, 100, 16)
    for nk in (100, 60, 100):
        given = {"score": rg.ScaledDot() >> Recency(0.1), "positions": rg.tail(1, nk)}
        out = rg.attention(q, k[..., :nk, :], k[..., :nk, :], **given)
        right = rg.attention(q, k[..., :nk, :], k[..., :nk, :], **given, backend=rg.Reference())
        assert (out - right).abs().max() < 1e-5


def test_half_precision(isa: str) -> None:
    for size in FRAMES:
        compare(replace(draw(size, "a table"), sink=None), torch.bfloat16)


def test_rows_of_a_program_are_kept() -> None:
    at = FRAMES["blocks"]
    table = Table(torch.ones(at.heads), torch.zeros(at.heads, 15))
    graph = graph_of((table,), at)
    first, again = (lower(graph, at, table.tensors(), (False, False)) for _ in range(2))
    learned = lower(graph, at, table.tensors(), (False, True))
    assert first.rows is again.rows and len(learned.rows) > len(first.rows)
    assert all(torch.equal(a, b) for a, b in zip(first.operands, again.operands, strict=True))


@dataclass(frozen=True)
class Remainder(rg.Modifier):
    of: int

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + 0.02 * ((at.row - at.col) % self.of)


@pytest.mark.parametrize(("of", "divides"), [(1, False), (4, False), (256, False), (6, True), (-4, True)])
def test_a_remainder_of_a_power_of_two_needs_no_division(isa: str, of: int, divides: bool) -> None:
    """Of negative numbers too: most differences are."""
    at = FRAMES["blocks"]
    rows = lower(graph_of((Remainder(of),), at), at, (), ()).rows
    assert ("INT_DIV" in {OPERATIONS[op] for op in rows[:, 0].tolist()}) == divides
    q, k = torch.randn(1, 40, 8), torch.randn(1, 300, 8)
    score = rg.ScaledDot() >> Remainder(of)
    given = {"score": score, "positions": rg.head(40, 300)}
    found, right = (rg.attention(q, k, k, **given, backend=b) for b in (rg.Native(), rg.Reference()))
    torch.testing.assert_close(found, right)


@dataclass(frozen=True)
class Divided(rg.Modifier):
    by: float

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return (s / self.by).tanh()


@pytest.mark.parametrize(("by", "divides"), [(8.0, False), (-0.25, False), (2.0**-126, False), (3.0, True)])
def test_a_power_of_two_divides_as_a_product(isa: str, by: float, divides: bool) -> None:
    at = FRAMES["blocks"]
    rows = lower(graph_of((Divided(by),), at), at, (), (False,)).rows
    assert ("DIV" in {OPERATIONS[op] for op in rows[:, 0].tolist()}) == divides
    q, k = torch.randn(1, 40, 8, requires_grad=True), torch.randn(1, 300, 8)
    given = {"score": rg.ScaledDot() >> Divided(by), "positions": rg.head(40, 300)}
    found, right = (rg.attention(q, k, k, **given, backend=b) for b in (rg.Native(), rg.Reference()))
    torch.testing.assert_close(found, right)
    gradients = [torch.autograd.grad(out.sum(), q)[0] for out in (found, right)]
    if abs(by) > 0.1:  # s, divided by less, is infinite
        torch.testing.assert_close(*gradients)


@dataclass(frozen=True)
class Read(rg.Modifier):
    """Multiplies by a number that it reads from its tensor in some way."""

    way: Callable[[Tensor], float]
    factors: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * self.way(self.factors)


@pytest.mark.parametrize(
    "way", [lambda t: t.tolist()[0], lambda t: float(t.detach().numpy()[0]), lambda t: float(np.asarray(t.detach())[0])]
)
def test_numbers_that_a_modifier_reads_are_those_of_each_call(way: Callable[[Tensor], float]) -> None:
    q = torch.randn(1, 2, 20, 8)
    for factor in (1.0, 3.0):
        score = rg.Dot() >> Read(way, torch.tensor([factor, 2.0]))
        found, right = (rg.attention(q, q, q, score=score, backend=backend) for backend in (None, rg.Reference()))
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
