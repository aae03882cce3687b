"""Instructions of programs that follow from i - j alone: they run once for each distance, where positions count up."""

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
from regard.backends.native.programs.lower import lower, lower_mask_graph
from regard.backends.native.programs.operations import OPERATIONS
from regard.backends.native.programs.structure import graph_of, graph_of_mask
from regard.core.region import Frame, Region

pytestmark = needs_kernels

Fn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of s, h, i, j
SLOPES = torch.tensor([0.5, 0.25, -0.125, 0.0625])
TABLE = torch.linspace(-2, 2, 4 * 700).reshape(4, 700).sin()


def ten(s: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    near = (i - j).abs()
    s = 8.0 * torch.tanh((s - 0.01 * near) / 8.0)
    return torch.where(near % 4 == 0, s, s * 0.5)


def two_differences(s: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + torch.where(i >= j, (i - j) * 0.01, (j - i) // 3 * -0.5) * SLOPES[h]


def many(s: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """More numbers of distances are held at once than the kernels have tables for."""
    powers = [((i - j) * 0.01 * n).sigmoid() for n in range(1, 12)]
    for one in powers:
        s = s * one
    for one in reversed(powers):
        s = s + one
    return s


FUNCTIONS: dict[str, Fn] = {
    "ten operations": ten,
    "slopes": lambda s, h, i, j: s + SLOPES[h] * (j - i),
    "a table": lambda s, h, i, j: s + TABLE[h, (i - j).clamp(-300, 300) + 350],
    "two differences": two_differences,
    "a position besides": lambda s, h, i, j: s + (i - j).abs() * 0.1 - torch.where(s > 0, j, 0) * 0.01,
    "nothing else": lambda s, h, i, j: (i - j).abs() * -0.1 + 0 * s,
    "many": many,
}


@dataclass(frozen=True)
class Of(rg.Modifier):
    """A function of a pair; apart: with positions of keys that seem to follow from the score: then all is by pair."""

    name: str
    apart: bool = False

    def modify(self, s: Tensor, at: Region) -> Tensor:
        j = torch.where(s == s, at.j, at.j) if self.apart else at.j
        return FUNCTIONS[self.name](s, at.h, at.i, j)


LENGTHS = {"blocks": (151, 331), "one block": (17, 149), "long": (200, 200), "few keys": (150, 7), "few rows": (3, 300)}
POSITIONS: dict[str, Callable[[int, int], rg.Positions]] = {
    "ends": rg.tail,
    "beginnings": rg.head,
    "far": lambda nq, nk: rg.Positions(torch.arange(nq) + 10**6, torch.arange(nk) + 10**6 - 40),
    "gaps": lambda nq, nk: rg.Positions(torch.arange(nq) * 2, torch.arange(nk) * 3),
    "one gap of a query": lambda nq, nk: rg.Positions(
        torch.arange(nq) + (torch.arange(nq) > nq // 2), torch.arange(nk)
    ),
    "one gap of a key": lambda nq, nk: rg.Positions(torch.arange(nq), torch.arange(nk) + 2 * (torch.arange(nk) > 140)),
    "backwards": lambda nq, nk: rg.Positions(torch.arange(nq), torch.arange(nk).flip(0)),
    "of each sequence": lambda nq, nk: rg.Positions(
        torch.arange(nq) + torch.tensor([[0], [5]]), torch.arange(nk) + torch.tensor([[3], [0]])
    ),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bits_are_those_of_pairs(name: str, lengths: str, positions: str, isa: str) -> None:
    nq, nk = LENGTHS[lengths]
    given = [torch.randn(2, 4, n, 16, requires_grad=True) for n in (nq, nk, nk)]
    results: list[list[Tensor]] = []
    for apart in (False, True):
        score = rg.ScaledDot() >> Of(name, apart)
        out = rg.attention(*given, score=score, positions=POSITIONS[positions](nq, nk), backend=rg.Native())
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), given)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def case_of(nq: int, nk: int, modifier: rg.Modifier) -> testing.Case:
    q, k, v = (torch.randn(2, 4, n, 16) for n in (nq, nk, nk))
    return testing.Case(q, k, v, score=rg.ScaledDot() >> modifier, positions=rg.tail(nq, nk))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("lengths", ["blocks", "long"])
def test_the_definition(name: str, lengths: str, isa: str) -> None:
    check(case_of(*LENGTHS[lengths], Of(name)))


INDICES: dict[str, Callable[[Region], Tensor]] = {
    "distances": lambda at: at.i - at.j + 350,
    "clamped": lambda at: (at.i - at.j).clamp(-20, 30) + 20,
    "one": lambda at: 0 * (at.i - at.j) + 3,
    "also the key": lambda at: (at.i - at.j + 350) // (1 + at.j % 2),
}


@dataclass(frozen=True)
class Learned(rg.Modifier):
    """A table by distance, whose gradient is summed along the diagonals of tiles, and one that is not."""

    table: Tensor
    index: str

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + self.table[at.h, INDICES[self.index](at)] * 0.5


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("lengths", ["blocks", "one block", "long", "few keys"])
def test_the_gradient_of_a_table(lengths: str, index: str, isa: str) -> None:
    check(case_of(*LENGTHS[lengths], Learned(torch.randn(4, 700), index)))


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dilated": lambda i, j: ((i - j) % 5 == 0) & (i >= j),
    "window of both ends": lambda i, j: ((i - j) < 40) & ((j - i) < 3) | (i == j),
    "a key besides": lambda i, j: ((i - j) % 7 < 3) & (j % 2 == 0),
    "steps": lambda i, j: (i - j) // 16 % 2 == 0,
}


@dataclass(frozen=True)
class Seen(rg.Mask):
    name: str

    def visible(self, at: Region) -> Tensor:
        return MASKS[self.name](at.i, at.j)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("lengths", ["blocks", "one block", "few keys"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, lengths: str, positions: str, isa: str) -> None:
    nq, nk = LENGTHS[lengths]
    q, k, v = (torch.randn(2, 4, n, 16) for n in (nq, nk, nk))
    given = {"mask": Seen(name), "positions": POSITIONS[positions](nq, nk)}
    found = rg.attention(q, k, v, **given, backend=rg.Native())
    expected = rg.attention(q.double(), k.double(), v.double(), **given, backend=rg.Reference())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def names_of(rows: list[list[int]]) -> list[str]:
    return [OPERATIONS[row[0]] for row in rows]


def program(modifier: rg.Modifier, frame: Frame) -> list[list[int]]:
    return lower(graph_of([modifier], frame), frame, (), ()).rows.tolist()


def test_they_come_first() -> None:
    """Kernels look for positions of keys, then what follows from distances, whose slots nothing else writes to."""
    frame = testing.frame(nq=40, nk=50, heads=4)
    rows = program(Of("ten operations"), frame)
    named = names_of(rows)
    first = named.index("INT_SUB")
    assert named[first - 1] == "LOAD"
    last = named.index("SUB")  # of the score; some of the derivative's instructions stand before it too
    assert {"AND", "INT_ABS", "INT_EQ", "INT_SUB", "INT_TO_FLOAT", "MUL"} <= {*named[first:last]}
    assert {row[1] for row in rows[first:last]}.isdisjoint(row[1] for row in rows[last:] if row[1])


def test_positions_that_others_read_are_loaded_again() -> None:
    rows = program(Of("a position besides"), testing.frame(nq=40, nk=50, heads=4))
    loads = [row for row in rows if OPERATIONS[row[0]] == "LOAD"]
    operands = [row[-1] for row in loads]
    assert len(operands) == len(set(operands)) + 1
    again = [row[1] for row in loads if operands.count(row[-1]) == 2]
    assert len(set(again)) == 2


def test_what_holds_too_many_numbers_is_computed_by_pair() -> None:
    """A program that needs all slots has none for distances alone."""
    frame = testing.frame(nq=40, nk=50, heads=4)

    @dataclass(frozen=True)
    class Wide(rg.Modifier):
        def modify(self, s: Tensor, at: Region) -> Tensor:
            x = (at.i - at.j) * 0.01
            for _ in range(60):
                x = x.sigmoid()
                s = s + x
            return s

    modifier = Wide()
    named = names_of(program(modifier, frame))
    assert named.index("ADD") < len(named) - 1 - named[::-1].index("SIGMOID")
    check(case_of(frame.nq, frame.nk, modifier))


def test_of_a_mask() -> None:
    frame, mask = testing.frame(nq=40, nk=50, heads=4), Seen("a key besides")
    named = names_of(lower_mask_graph(graph_of_mask(mask, frame), frame, ()).rows.tolist())
    assert named[-1] == "RESULT"
    assert named.count("LOAD") == 3  # positions of queries and of keys, and which keys are even
    assert named.index("INT_SUB") < len(named) - 1 - named[::-1].index("LOAD")
