"""Plans of calls with modifiers of one's own: other tensors, lengths, positions give the bits of calls without one."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard.backends.native.programs import lower as lowering
from regard.core.region import Region
from regard.runtime import plan_cache

pytestmark = needs_kernels

RATE = 0.25


@dataclass(frozen=True, eq=False)
class Near(rg.Modifier):
    """Costs per head by distance, from a rate outside of the class."""

    gate: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s - RATE * at.heads(self.gate) * (at.i - at.j).abs().clamp(max=8)


@dataclass(frozen=True, eq=False)
class Looked(rg.Modifier):
    table: Tensor
    which: Tensor
    factor: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * self.factor + self.table[at.queries(self.which) + 0 * at.j]


@dataclass(frozen=True, eq=False)
class OfDistance(rg.Modifier):
    """Adds a number for the distance to keys before the query; one number for all others."""

    table: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + self.table[(at.i - at.j).clamp(min=0)]


@dataclass(frozen=True)
class Parts(rg.Modifier):
    """Reads the rate from a function inside of its own."""

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return sum(((lambda x: x * RATE)(s * n) for n in range(2)), start=s)


@dataclass(frozen=True)
class Called(rg.Modifier):
    """Reads the rate where it is called, by a method with a name of Python's."""

    def __call__(self, s: Tensor) -> Tensor:
        return s * RATE

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self(s)


@dataclass(frozen=True)
class Counted(rg.Modifier):
    """Keeps the rate when it is made, in an attribute that is no field."""

    rate: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", RATE)

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * self.rate


@dataclass(frozen=True)
class Quotient(rg.Modifier):
    """A quotient of whole numbers, whose dtype is torch's default."""

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + at.j / 3 if (at.j / 3).dtype == torch.float32 else s - at.j / 3


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()


def both(nq: int, nk: int, modifier: rg.Modifier, **given: object) -> Tensor:
    """The output of random tensors, which must be that of a call without a plan."""
    q, k, v = (torch.randn(2, h, n, 16) for h, n in ((4, nq), (2, nk), (2, nk)))
    score = rg.ScaledDot() >> modifier
    with torch.no_grad():
        found = rg.attention(q, k, v, score=score, **given)
        general = rg.attention(q, k, v, score=score, **given, backend=Unplanned())
        assert torch.allclose(found, general, rtol=0, atol=0, equal_nan=True)
        right = rg.attention(*(t.double() for t in (q, k, v)), score=score, **given, backend=rg.Reference())
    assert torch.allclose(found.double(), right, atol=1e-5, equal_nan=True)
    return found


LENGTHS = [(1, 3), (1, 4), (1, 9), (1, 64), (3, 64), (3, 7), (9, 4), (40, 64), (1, 10), (7, 7), (8, 8)]
POSITIONS = {
    "tail": rg.tail,
    "given": lambda nq, nk: rg.Positions(torch.arange(nk - nq, nk) * 2, torch.arange(nk)),
    "each": lambda nq, nk: rg.tail(nq, [nk, max(nk - 2, 1)]),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal(), rg.Causal() & rg.Dilated(3)], ids=repr)
def test_lengths_positions_and_tensors_are_those_of_the_call(mask: rg.Mask, positions: str) -> None:
    for nq, nk in LENGTHS:
        both(nq, nk, Near(torch.rand(4)), mask=mask, positions=POSITIONS[positions](nq, nk))
    if mask != rg.Causal() & rg.Dilated(3):  # its map of tiles belongs to one size
        assert len(plan_cache.plans()) == len({(min(nq, 2), nq == nk) for nq, nk in LENGTHS})


def test_steps_make_few_programs() -> None:
    near, made = Near(torch.rand(4)), lowering.Lowering
    with patch.object(lowering, "Lowering", side_effect=made) as programs:
        for nk in range(3, 150):
            both(1, nk, near, mask=rg.Causal(), positions=rg.tail(1, nk))
    assert programs.call_count <= 8  # for keys of 2 to 8 bits
    assert len(plan_cache.plans()) == 1


def test_numbers_decide_which_program_and_whether_there_is_one() -> None:
    table, which = torch.randn(4), torch.tensor([0, 1, 2, 1, 0])
    for factor in (2.0, 2.0, -0.0, 0.0, 3.0, torch.nan, 2.0):
        both(5, 5, Looked(table, which, torch.tensor(factor)), positions=rg.head(5, 5))
    for other in (which + 1, -1 - which, which):
        both(5, 5, Looked(table, other, torch.tensor(2.0)), positions=rg.head(5, 5))
    assert len(plan_cache.plans()) == 1
    for _ in range(2):
        with pytest.raises(IndexError):
            both(5, 5, Looked(table, which + 3, torch.tensor(2.0)), positions=rg.head(5, 5))


def test_a_table_serves_all_lengths_that_it_reaches() -> None:
    """Wider ranges of positions than those of the call would reach beyond: then the program is of its range alone."""
    table = torch.randn(40)
    for n in (3, 17, 32, 33, 40, 5):
        both(1, n, OfDistance(table), positions=rg.tail(1, n))
        both(n, n, OfDistance(table))
    with pytest.raises(IndexError):
        both(41, 41, OfDistance(table))


def test_a_number_that_changes_outside_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    near = Near(torch.rand(4))
    for rate in (0.25, 2.0, 0.25):
        monkeypatch.setitem(globals(), "RATE", rate)
        both(7, 7, near)
        both(7, 7, Parts())
        both(7, 7, Called())
        both(7, 7, Counted())


def test_the_default_dtype_is_that_of_the_call() -> None:
    given = [torch.randn(1, 2, 7, 16) for _ in "qkv"]
    found = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            score = rg.ScaledDot() >> Quotient()
            pair = [rg.attention(*given, score=score, backend=b) for b in (None, rg.Reference())]
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(*pair)
        found.append(pair[0])
    assert not torch.allclose(found[0], found[1])


def gradients(given: list[Tensor], modifier: rg.Modifier, backend: rg.Backend | None, **named: object) -> list[Tensor]:
    """Of those of q, k, v and the modifier's tensors that require one."""
    wanted = [t for t in (*given, *modifier.tensors()) if t.requires_grad]
    out = rg.attention(*given, score=rg.ScaledDot() >> modifier, backend=backend, **named)
    return list(torch.autograd.grad(out, wanted, torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)))


def exact(t: Tensor) -> Tensor:
    """In float64, a leaf of its own."""
    return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t


def check_gradients(nq: int, nk: int, modifier: rg.Modifier, wanted: str = "qkv", **named: object) -> None:
    """A plan's are the bits of a call without a plan, and those of float64."""
    shapes = {"q": (2, 4, nq, 16), "k": (2, 2, nk, 16), "v": (2, 2, nk, 16)}
    given = [torch.randn(shape).requires_grad_(name in wanted) for name, shape in shapes.items()]
    found, general = (gradients(given, modifier, backend, **named) for backend in (None, Unplanned()))
    doubles = modifier.with_tensors(iter([exact(t) for t in modifier.tensors()]))
    right = gradients([exact(t) for t in given], doubles, rg.Reference(), **named)
    for mine, same, true in zip(found, general, right, strict=True):
        assert mine.dtype == same.dtype and torch.equal(mine, same)
        torch.testing.assert_close(mine.double(), true, rtol=0, atol=1e-4 * max(1.0, float(true.abs().max())))


@pytest.mark.parametrize("wanted", ["qkv", "q", "v", ""])
@pytest.mark.parametrize("positions", POSITIONS)
def test_gradients_are_those_of_the_call(positions: str, wanted: str) -> None:
    for nq, nk in LENGTHS[::2]:
        gate = torch.rand(4, requires_grad=True)
        check_gradients(nq, nk, Near(gate), wanted, mask=rg.Causal(), positions=POSITIONS[positions](nq, nk))
    assert len(plan_cache.plans()) == len({(min(nq, 2), nq == nk) for nq, nk in LENGTHS[::2]})


def test_some_of_several_tensors_are_learned() -> None:
    for learned in (True, False, True):
        table = torch.randn(4).requires_grad_(learned)
        for factor in (torch.tensor(2.0), torch.tensor(0.5, requires_grad=True), torch.tensor(-0.0)):
            for which in (torch.tensor([0, 1, 2, 1, 0]), torch.tensor([3, 1, 2, 1, -1])):
                check_gradients(5, 5, Looked(table, which, factor), positions=rg.head(5, 5))
                check_gradients(5, 9, Looked(table, which, factor), positions=rg.head(5, 9))


@dataclass(frozen=True, eq=False)
class OfPairs(rg.Modifier):
    """Adds a number of a table for each pair; the kernels read a copy of the indices, which are int64."""

    which: Tensor
    table: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + self.table[at.pairs(self.which)]


def test_what_the_forward_read_is_not_kept() -> None:
    """The backward makes it again: between the two, only the caller has something as large as the weights."""
    which, table = torch.randint(9, (4, 61, 67)), torch.randn(9, requires_grad=True)
    modifier, places = OfPairs(which, table), rg.head(61, 67)
    check_gradients(61, 67, modifier, positions=places)
    q, k, v = (torch.randn(2, 4, n, 16) for n in (61, 67, 67))
    out = rg.attention(q, k, v, score=rg.ScaledDot() >> modifier, positions=places)
    assert plan_cache.plans()
    alive = [t for t in gc.get_objects() if type(t) is Tensor and t.shape[-2:] == (61, 67)]
    assert {t.data_ptr() for t in alive} == {which.data_ptr()}
    out.sum().backward()
    assert table.grad is not None and table.grad.abs().sum() > 0


def test_what_is_kept_of_a_modifier_does_not_hold_its_tensors() -> None:
    which, table = torch.randint(9, (4, 61, 67)), torch.randn(9)
    both(61, 67, OfPairs(which, table), positions=rg.head(61, 67))
    storages = [StorageWeakRef(t.untyped_storage()) for t in (which, table)]
    del which, table
    gc.collect()
    assert plan_cache.plans() and all(storage.expired() for storage in storages)


def test_half_precision_and_hooks_that_lay_tensors_out_anew() -> None:
    table = torch.randn(9, dtype=torch.bfloat16, requires_grad=True)
    q = torch.randn(1, 4, 9, 16, dtype=torch.bfloat16, requires_grad=True)
    given, modifier = [q, q.detach(), q.detach()], OfDistance(table)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
        found, right = (gradients(given, modifier, backend) for backend in (None, Unplanned()))
    assert plan_cache.plans()
    for mine, true in zip(found, right, strict=True):  # sums in another order, where out is laid out anew
        torch.testing.assert_close(mine, true, rtol=2**-7, atol=1e-4)


def test_a_backward_that_can_be_differentiated_again() -> None:
    gate = torch.rand(4, requires_grad=True)
    q = torch.randn(1, 4, 9, 16, requires_grad=True)
    k, v = torch.randn(1, 4, 9, 16), torch.randn(1, 4, 9, 16)
    found = []
    for backend in (None, rg.Reference()):
        out = rg.attention(q, k, v, score=rg.ScaledDot() >> Near(gate), backend=backend)
        first = torch.autograd.grad(out.square().sum(), (q, gate), create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (q, gate))])
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-3, atol=1e-3 * float(true.detach().abs().max()))
    assert plan_cache.plans()


BEFORE = {"inference": torch.inference_mode, "no gradients": torch.no_grad}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("mask", [rg.Where(lambda b, h, i, j: (i + j) % 2 == 0), rg.Causal()], ids=["own", "Causal"])
def test_a_call_that_learns_behind_one_that_does_not(mask: rg.Mask, before: str) -> None:
    """The first call's graph and program are kept: they must have the derivatives that it did not need."""

    @dataclass(frozen=True)
    class Sloped(rg.Modifier):
        """Of a class of its own, so that nothing is kept of it."""

        slope: Tensor
        each: Tensor

        def modify(self, s: Tensor, at: Region) -> Tensor:
            return s - torch.sigmoid(s) * at.heads(self.slope) * (at.i - at.j).abs() + at.keys(self.each) * at.j

    with BEFORE[before]():
        x = torch.randn(1, 2, 33, 8)
        rg.attention(x, x, x, score=rg.ScaledDot() >> Sloped(torch.ones(2), torch.zeros(33)), mask=mask)
        places = rg.Positions(torch.arange(33), torch.arange(33))
        rg.attention(
            x, x, x, score=rg.ScaledDot() >> Sloped(torch.ones(2), torch.zeros(33)), mask=mask, positions=places
        )
    for n in (20, 33):
        given = [torch.randn(1, 2, n, 8), torch.rand(2), torch.rand(n) / 50]
        q, slope, each = (t.requires_grad_() for t in given)
        score = rg.ScaledDot() >> Sloped(slope, each)
        found, right = (
            torch.autograd.grad(rg.attention(q, q, q, score=score, mask=mask, **how).sin().sum(), (q, slope, each))
            for how in ({}, {"backend": rg.Reference()})
        )
        for mine, expected in zip(found, right, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
