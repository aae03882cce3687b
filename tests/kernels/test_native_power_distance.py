"""PowerDistance on the native kernels: alone and among others, over few rows, in pages, graphs and programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import regard as rg
from exact_checks import check_both
from fact_checks import hold, looked
from kernel_checks import check, compare
from needed import needs_kernels
from regard import facts, testing
from regard.backends.native.backward import why_not_backward
from regard.core.region import Region
from regard.nn import PagedCache
from test_native_stream import SIZES, drawn

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
    "keys in parts": testing.frame(nq=131, nk=1301, batch=(1,), heads=6),
    "a row": testing.frame(nq=1, nk=149, batch=(2,), heads=6),
    "few rows": testing.frame(nq=3, nk=150, batch=(2,), heads=6),
}


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


WEIGHTS, POWERS = tensor(0.5, 0.2, 1.0, 0.01, 0.0, 0.3), tensor(0.4, 1.0, 0.1, 1.7, 1.3, 0.9)
SCORES = {
    "alone": rg.ScaledDot() >> rg.PowerDistance(WEIGHTS, POWERS),
    "of numbers": rg.ScaledDot() >> rg.PowerDistance(0.3, 0.6),
    "one weight": rg.ScaledDot() >> rg.PowerDistance(tensor(0.2), POWERS),
    "one power": rg.ScaledDot() >> rg.PowerDistance(WEIGHTS, tensor(0.8)),
    "of squares": rg.ScaledDot() >> rg.PowerDistance(0.001 * WEIGHTS, 2.0),
    "with both penalties": rg.ScaledDot() >> rg.Alibi(0.1 * WEIGHTS) >> rg.LogDistance(WEIGHTS, POWERS),
    "between caps": rg.ScaledDot() >> rg.SoftCap(2.0) >> rg.Clamp(-1.0, 0.8),
    "of a cosine": rg.Cosine(3.0) >> rg.PowerDistance(WEIGHTS, POWERS),
}
SCORES["with both penalties"] >>= rg.PowerDistance(WEIGHTS, POWERS)
SCORES["between caps"] >>= rg.PowerDistance(WEIGHTS, POWERS)


def draw(size: str, name: str, mask: rg.Mask = rg.Window(90, 2)) -> testing.Case:
    return testing.draw(FRAMES[size], key_heads=3, dk=24, dv=19, score=SCORES[name], mask=mask, sink=True)


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", SCORES)
def test_forward(isa: str, name: str, size: str) -> None:
    for mask in (rg.Window(90, 2), rg.Dilated(3)):
        case = draw(size, name, mask)
        compare(case)
        for dtype in (torch.bfloat16, torch.float16):
            compare(replace(case, sink=None), dtype)


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", SCORES)
def test_gradients(isa: str, name: str, size: str) -> None:
    case = draw(size, name)
    problem = case.leaves(torch.float32).problem
    assert why_not_backward(problem, tuple(True for _ in problem.tensors())) is None
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(isa: str, dtype: torch.dtype) -> None:
    check(draw("blocks", "alone"), dtype)


@pytest.mark.parametrize("size", [(130, 1300), (1300, 130)], ids=str)
def test_gradients_of_long_rows(isa: str, size: tuple[int, int]) -> None:
    """Powers of distances are up to a million: their sums cancel nearly. Several parts of keys, or of queries."""
    at = testing.frame(nq=size[0], nk=size[1], batch=(1,), heads=6)
    score = rg.ScaledDot() >> rg.PowerDistance(1e-3 * (WEIGHTS + 0.1), POWERS)
    check(testing.draw(at, dk=9, dv=12, score=score, mask=rg.Window(1000, 0), sink=True))


def test_distances_of_any_size(isa: str) -> None:
    """Up to 2^31, where the logarithm of a float has no digits left for the fraction of a power."""
    distances = torch.tensor([0, 1, 2, 3, 1000, 2**20 - 1, 2**24 + 2, 2**31 - 128])
    at = replace(
        testing.frame(nq=1, nk=8, batch=(1,), heads=6), positions=rg.Positions(torch.zeros(1).long(), distances)
    )
    q, k = torch.zeros(6, 1, 8), torch.zeros(6, 8, 8)
    for backend in (rg.Native(), rg.Native(invariant=True)):
        for power in (0.05, 0.5, 1.0, 1.37, 2.0):
            score = rg.Dot() >> rg.PowerDistance(1.0, power)
            for n in range(8):
                one = rg.Positions(at.positions.q, distances[n : n + 1])
                lse = rg.attention_state(q, k[:, :1], k[:, :1], score=score, positions=one, backend=backend).finish()[1]
                exact = -(distances[n].double() ** power)
                torch.testing.assert_close(lse.double(), exact.expand(6, 1), rtol=4e-7, atol=0)


@pytest.mark.parametrize("size", ["blocks", "few rows"])
def test_additive_scores(isa: str, size: str) -> None:
    """Theirs are other kernels."""
    score = testing.scores(FRAMES[size], 24)["Additive"].stages[0] >> rg.PowerDistance(WEIGHTS, POWERS)
    case = testing.draw(FRAMES[size], dk=24, dv=16, score=score, mask=rg.Window(90, 2))
    compare(case)
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_tiles_that_are_streamed(isa: str, size: str, dtype: torch.dtype) -> None:
    nq, nk, _, _, heads, _ = SIZES[size]
    score = rg.ScaledDot() >> rg.PowerDistance(torch.rand(heads), torch.rand(heads) + 0.1)
    positions = rg.tail(nq, nk) if nq <= nk else rg.head(nq, nk)
    for mask in (rg.Everything(), rg.Window(before=nk // 3, after=7)):
        check_both(*(t.to(dtype) for t in drawn(size)), score=score, mask=mask, positions=positions)


def test_facts(isa: str) -> None:
    asked = (facts.MaxScore(), facts.Entropy(), facts.Received())
    case = draw("blocks", "alone")
    seen = looked(case.leaves(torch.float32), asked)
    assert {seen.way(fact) for fact in asked} == {"the native kernels"}
    hold(case, asked)


def test_keys_in_pages(isa: str) -> None:
    cache = PagedCache(2, 3, 40, 8, 24, 19)
    k, v, q = torch.randn(2, 3, 50, 24), torch.randn(2, 3, 50, 19), torch.randn(2, 6, 1, 24)
    keys, values = cache.append(k, v)
    score = SCORES["alone"].with_tensors(t.float() for t in SCORES["alone"].tensors())
    found = rg.attention(q, keys, values, score=score, positions=rg.tail(1, 50), backend=rg.Native())
    true = rg.attention(q, k, v, score=score, positions=rg.tail(1, 50), backend=rg.Reference())
    torch.testing.assert_close(found, true)


@pytest.mark.full
def test_compiled_it_is_one_node_forward_and_backward() -> None:
    torch.compiler.reset()
    case = draw("blocks", "alone").leaves(torch.float32)
    (weight, power), at = case.score.tensors(), FRAMES["blocks"].positions
    leaves = [case.q, case.k, case.v, weight, power]

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, power: Tensor) -> Tensor:
        return rg.attention(q, k, v, score=rg.ScaledDot() >> rg.PowerDistance(weight, power), positions=at)

    graph = torch.compile(run, backend="aot_eager", fullgraph=True)
    for found, true in zip(*(_results(fn(*leaves), leaves) for fn in (graph, run)), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)


def _results(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def test_later_calls_read_its_tensors_where_they_lie() -> None:
    q, k, v = (torch.randn(1, 6, 23, 8) for _ in range(3))
    weight, power = torch.rand(6) + 0.1, torch.rand(6) + 0.1
    score = rg.ScaledDot() >> rg.PowerDistance(weight, power)
    for change in (None, weight.neg_, power.sqrt_):
        before = rg.attention(q, k, v, score=score)
        if change is not None:
            change()
            found, true = rg.attention(q, k, v, score=score), rg.attention(q, k, v, score=score, backend=rg.Reference())
            torch.testing.assert_close(found, true)
            assert not torch.equal(found, before)


@dataclass(frozen=True)
class Halved(rg.Modifier):
    """A modifier of a user's own: then all modifiers are a program."""

    positional = False

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s / 2


def test_in_a_program_with_a_modifier_of_a_users_own(isa: str) -> None:
    score = SCORES["alone"] >> Halved()
    case = testing.draw(FRAMES["blocks"], key_heads=3, dk=24, dv=19, score=score, mask=rg.Window(90, 2))
    assert rg.Native().why_not(case.leaves(torch.float32).problem, True) is None
    compare(case)
    check(case)
