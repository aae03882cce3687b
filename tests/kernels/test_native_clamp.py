"""Clamp on the native kernels: among other modifiers, with gradients, over few rows, in pages and looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regard as rg
from fact_checks import hold, looked
from kernel_checks import check, compare
from needed import needs_kernels
from regard import facts, testing
from regard.nn import PagedCache

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
    "keys in parts": testing.frame(nq=131, nk=1301, batch=(1,), heads=6),
    "a row": testing.frame(nq=1, nk=149, batch=(2,), heads=6),
    "few rows": testing.frame(nq=3, nk=150, batch=(2,), heads=6),
}
CLAMP = rg.Clamp(-0.4, 0.6)
SCORES = {
    "alone": rg.ScaledDot() >> CLAMP,
    "below": rg.ScaledDot() >> rg.Clamp(low=-0.1),
    "above": rg.Dot() >> rg.Clamp(high=0.3),
    "and slopes": rg.ScaledDot() >> CLAMP >> rg.Alibi(torch.full((6,), 0.05)),
    "after a cap": rg.ScaledDot() >> rg.SoftCap(2.0) >> CLAMP,
    "after a temperature": rg.ScaledDot() >> rg.Temperature(0.3) >> CLAMP >> rg.SoftCap(1.0),
    "of a cosine": rg.Cosine(3.0) >> CLAMP,
}


def draw(size: str, name: str, mask: rg.Mask = rg.Window(90, 2)) -> testing.Case:
    return testing.draw(FRAMES[size], key_heads=3, dk=24, dv=19, score=SCORES[name], mask=mask, sink=True)


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", SCORES)
def test_forward(isa: str, name: str, size: str) -> None:
    for mask in (rg.Window(90, 2), rg.Dilated(3)):
        case = draw(size, name, mask)
        compare(case)
        compare(replace(case, sink=None), torch.bfloat16)


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", SCORES)
def test_gradients(isa: str, name: str, size: str) -> None:
    check(draw(size, name))


@pytest.mark.parametrize("size", ["blocks", "few rows"])
def test_additive_scores(isa: str, size: str) -> None:
    """Theirs are other kernels."""
    score = testing.scores(FRAMES[size], 24)["Additive"].stages[0] >> CLAMP
    case = testing.draw(FRAMES[size], dk=24, dv=16, score=score, mask=rg.Window(90, 2))
    compare(case)
    check(case)


def test_facts(isa: str) -> None:
    asked = (facts.MaxScore(), facts.Entropy(), facts.Received())
    case = draw("blocks", "and slopes")
    seen = looked(case.leaves(torch.float32), asked)
    assert {seen.way(fact) for fact in asked} == {"the native kernels"}
    hold(case, asked)


def test_nan_stays_and_infinite_scores_are_clamped(isa: str) -> None:
    q, k, v = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 40, 4), torch.randn(1, 1, 40, 3)
    score = rg.Dot() >> rg.Clamp(-1, 1)
    k[..., 7, :], k[..., 8, :] = 1e38, -1e38
    found, right = (rg.attention(q, k, v, score=score, backend=b) for b in (rg.Native(), rg.Reference()))
    torch.testing.assert_close(found, right)
    k[..., 9, 0] = torch.nan
    assert rg.attention(q, k, v, score=score, backend=rg.Native()).isnan().all()


def test_keys_in_pages(isa: str) -> None:
    cache = PagedCache(2, 3, 40, 8, 24, 19)
    k, v, q = torch.randn(2, 3, 50, 24), torch.randn(2, 3, 50, 19), torch.randn(2, 6, 1, 24)
    keys, values = cache.append(k, v)
    found = rg.attention(q, keys, values, score=SCORES["alone"], backend=rg.Native())
    torch.testing.assert_close(found, rg.attention(q, k, v, score=SCORES["alone"], backend=rg.Reference()))


def test_where_it_comes_after_what_is_added_explain_says_so() -> None:
    x = torch.randn(1, 1, 4, 8)
    plan = str(rg.explain(x, x, x, score=rg.ScaledDot() >> rg.Alibi(torch.tensor([0.1])) >> CLAMP))
    assert "its clamp comes before what is added to the scores" in plan
