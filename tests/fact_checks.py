"""The law of facts: what the sweep over tiles answers is what the dense float64 definition says."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import facts, testing
from regard.inspect import compute_facts
from regard.inspect import sweep as sweeping
from regard.inspect.dense import dense
from regard.inspect.results import FactResults

# relative to the largest number of an answer's kind: scores and weights of float32 carry its rounding
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
AT = testing.frame((2,), 6, 23, 29)


def every(at: rg.core.region.Frame = AT) -> tuple[facts.Fact[Any], ...]:
    """Each fact of the house, with arguments that fit a frame."""
    groups = torch.arange(at.nk) * 7 % 4 - 1
    by_batch = (torch.arange(at.nk) + torch.arange(math.prod(at.batch)).reshape(*at.batch, 1)) % 3
    by_key = torch.rand(at.nk).double() * (torch.arange(at.nk) % 5 > 0)  # some keys carry nothing
    norms = 3 * torch.rand(*at.batch, at.heads, at.nk).double()
    weights, by_head = torch.rand(at.nq).double(), torch.rand(*at.batch, at.heads, at.nq).double()
    return (
        *(facts.Visible(), facts.Entropy(), facts.RelativeEntropy(), facts.EffectiveKeys()),
        *(facts.Concentration(), facts.MaxScore()),
        *(facts.Top(1), facts.Top(3), facts.Top(40)),
        *(facts.Mass(groups), facts.Mass(by_batch), facts.Mass.first(2), facts.SinkMass(), facts.Distance()),
        *(facts.Within(before=4, after=2), facts.Within(before=None, after=0), facts.Offsets((-1, 0, 5))),
        *(facts.Received(), facts.Received(weights), facts.Received(by_head), facts.Received.last(3)),
        *(facts.MeanReceived(), facts.MaxReceived(), facts.Readers()),
        *(facts.Map(5, 7), facts.Map(), facts.ScoreMap(5, 7), facts.ScoreMap(), facts.Histogram()),
        *(facts.Quantised(), facts.Quantised(10)),
        *(
            facts.Carried(norms),
            facts.Carried(by_key, facts.Received.last(3)),
            facts.Carried(norms, facts.Received(weights)),
        ),
        *(facts.Carried(by_key, facts.MeanReceived()), facts.Carried(norms, facts.MaxReceived())),
        *(
            facts.Carried(by_key, facts.Top(3)),
            facts.Carried(norms, facts.Mass(groups)),
            facts.Carried(norms, facts.Map(5, 7)),
        ),
        *(facts.Carried(norms, facts.Within(before=4, after=2)), facts.Carried(by_key, facts.Offsets((-1, 0, 5)))),
        *(facts.Rows(torch.tensor([0, 3, -1])), facts.Columns(torch.tensor([5, 0, -1, 5]))),
    )


def tiles(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int) -> None:
    """So that each fact is put together from tiles of that size, in PyTorch."""
    size = sweeping.Size(rows=rows, keys=keys)
    monkeypatch.setattr(sweeping, "Size", lambda: size)
    for name in ("why_not", "why_nothing"):
        monkeypatch.setattr(compute_facts, name, lambda *_: "tiles are asked for")


def looked(call: testing.Case, wanted: tuple[facts.Fact[Any], ...]) -> FactResults:
    given = {"score": call.score, "mask": call.mask, "positions": call.positions, "sink": call.sink}
    return rg.look(call.q, call.k, facts=wanted, **given)


def hold(call: testing.Case, wanted: tuple[facts.Fact[Any], ...], dtype: torch.dtype = torch.float64) -> None:
    """The law, for a call rounded to a dtype."""
    seen = looked(call.leaves(dtype), wanted)
    exact, scores = _expected(call.copied(), wanted, dtype)
    for fact in wanted:
        got, expected = seen[fact], exact[fact]
        if isinstance(fact, facts.MaxScore):
            got, expected = _peak(got, scores), _peak(expected, scores)
        if isinstance(fact, facts.Top):
            got, expected = _top(got, scores), _top(expected, scores)
        if isinstance(fact, facts.Carried) and isinstance(fact.fact, facts.Top):
            got, expected = _carried(got), _carried(expected)
        if isinstance(fact, facts.Histogram) and dtype != torch.float64:
            p = torch.exp(scores - exact.lse.masked_fill(exact.lse == -torch.inf, 0)[..., None])
            _hold_counts(fact, got, expected, p, scores != -torch.inf)
            continue
        if isinstance(fact, facts.Quantised):
            assert got.shape == expected.shape and got.dtype == torch.uint8
            # a weight halfway between two levels may round to either
            assert (got.int() - expected.int()).abs().sum() <= 1e-3 * got.numel() + 1, fact
            continue
        for name, a, b in _parts(got, expected):
            close(f"{fact!r}{name}", a, b, dtype)


@lru_cache(maxsize=16)
def _expected(
    call: testing.Case, wanted: tuple[facts.Fact[Any], ...], dtype: torch.dtype
) -> tuple[FactResults, Tensor]:
    """The definition's answers and scores in float64, of a call rounded to a dtype: once, for all instruction sets."""
    problem = call.leaves(dtype).leaves(torch.float64).problem
    return dense(problem, wanted), problem.region_tile(problem.frame.region()).masked.detach()


def _parts(got: Any, expected: Any) -> list[tuple[str, Tensor, Tensor]]:
    if isinstance(expected, Tensor):
        return [("", got, expected)]
    names = getattr(expected, "_fields", None) or [str(n) for n in range(len(expected))]
    return [(f".{name}", a, b) for name, a, b in zip(names, got, expected, strict=True)]


def close(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == expected.shape, f"{name} has shape {tuple(got.shape)}; expected {tuple(expected.shape)}"
    if not expected.dtype.is_floating_point:
        assert got.dtype == expected.dtype == torch.int64, name
        assert torch.equal(got, expected), f"{name} differs in {int((got != expected).sum())} places"
        return
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), name
    some = expected[expected.isfinite()]
    size = float(some.abs().max()) if some.numel() else 1.0
    allowed = TOLERANCE[dtype]
    torch.testing.assert_close(
        got.double(), expected, rtol=allowed, atol=allowed * size, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def _hold_counts(fact: facts.Histogram, got: Tensor, expected: Tensor, p: Tensor, seen: Tensor) -> None:
    """A weight that is an edge but for its rounding may count for either bin beside it."""
    assert got.dtype == torch.int64 and got.shape == expected.shape
    edges = torch.tensor(fact.edges, dtype=torch.float64)
    close = ((p[..., None] - edges).abs() <= 1e-5 * edges) & seen[..., None]
    off = (got - expected).cumsum(-1).abs()
    assert (off <= close.sum((-2, -3))[..., 1:]).all(), f"{fact!r} differs by {int(off.max())}"


def _at(keys: Tensor, scores: Tensor) -> Tensor:
    """The exact scores of keys; of no key (-1) -inf."""
    return torch.nn.functional.pad(scores, (1, 0), value=-torch.inf).gather(-1, keys + 1)


def _peak(peak: facts.Peak, scores: Tensor) -> tuple[Tensor, Tensor]:
    # the nearest of two scores may be another after rounding: keys are compared by what they score
    return peak.score, _at(peak.key[..., None], scores).to(peak.score.dtype)


def _carried(top: facts.TopKeys) -> tuple[Tensor, Tensor, Tensor]:
    # the kth of two keys that carry equal amounts may be another after rounding
    twice = (top.keys[..., :, None] == top.keys[..., None, :]) & (top.keys[..., None, :] >= 0)
    return top.weights, top.rest, twice.sum((-1, -2))


def _top(top: facts.TopKeys, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    twice = (top.keys[..., :, None] == top.keys[..., None, :]) & (top.keys[..., None, :] >= 0)
    return _at(top.keys, scores).to(top.rest.dtype), top.weights, top.rest, twice.sum((-1, -2))


def fact_classes() -> set[str]:
    """The names of all facts that regard.facts offers; Inputs keeps what was asked and answers no question about it."""
    public = vars(facts).values()
    return {kind.__name__ for kind in public if isinstance(kind, type) and issubclass(kind, facts.Fact)} - {
        "Fact",
        "Inputs",
    }
