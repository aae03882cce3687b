"""Tiled against Reference, for what the matrix holds fixed: axes, widths, sinks, dropout, positions, tile sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regard as rg
from regard import testing
from regard.backends.base import Backend
from regard.core.dtypes import FLOATING

FRAMES = {
    "two axes": testing.frame((), 1, headed=False),
    "three axes": testing.frame((5,), 1, headed=False),
    "one batch axis": testing.frame((5,), 6),
    "two batch axes": testing.frame((2, 3), 6),
    "three batch axes": testing.frame((2, 1, 3), 2),
    "more queries than keys": testing.frame((5,), 6, nq=19, nk=7),
    "one query": testing.frame((5,), 6, nq=1),
    "one key": testing.frame((5,), 6, nk=1),
}
KINDS = ("Causal", "Dense", "Dense 2", "Documents 2", "Lengths 2", "Prefix 2", "Where", "nothing")
SCORES = ("ScaledDot 2", "Additive 2", "Distance", "Alibi", "Bias", "RelativeBias", "Pipeline")
TILED = rg.Tiled(rows=7, keys=11)


@pytest.mark.parametrize("axes", FRAMES)
def test_axes(axes: str) -> None:
    at = FRAMES[axes]
    masks, scores = testing.masks(at), testing.scores(at)
    for mask in KINDS:
        testing.check(testing.draw(at, mask=masks[mask]), TILED)
    for score in SCORES:
        testing.check(testing.draw(at, score=scores[score], mask=masks["Causal"]), TILED)


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize(("dk", "dv"), [(1, 1), (1, 5), (11, 2), (3, 129)])
def test_heads_and_widths(key_heads: int, dk: int, dv: int) -> None:
    for score in (rg.ScaledDot(), rg.Additive(None, None, torch.randn(dk, dtype=torch.float64)), rg.Cosine(3.0)):
        testing.check(testing.draw(testing.frame(), key_heads=key_heads, dk=dk, dv=dv, score=score), TILED)


@pytest.mark.parametrize("rows", [1, 2, 13, 99, None])
@pytest.mark.parametrize("keys", [1, 5, 17, 99, None])
def test_every_tile_size_is_exact(rows: int | None, keys: int | None) -> None:
    at = testing.frame()
    case = testing.draw(at, mask=testing.masks(at)["And"], score=testing.scores(at)["Pipeline"], sink=True)
    testing.check(case, rg.Tiled(rows, keys))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("mask", ["Everything", "Lengths 2", "nothing"])
def test_sink_and_dropout(mask: str, dtype: torch.dtype) -> None:
    at = testing.frame((2, 3))
    case = testing.draw(at, mask=testing.masks(at)[mask], sink=True, dropout=rg.Dropout(0.4, seed=3))
    for backend in (TILED, rg.Tiled()):
        testing.check(case, backend, dtype)


@pytest.mark.parametrize("lead", [(), (1,), (5,)])
def test_positions_of_any_rank_and_order(lead: tuple[int, ...]) -> None:
    q, k = torch.randint(-9, 9, (*lead, 13)), torch.randint(-9, 9, (*lead, 17))
    at = replace(testing.frame(), positions=rg.Positions(q, k))
    masks, scores = testing.masks(at), testing.scores(at)
    for mask in ("Causal", "Window", "Prefix", "Dilated", "Where", "Or"):
        testing.check(testing.draw(at, mask=masks[mask], score=scores["RelativeBias 2"]), TILED)
    testing.check(testing.draw(at, score=scores["Alibi"], dropout=rg.Dropout(0.4, seed=3)), TILED)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_positions_of_narrow_integers(dtype: torch.dtype) -> None:
    wide = rg.tail(13, 17)
    narrow = rg.Positions(wide.q.to(dtype), wide.k.to(dtype))
    case = testing.draw(testing.frame(), dropout=rg.Dropout(0.4, seed=3), mask=rg.Window(3, 2))
    case = replace(case, score=rg.ScaledDot() >> rg.Alibi(rg.Alibi.geometric(6).double()))
    a, b = (testing.answers(replace(case, positions=p), TILED, torch.float64) for p in (wide, narrow))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_positions_past_two_to_the_31() -> None:
    near, far = (rg.Positions(torch.arange(4, 17) + far, torch.arange(17) + far) for far in (0, 1 << 40))
    at = testing.frame()
    scores = testing.scores(at)
    for score in ("Alibi", "RelativeBias", "RelativeBias 2"):
        case = testing.draw(at, score=scores[score], mask=rg.Window(before=3, after=1))
        a, b = (testing.answers(replace(case, positions=p), TILED, torch.float64) for p in (near, far))
        assert all(torch.equal(a[name], b[name]) for name in a)
    case = replace(testing.draw(at, dropout=rg.Dropout(0.5, seed=1)), positions=far)
    testing.check(case, TILED)


@pytest.mark.parametrize("shared", ["q", "k", "v"])
def test_batch_axes_of_size_one_are_shared(shared: str) -> None:
    case = testing.draw(testing.frame((2, 3)))
    testing.check(replace(case, **{shared: getattr(case, shared)[:1, :, :]}), TILED)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 11, 12, 21, 22, 23, 33])
def test_lengths_at_every_tile_edge(n: int) -> None:
    at = testing.frame((3,), 2, nq=23, nk=33)
    lengths = rg.Lengths(keys=torch.tensor([n, 33 - n, 33]), queries=torch.tensor([23, min(n, 23), 7]))
    testing.check(testing.draw(at, mask=lengths), TILED)


@pytest.mark.parametrize("kind", [*testing.masks(testing.frame()), *testing.scores(testing.frame())])
@pytest.mark.parametrize("zero", ["batch", "heads", "nq", "nk", "dk", "dv"])
@pytest.mark.parametrize("backend", [TILED, rg.Reference(), rg.Tiled(), None], ids=repr)
def test_axes_of_size_zero(zero: str, backend: Backend | None, kind: str) -> None:
    size = {"batch": 5, "heads": 6, "nq": 13, "nk": 17, "dk": 7, "dv": 3, zero: 0}
    at = testing.frame((size["batch"],), size["heads"], size["nq"], size["nk"])
    masks, scores = testing.masks(at), testing.scores(at, size["dk"])
    given = {"mask": masks[kind]} if kind in masks else {"score": scores[kind], "sink": True}
    testing.check(testing.draw(at, dk=size["dk"], dv=size["dv"], **given), backend)


def test_it_skips_what_nobody_sees() -> None:
    x = torch.zeros(64, 8)
    plan = rg.explain(x, x, x, mask=rg.Causal(), backend=rg.Tiled(rows=16, keys=16))
    assert dict(plan.facts)["tiles"] == "10 of 16 tiles of 16 × 16 computed, 6 skipped"


def test_wide_additive_scores_take_the_plain_way() -> None:
    at, w = testing.frame(), torch.randn(7, dtype=torch.float64)
    for scale in (1e-8, 1.0, 9.0, 40.0, 1e3, 1e200):
        case = testing.draw(at, score=rg.Additive(None, None, w))
        testing.check(replace(case, q=case.q * scale, k=case.k * -scale), TILED)


@pytest.mark.parametrize("size", [{"rows": 0}, {"keys": -1}])
def test_a_tile_has_a_size(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"Tiled\((rows|keys)=.*\): expected a tile of 1 or more, or None"):
        rg.Tiled(**size)
