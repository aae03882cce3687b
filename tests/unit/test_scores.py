"""The algebra of scores: >> joins, in order, and is associative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.call.arguments import build_problem
from regard.core.region import Region
from regard.scores.algebra import Pipeline, as_pipeline

X = torch.randn(2, 3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CAP, SLOPES, BIAS = rg.SoftCap(2.0), rg.Alibi(torch.tensor([0.5, 1.0, 2.0])), rg.Bias(torch.full((5, 5), 0.25))


def scores(score: rg.Score, q: Tensor = X, k: Tensor = X) -> Tensor:
    problem = build_problem(q, k, k, score, rg.Everything(), None, None)[0]
    return problem.region_tile(problem.frame.region()).scores


def test_joining_is_associative() -> None:
    a, b, c, d = rg.ScaledDot(), CAP, SLOPES, BIAS
    ways = [((a >> b) >> c) >> d, a >> (b >> (c >> d)), (a >> b) >> (c >> d), a >> ((b >> c) >> d)]
    assert all(way == ways[0] and repr(way) == repr(ways[0]) for way in ways)
    assert ways[0].stages == (a, b, c, d)
    assert repr(ways[0]) == ("ScaledDot() >> SoftCap(cap=2.0) >> Alibi(slopes=float32[3]) >> Bias(bias=float32[5, 5])")


def test_stages_apply_from_left_to_right() -> None:
    gap = (torch.arange(5)[:, None] - torch.arange(5)).abs() * torch.tensor([0.5, 1.0, 2.0])[:, None, None]
    dot = X @ X.mT
    torch.testing.assert_close(scores(rg.Dot() >> CAP >> SLOPES), 2 * torch.tanh(dot / 2) - gap)
    torch.testing.assert_close(scores(rg.Dot() >> SLOPES >> CAP), 2 * torch.tanh((dot - gap) / 2))
    assert torch.equal(scores(Pipeline((rg.Dot(),))), scores(rg.Dot()))


def test_whether_positions_are_compared() -> None:
    assert not (rg.Dot() >> CAP >> BIAS).compares_positions()
    assert (rg.Dot() >> CAP >> SLOPES).compares_positions()
    assert not rg.Alibi(torch.ones(1), torch.ones(5, 2)).compares_positions()


def test_the_tensors_of_a_pipeline_come_in_order() -> None:
    m = torch.ones(7, 7)
    pipeline = rg.Bilinear(m) >> CAP >> SLOPES >> BIAS
    assert [t is u for t, u in zip(pipeline.tensors(), (m, SLOPES.slopes, BIAS.bias), strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: rg.Dot() >> torch.ones(5, 5),
            TypeError,
            r">> joins scores; after Dot\(\) comes a Tensor of float32: .* are ScaledDot\(\) >> Bias\(tensor\)",
        ),
        (lambda: rg.Dot() >> None, TypeError, r">> joins scores; after Dot\(\) comes None: leave it out"),
        (
            lambda: scores(CAP >> SLOPES),
            TypeError,
            r"score SoftCap\(cap=2.0\) >> Alibi.* begins with a modifier; begin with .* as in ScaledDot\(\) >>",
        ),
        (lambda: scores(CAP), TypeError, "begins with a modifier"),
        (lambda: scores(rg.Dot() >> CAP >> rg.Cosine(2.0)), TypeError, r"has a second similarity, Cosine\(scale=2.0\)"),
        (
            lambda: scores(lambda q, k: q @ k.mT),
            TypeError,
            r"score is a function; .* a similarity fn\(q, k\) is Custom\(fn\)",
        ),
        (lambda: rg.Alibi([1.0]), TypeError, "Alibi.slopes is a list; expected a torch tensor"),
    ],
)
def test_refusals(make: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_a_pipeline_begins_with_its_similarity() -> None:
    assert as_pipeline(rg.Dot()) == Pipeline((rg.Dot(),))


@dataclass(frozen=True)
class Temperature(rg.Modifier):
    """A modifier of one's own, by key."""

    positional = False
    t: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s / at.keys(self.t).to(s.dtype)


def test_a_modifier_of_ones_own_runs_on_every_tiling_with_gradients() -> None:
    t = torch.rand(5, dtype=torch.float64) + 0.5
    expected = torch.softmax(X @ X.mT / t, -1) @ X
    for backend in (rg.Reference(), rg.Tiled(2, 3)):
        out = rg.attention(X, X, X, score=rg.Dot() >> Temperature(t), backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)

    def run(x: Tensor, t: Tensor) -> Tensor:
        return rg.attention(x, X, X, score=rg.Dot() >> Temperature(t), backend=rg.Tiled(rows=2, keys=3))

    leaves = (X.clone().requires_grad_(), t.requires_grad_())
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("name", list(testing.scores(testing.frame())))
def test_no_score_is_true_or_false(name: str) -> None:
    """ScaledDot() and SoftCap(50.0) would be SoftCap(50.0)."""
    whole, cap = testing.scores(testing.frame())[name], rg.SoftCap(50.0)
    for score in (whole, *whole.stages):
        for way in (lambda score=score: score and cap, lambda score=score: score or cap, lambda score=score: not score):
            with pytest.raises(TypeError, match=r"is neither true nor false.*join scores by >>\.$"):
                way()
