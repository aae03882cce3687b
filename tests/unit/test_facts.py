"""Every fact is its dense float64 definition: over masks, scores, sinks, dtypes, sizes and tilings."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import hypothesis.strategies as some
import pytest
import torch

import regard as rg
from fact_checks import AT, TOLERANCE, every, fact_classes, hold, looked, tiles
from regard import facts, testing

MASKS = testing.masks(AT)
SCORES = testing.scores(AT)


def test_every_fact_is_held_to_its_definition() -> None:
    assert {type(fact).__name__ for fact in every()} == fact_classes()


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("mask", MASKS)
def test_under_every_mask(mask: str, sink: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 5, 7)
    hold(testing.draw(AT, mask=MASKS[mask], sink=sink), every())


@pytest.mark.parametrize("score", SCORES)
def test_under_every_score(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 13, 11)
    hold(testing.draw(AT, score=SCORES[score], mask=MASKS["Or"], sink=True), every())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("score", ["ScaledDot", "Pipeline", "Additive", "Bias", "Distance"])
@pytest.mark.parametrize("mask", ["Causal", "Lengths 2", "nothing"])
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_in_every_dtype(mask: str, score: str, sink: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 8, 16)
    hold(testing.draw(AT, score=SCORES[score], mask=MASKS[mask], sink=sink), every(), dtype)


@pytest.mark.parametrize("size", [(1, 6), (2, 29), (23, 3), (64, 64)], ids=str)
@pytest.mark.parametrize("mask", ["Causal", "Dense", "Lengths 2"])
def test_over_every_tiling(mask: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, *size)
    hold(testing.draw(AT, mask=MASKS[mask], sink=True), every())


@pytest.mark.parametrize(
    "at",
    [
        *(testing.frame((2,), 6, nq, nk) for nq, nk in ((0, 5), (5, 0), (0, 0), (1, 1), (1, 31))),
        *(testing.frame((0,), 6, 5, 7), testing.frame((3,), 0, 5, 7), testing.frame((2, 3), 4, 5, 7)),
    ],
    ids=lambda at: str(at.shape),
)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
def test_of_every_size(at: rg.core.region.Frame, sink: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 3, 4)
    wanted = [fact for fact in every(at) if not isinstance(fact, (facts.Rows, facts.Columns))]
    wanted += [facts.Rows(range(at.nq)), facts.Columns(range(at.nk))]
    mask = rg.Causal() & rg.Window(before=2, after=0)
    hold(testing.draw(at, key_heads=at.heads // 2, mask=mask, sink=sink), tuple(wanted))


@pytest.mark.full
@hypothesis.given(
    some.integers(1, 40), some.integers(1, 40), some.integers(1, 17), some.integers(1, 17), some.booleans()
)
@hypothesis.settings(max_examples=15)
def test_of_any_size_and_tiling(nq: int, nk: int, rows: int, keys: int, sink: bool) -> None:
    at = testing.frame((2,), 3, nq, nk)
    with pytest.MonkeyPatch.context() as patch:
        tiles(patch, rows, keys)
        wanted = tuple(fact for fact in every(at) if not isinstance(fact, (facts.Rows, facts.Columns)))
        hold(testing.draw(at, mask=testing.masks(at)["Or"], sink=sink), wanted)


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("size", [(8, 8), (64, 64)], ids=str)
def test_entropy_of_scores_beyond_the_digits_of_the_lse(
    sink: bool, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of ±10⁴ that float32 holds exactly; their lse it holds to 0.0005."""
    tiles(monkeypatch, *size)
    call = testing.draw(AT, sink=sink)
    level = torch.where(torch.arange(23) % 2 == 0, 10_000.0, -10_000.0).double()[:, None]
    bias = level + torch.randint(-3000, 3000, (2, 6, 23, 29)).double() / 1024
    logits = torch.tensor([9998.0, 9999.0, 10_000.0, 10_001.0, -10_000.0, 0.0]).double() if sink else None
    call = replace(call, q=call.q * 0, score=rg.ScaledDot() >> rg.Bias(bias), sink=logits)
    hold(call, (facts.Entropy(), facts.RelativeEntropy(), facts.MaxScore()), torch.float32)


def test_a_small_entropy_keeps_its_digits() -> None:
    """One key far ahead of the rest: H = e^-d (d + 1) to first order, of weights that 1 - p has no digits for."""
    bias = torch.full((1, 30), -12.0).double()
    bias[0, 3] = 0
    call = testing.Case(*(torch.zeros(n, 4).double() for n in (1, 30, 30)), score=rg.ScaledDot() >> rg.Bias(bias))
    got = looked(call.leaves(torch.float32), (facts.Entropy(),))[facts.Entropy()]
    exact = looked(call, (facts.Entropy(),))[facts.Entropy()]
    assert abs(float(got / exact) - 1) < 100 * TOLERANCE[torch.float32]


def test_the_rest_of_a_top_keeps_its_digits() -> None:
    bias = torch.full((1, 30), -20.0).double()
    bias[0, 3] = 0
    call = testing.Case(*(torch.zeros(n, 4).double() for n in (1, 30, 30)), score=rg.ScaledDot() >> rg.Bias(bias))
    got = looked(call.leaves(torch.float32), (facts.Top(1),))[facts.Top(1)].rest
    exact = looked(call, (facts.Top(1),))[facts.Top(1)].rest
    assert abs(float(got / exact) - 1) < TOLERANCE[torch.float32] and 0 < float(exact) < 1e-7
