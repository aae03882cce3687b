"""Temperature on the native kernels: among other modifiers, learned, over few rows and looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regard as rg
from fact_checks import hold, looked
from kernel_checks import check, compare
from regard import facts, testing
from regard.backends.native.additive import AdditiveKernels
from regard.backends.native.backward import why_not_backward
from regard.backends.native.ffi import runnable
from regard.core.region import Frame

pytestmark = pytest.mark.skipif(not runnable(), reason="needs the native kernels: no C++ compiler was found")

FRAMES = {
    "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
    "keys in parts": testing.frame(nq=131, nk=1301, batch=(1,), heads=6),
    "a row": testing.frame(nq=1, nk=149, batch=(2,), heads=6),
    "few rows": testing.frame(nq=3, nk=150, batch=(2,), heads=6),
}


def scores(at: Frame) -> dict[str, rg.Score]:
    random = torch.Generator().manual_seed(0)
    each = 0.5 + torch.rand(at.heads, dtype=torch.float64, generator=random)
    bias = rg.Bias(torch.randn(at.heads, at.nq, at.nk, dtype=torch.float64, generator=random))
    t = rg.Temperature(each)
    return {
        "for each head": rg.ScaledDot() >> t,
        "for all heads": rg.ScaledDot() >> rg.Temperature(each[:1]),
        "a number": rg.ScaledDot() >> rg.Temperature(0.3),
        "and slopes, a bias": rg.ScaledDot() >> t >> rg.Alibi(0.1 * each) >> bias,
        "and -inf": rg.ScaledDot() >> t >> rg.Bias(bias.bias.masked_fill(bias.bias > 1, -torch.inf)),
        "after a cap": rg.ScaledDot() >> rg.SoftCap(2.0) >> t >> bias,
        "and a cap at the end": rg.ScaledDot() >> t >> bias >> rg.SoftCap(2.0),
        "then a cap": rg.ScaledDot() >> t >> rg.SoftCap(2.0),
        "of a cosine, as in Swin V2": rg.Cosine(1.0) >> rg.Temperature(0.1 * each) >> bias,
    }


NAMES = list(scores(FRAMES["a row"]))


def draw(size: str, name: str, mask: rg.Mask = rg.Window(90, 2)) -> testing.Case:
    at = FRAMES[size]
    return testing.draw(at, key_heads=3, dk=24, dv=19, score=scores(at)[name], mask=mask, sink=True)


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", NAMES)
def test_forward(isa: str, name: str, size: str) -> None:
    for mask in (rg.Window(90, 2), rg.Dilated(3)):
        case = draw(size, name, mask)
        compare(case)
        compare(replace(case, sink=None), torch.bfloat16)


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(isa: str, name: str, size: str) -> None:
    case = draw(size, name)
    problem = case.leaves(torch.float32).problem
    learned = [type(stage) is not rg.SoftCap for stage in problem.score.parts for _ in stage.tensors()]
    assert why_not_backward(problem, (True, True, True, *learned, True)) is None
    check(case)
    check(case, torch.bfloat16)


STAGES = {
    "alone": rg.Temperature(0.7),
    "then a cap": rg.Temperature(0.7) >> rg.SoftCap(2.0),
    "after a cap": rg.SoftCap(2.0) >> rg.Temperature(0.7),
}


@pytest.mark.parametrize("size", ["blocks", "few rows"])
@pytest.mark.parametrize("name", STAGES)
def test_additive_scores(isa: str, name: str, size: str) -> None:
    """Theirs are other kernels, whose backward passes a temperature that is not learned."""
    at = FRAMES[size]
    score = testing.scores(at, 24)["Additive"].stages[0] >> STAGES[name]
    case = testing.draw(at, dk=24, dv=16, score=score, mask=rg.Window(90, 2))
    compare(case)
    problem = case.leaves(torch.float32).problem
    assert AdditiveKernels().why_streamed(problem, tuple(t.requires_grad for t in problem.tensors())) is None
    check(case)


@pytest.mark.parametrize("name", ["for each head", "after a cap"])
def test_facts(isa: str, name: str) -> None:
    asked = (facts.MaxScore(), facts.Entropy(), facts.Received())
    case = draw("blocks", name)
    seen = looked(case.leaves(torch.float32), asked)
    assert {seen.way(fact) for fact in asked} == {"the native kernels"}
    hold(case, asked)


@pytest.mark.parametrize("hidden", [3e38, torch.inf, torch.nan], ids=str)
def test_hidden_scores_that_are_not_finite_spoil_no_gradient(isa: str, hidden: float) -> None:
    case = testing.draw(FRAMES["blocks"], score=scores(FRAMES["blocks"])["for each head"]).leaves(torch.float32)
    hide, found = (
        torch.arange(149) % 3 == 1,
        list[tuple[torch.Tensor, ...]](),
    )  # keys of every tile, computed with the rest
    mask = rg.Dense(~hide.expand(83, 149))
    for value in (0.0, hidden):
        k = case.k.detach().masked_fill(hide[:, None], value)
        out = rg.attention(case.q, k, case.v, score=case.score, mask=mask, backend=rg.Native())
        found.append(torch.autograd.grad(out.square().sum(), (case.q, *case.score.tensors())))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs) and mine.any()


def test_it_is_read_where_it_lies_now() -> None:
    q, k, v = (torch.randn(2, 4, 23, 16) for _ in range(3))
    t = torch.rand(4) + 0.5
    for grad in (False, True):
        for _ in range(3):
            score = rg.ScaledDot() >> rg.Temperature(t)
            given = [x.clone().requires_grad_(grad) for x in (q, k, v)]
            out = rg.attention(*given, score=score)
            torch.testing.assert_close(out, rg.attention(*given, score=score, backend=rg.Reference()))
            t.mul_(2)


@pytest.mark.full
def test_compiled() -> None:
    case = draw("blocks", "and slopes, a bias").leaves(torch.float32)
    given = {"score": case.score, "mask": case.mask, "positions": case.positions}
    graph = torch.compile(lambda q, k, v: rg.attention(q, k, v, **given), fullgraph=True)
    leaves = (case.q, case.k, case.v, *case.score.tensors())
    found, plain = (call(case.q, case.k, case.v) for call in (graph, lambda q, k, v: rg.attention(q, k, v, **given)))
    torch.testing.assert_close(found, plain)
    mine, right = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, plain))
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_another_order_is_refused_in_words() -> None:
    at = FRAMES["blocks"]
    t, bias = rg.Temperature(2.0), rg.Bias(torch.randn(at.nk))
    cases = {
        rg.ScaledDot() >> bias >> t: "its temperature comes before what is added to the scores",
        rg.ScaledDot() >> t >> t: "it takes one Temperature",
        rg.ScaledDot() >> t >> rg.SoftCap(2.0) >> bias: "its soft cap comes first or last",
    }
    for score, why in cases.items():
        assert rg.Native().why_not(testing.draw(at, score=score).leaves(torch.float32).problem, lse=True) == why
