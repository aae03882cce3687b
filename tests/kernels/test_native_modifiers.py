"""Modifiers on the native kernels in all their forms, forward, backward and looked at, on every instruction set."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import regard as rg
from fact_checks import hold, looked
from kernel_checks import check, compare
from needed import needs_kernels
from regard import facts, testing
from regard.backends.native.backward import why_not_backward
from regard.backends.native.modifiers import offsets
from regard.call.problem import Problem
from regard.core.region import Frame

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
    "a row": testing.frame(nq=1, nk=149, batch=(2,), heads=6),
    "few rows": testing.frame(nq=3, nk=150, batch=(2,), heads=6),
}


@dataclass(frozen=True)
class Circle(rg.DifferenceBuckets):
    """Hours of a clock, as somebody else would write it."""

    count = 12

    def between(self, ahead: Tensor) -> Tensor:
        return ahead % 12


@dataclass(frozen=True)
class Pages(rg.DifferenceBuckets):
    """How many pages of 50 tokens lie between: places of its own, without a bound."""

    count = 13

    def place(self, at: Tensor) -> Tensor:
        return at // 50

    def between(self, ahead: Tensor) -> Tensor:
        return ahead.clamp(-6, 6) + 6


@dataclass(frozen=True)
class Near(Circle):
    """What it says of its reach is not so."""

    farthest = 20


@dataclass(frozen=True)
class Product(rg.Buckets):
    """What depends on no difference."""

    count = 3

    def index(self, i: Tensor, j: Tensor) -> Tensor:
        return i * j % 3


def table(buckets: rg.Buckets, at: Frame) -> rg.RelativeBias:
    return rg.RelativeBias(torch.randn(buckets.count, at.heads, dtype=torch.float64), buckets)


def modifiers(at: Frame) -> dict[str, rg.Score]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=random)

    slopes, caps = 0.3 * normal(at.heads).abs(), 1 + normal(at.heads).abs()
    full, some = rg.Bias(normal(at.heads, at.nq, at.nk)), rg.Bias(normal(at.heads, 1, at.nk))
    nowhere = rg.Bias(torch.zeros(at.nq, at.nk).double().masked_fill(normal(at.nq, at.nk) > 1, -torch.inf))
    return {
        "a cap for each head": rg.SoftCap(caps) >> rg.Alibi(slopes),
        "a cap at the end": full >> rg.SoftCap(2.0),
        "a cap for each head at the end": table(rg.T5Buckets(), at) >> some >> rg.SoftCap(caps),
        "a cap after -inf": nowhere >> rg.SoftCap(3.0),
        "two biases": full >> some,
        "three biases, one of a number": some >> rg.Bias(normal(1)) >> full,
        "two biases, one for each sequence": rg.Bias(normal(2, 1, at.nq, at.nk)) >> rg.Bias(normal(at.nk)),
        "a grid of 16 columns": table(rg.GridBuckets(14, 16), at),
        "a grid of 7 columns": table(rg.GridBuckets(31, 7), at) >> full,
        "a clock": table(Circle(), at),
        "pages": table(Pages(), at),
        "log distances": rg.LogDistance(slopes, caps) >> full,
        "log distances and slopes, a cap at the end": rg.Alibi(slopes)
        >> rg.LogDistance(3.0, caps[:1])
        >> rg.SoftCap(9.0),
        "log distances of small rates": rg.LogDistance(1e5, 1e-7 * caps),
        "log distances of large rates": rg.LogDistance(slopes, 1e9),
        "points of 1 coordinate": rg.Alibi(slopes, normal(at.nk, 1), normal(at.nq, 1)),
        "points of 3": rg.Alibi(slopes, normal(at.nk, 3), normal(at.nq, 3)) >> full,
        "points of 4, one slope": rg.Alibi(slopes[:1], normal(at.nk, 4), normal(at.nq, 4)),
    }


NAMES = list(modifiers(FRAMES["a row"]))
MASKS = {"Everything": rg.Everything(), "Window": rg.Window(30, 2), "Dilated": rg.Dilated(3)}


def cases(size: str, name: str, mask: str) -> list[testing.Case]:
    at = FRAMES[size]
    modifier = modifiers(at)[name]
    dot = testing.draw(at, dk=24, dv=19, score=rg.ScaledDot() >> modifier, mask=MASKS[mask], sink=True)
    additive = testing.scores(at, 24)["Additive"].stages[0] >> modifier
    return [dot, testing.draw(at, dk=24, dv=16, score=additive, mask=MASKS[mask])]


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_forward(isa: str, name: str, mask: str, size: str) -> None:
    for case in cases(size, name, mask):
        compare(case)
        compare(replace(case, sink=None), torch.bfloat16)


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(isa: str, name: str, size: str) -> None:
    case = cases(size, name, "Window")[0]
    assert_native_gradients(case)
    check(case)


def assert_native_gradients(case: testing.Case) -> None:
    problem = case.leaves(torch.float32).problem
    kinds = [type(stage) for stage in problem.score.parts for _ in stage.tensors()]
    wanted = [kind is not rg.SoftCap for kind in kinds]
    for n, kind in enumerate(kinds):
        wanted[n] &= kind is not rg.Alibi or kinds[:n].count(kind) == 0
    assert why_not_backward(problem, (True, True, True, *wanted, True)) is None


@pytest.mark.parametrize("nq", [3, 40])
@pytest.mark.parametrize("far", [False, True])
def test_slopes_of_points_that_are_hidden_or_far(isa: str, nq: int, far: bool) -> None:
    """What hidden points are, NaN too, changes no gradient; a point that is infinitely far has the weight 0."""
    q, (k, v) = torch.randn(1, 2, nq, 16), torch.randn(2, 1, 2, 41, 16)
    points, real, slopes = torch.randn(41, 2), 37, torch.tensor([0.1, 0.5], requires_grad=not far)
    own = points[:nq].clone()
    points[real:], own[real:] = torch.nan, torch.nan
    points[7] = 1e30 if far else 0.0
    score = rg.ScaledDot() >> rg.Alibi(slopes, coordinates=points, query_coordinates=own)
    mask = rg.Lengths(keys=[real], queries=[min(nq, real)])
    outs = [rg.attention(q, k, v, score=score, mask=mask, backend=one) for one in (rg.Native(), rg.Reference())]
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
    if far:
        return
    weight = torch.randn_like(outs[0])
    found, right = (torch.autograd.grad((out * weight).sum(), slopes)[0] for out in outs)
    assert right.isfinite().all()
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["a cap for each head", "points of 3"])
def test_what_is_learned_goes_over_tiles(name: str) -> None:
    problem = cases("blocks", name, "Window")[0].leaves(torch.float32).problem
    why = why_not_backward(problem, tuple(True for _ in problem.tensors()))
    assert why == ("its soft cap is learned" if "cap" in name else "its coordinates are learned")


@pytest.mark.parametrize("name", NAMES)
def test_facts(isa: str, name: str) -> None:
    asked = (facts.MaxScore(), facts.Entropy(), facts.Received(), facts.Visible())
    case = cases("blocks", name, "Window")[0]
    seen = looked(case.leaves(torch.float32), asked)
    assert {seen.way(fact) for fact in asked} == {"the native kernels"}
    hold(case, asked)


@pytest.mark.parametrize("far", [2, 2000])
def test_positions_that_do_not_count_up(isa: str, far: int) -> None:
    at = testing.frame(nq=70, nk=150, batch=(2,), heads=6)
    random = torch.Generator().manual_seed(0)
    steps = [torch.randint(1, far, (2, n), generator=random).cumsum(-1) - 50 for n in (70, 150)]
    at = replace(at, positions=rg.Positions(*steps))
    for buckets in (rg.T5Buckets(), rg.ClippedBuckets(9, 4), Circle(), Pages()):
        case = testing.draw(at, score=rg.ScaledDot() >> table(buckets, at), mask=rg.Causal())
        why = rg.Native().why_not(case.leaves(torch.float32).problem, lse=True)
        assert why == (None if far == 2 else "positions lie too far apart for a table of what is between")
        if why is None:
            compare(case)
            check(case)


@pytest.mark.full
def test_compiled() -> None:
    at = FRAMES["blocks"]
    for name in ("a grid of 7 columns", "log distances", "a cap for each head at the end", "two biases", "points of 3"):
        case = cases("blocks", name, "Window")[0].leaves(torch.float32)
        told = {"score": case.score, "mask": case.mask, "positions": at.positions}
        plain = rg.attention(case.q, case.k, case.v, **told)
        torch._dynamo.reset()
        graph = torch.compile(lambda q, k, v, told=told: rg.attention(q, k, v, **told), fullgraph=True)
        found = graph(case.q, case.k, case.v)
        torch.testing.assert_close(found, plain)
        leaves = (case.q, case.k, *(t for t in case.score.tensors() if t.requires_grad))
        right = torch.autograd.grad(plain.square().sum(), leaves)
        for mine, theirs in zip(torch.autograd.grad(found.square().sum(), leaves), right, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert rg.explain(case.q, case.k, case.v, **told).backend == rg.Native()


def test_a_rate_below_0_gives_nan_as_documented(isa: str) -> None:
    at = testing.frame(nq=17, nk=17, batch=(1,), heads=2)
    case = testing.draw(at, score=rg.ScaledDot() >> rg.LogDistance(1.0, torch.tensor([-0.25, 1.0])), mask=rg.Causal())
    case = case.leaves(torch.float32)
    for rows in (slice(0, 17), slice(15, 17)):  # blocks, and few rows
        positions = rg.Positions(at.positions.q[rows], at.positions.k)
        given = {"score": case.score, "mask": case.mask, "positions": positions, "backend": rg.Native()}
        out = rg.attention(case.q[..., rows, :], case.k, case.v, **given)[0]
        lost = torch.stack([positions.q >= 4, positions.q < 0])
        assert torch.equal(out.isnan().all(-1), lost) and torch.equal(out.isnan().any(-1), lost)


def test_buckets_that_reach_farther_than_they_say() -> None:
    case = testing.draw(FRAMES["blocks"], score=rg.ScaledDot() >> table(Near(), FRAMES["blocks"])).leaves(torch.float32)
    with pytest.raises(ValueError, match=r"differ by -?\d+ to 148; .* 20 at most \(DifferenceBuckets.farthest\)"):
        rg.attention(case.q, case.k, case.v, score=case.score, positions=case.positions)


def refusal(score: rg.Score) -> str | None:
    at = FRAMES["blocks"]
    return rg.Native().why_not(testing.draw(at, score=score).leaves(torch.float32).problem, lse=True)


def test_what_is_refused_says_why() -> None:
    at = FRAMES["blocks"]
    dot, cap = rg.ScaledDot(), rg.SoftCap(2.0)
    by_query, by_key = rg.Bias(torch.randn(at.nq, 1)), rg.Bias(torch.randn(at.nk))
    assert refusal(dot >> by_query >> cap >> by_key) == "its soft cap comes first or last"
    assert refusal(dot >> cap >> cap) == "it takes one SoftCap"
    assert refusal(dot >> by_query >> by_key) == "the sum of its biases would be larger than each of them"
    slopes, points = torch.ones(at.heads), (torch.randn(at.nk, 5), torch.randn(at.nq, 5))
    assert refusal(dot >> rg.Alibi(slopes, *points)) == "its points have up to 4 coordinates, not 5"
    why = refusal(dot >> table(Product(), at))
    assert why == "its relative biases depend on a difference alone (DifferenceBuckets), not on Product()"


@pytest.mark.parametrize("nq", [3, 17, 40])
def test_no_cell_is_read_past_the_last_query(isa: str, nq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of a block that have no query at all: what lies behind the cells would lead far beyond the table."""
    table_of = offsets._relative_table

    def before_others(problem: Problem, buckets: rg.Buckets) -> object:
        table = table_of(problem, buckets)
        cells = table.cells["q_cell"]
        beyond = torch.full((64,), 1 << 30, dtype=cells.dtype)
        return replace(table, cells={**table.cells, "q_cell": torch.cat([cells, beyond])[: len(cells)]})

    monkeypatch.setattr(offsets, "_relative_table", before_others)
    q, k, v = (torch.randn(2, n, 64).bfloat16().requires_grad_() for n in (nq, 70, 70))
    score = rg.ScaledDot() >> rg.RelativeBias(torch.randn(9, 1), rg.ClippedBuckets(4, 4))
    at = rg.Positions(2 * torch.arange(nq), torch.arange(70))
    out = rg.attention(q, k, v, score=score, positions=at)
    assert testing.error(out, rg.attention(q, k, v, score=score, positions=at, backend=rg.Reference())) < 1e-2
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), (q, k, v)))
