"""Flex: what it refuses, and that masks and modifiers reach FlexAttention as they are; eager, on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import regard as rg
from regard import testing
from regard.backends.flex import BLOCK, _structure, block_mask

FLEX = rg.Flex(devices=("cpu",))
AT = testing.frame((2, 3))
MASKS, SCORES = testing.masks(AT), testing.scores(AT)
TAKEN = [name for name, s in SCORES.items() if isinstance(s.stages[0], (rg.Dot, rg.ScaledDot, rg.Bilinear, rg.Cosine))]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


def compare(case: testing.Case) -> None:
    """Values and lse: FlexAttention has no backward on a CPU."""
    given = {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}
    with torch.no_grad():
        assert FLEX.why_not(case.problem, True) is None
        out = [rg.attention(case.q, case.k, case.v, backend=b, **given) for b in (FLEX, rg.Reference())]
        lse = [
            rg.attention_state(case.q, case.k, case.v, backend=b, **given).finish()[1] for b in (FLEX, rg.Reference())
        ]
    assert testing.error(*out) < 1e-12 and testing.error(*lse) < 1e-12


@pytest.fixture
def untraced() -> Iterator[None]:
    """Also in eager mode flex_attention is traced before it runs, which takes most of its time."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("score", TAKEN)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_and_score(mask: str, score: str) -> None:
    compare(testing.draw(AT, score=SCORES[score], mask=MASKS[mask], sink=True))


@pytest.mark.full
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_traced(mask: str) -> None:
    compare(testing.draw(AT, mask=MASKS[mask], sink=True))


@pytest.mark.full
@pytest.mark.parametrize("score", TAKEN)
def test_every_score_is_traced(score: str) -> None:
    compare(testing.draw(AT, score=SCORES[score], mask=MASKS["Or"]))


AXES = [
    testing.frame((), 1, headed=False),
    testing.frame((2, 1, 3), 2),
    testing.frame((5,), 1, headed=False),
    testing.frame((1,), 6),
    testing.frame((5,), 6, nq=1),
    testing.frame((5,), 6, nq=19, nk=1),
]


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("at", AXES, ids=lambda at: str(at.shape))
def test_axes(at: testing.Frame) -> None:
    masks, scores = testing.masks(at), testing.scores(at)
    for mask in ("Dense", "Lengths 2", "Prefix 2", "Where"):
        compare(testing.draw(at, mask=masks[mask], score=scores["Pipeline"]))


@pytest.mark.full
def test_more_blocks_than_one() -> None:
    at = testing.frame((2,), 2, nq=301, nk=397)
    masks, scores = testing.masks(at), testing.scores(at)
    for mask, score in (("Window", "ScaledDot"), ("Lengths 2", "Pipeline"), ("Dense", "ScaledDot")):
        compare(testing.draw(at, key_heads=1, mask=masks[mask], score=scores[score]))


@pytest.mark.parametrize("mask", MASKS)
def test_the_block_table_is_the_mask_s_cover(mask: str) -> None:
    at = testing.frame((2, 3), 2, nq=301, nk=397)
    case = testing.draw(at, mask=testing.masks(at)[mask])
    cover = case.mask.cover(at.tiling(BLOCK, BLOCK)).expand(2, 3, 2, 3, 4).reshape(6, 2, 3, 4)
    table = block_mask(case.problem)
    for counts, order, kind in (
        (table.kv_num_blocks, table.kv_indices, rg.Cover.SOME),
        (table.full_kv_num_blocks, table.full_kv_indices, rg.Cover.ALL),
    ):
        found = torch.zeros(6, 2, 3, 4, dtype=torch.bool)
        for b, h, i in torch.cartesian_prod(torch.arange(6), torch.arange(2), torch.arange(3)).tolist():
            row = b, h % order.shape[1], i  # one table for all heads, or one each
            found[b, h, i, order[row][: counts[row]].long()] = True
        assert torch.equal(found, cover == kind)


def test_the_block_table_is_made_once_where_nothing_in_it_can_change() -> None:
    def twice(mask: rg.Mask, positions: rg.Positions | None = None) -> bool:
        made = [block_mask(replace(testing.draw(AT, mask=mask), positions=positions).problem) for _ in range(2)]
        return made[0] is made[1]

    assert twice(rg.Causal() & rg.Window(before=3, after=0), rg.tail(13, 17))
    assert not twice(rg.Causal(), rg.Positions(2 * torch.arange(4, 17), torch.arange(17)))
    assert not twice(rg.Dense(torch.ones(13, 17, dtype=torch.bool)))
    assert not twice(rg.Where(lambda b, h, i, j: i >= j), rg.tail(13, 17))
    with torch.inference_mode():
        made = block_mask(replace(testing.draw(AT, mask=rg.Causal()), positions=rg.tail(13, 17)).problem)
    assert not made.kv_indices.is_inference()


def test_the_blocks_of_each_block_of_keys_are_listed_for_a_backward_alone() -> None:
    problem = testing.draw(AT, mask=rg.Dense(torch.ones(13, 17, dtype=torch.bool))).problem
    assert block_mask(problem).q_indices is not None
    with torch.no_grad():
        assert block_mask(problem).q_indices is None


def test_calls_of_one_structure_share_what_is_compiled() -> None:
    def structure(score: rg.Score = rg.ScaledDot(), mask: rg.Mask = rg.Causal(), n: int = 13) -> object:
        return _structure(testing.draw(testing.frame(nq=n, nk=n), score=score, mask=mask).problem)

    def near(n: int) -> rg.Mask:
        return rg.Where(lambda b, h, i, j: i - j < n)

    def of(fn: Callable[..., torch.Tensor]) -> rg.Mask:
        return rg.Where(lambda b, h, i, j: fn(i, j))

    def capped(cap: float) -> rg.Score:
        return rg.ScaledDot() >> rg.SoftCap(cap)

    assert structure(n=13) == structure(n=29) and hash(structure()) == hash(structure())
    assert structure(capped(3.0)) == structure(capped(5.0)) != structure()
    assert structure(mask=near(3)) == structure(mask=near(4)) != structure(mask=rg.Where(lambda b, h, i, j: i > j))
    assert structure(mask=of(torch.ge)) != structure(mask=of(torch.gt))
    assert structure(n=1) != structure() != structure(mask=rg.Window(before=3, after=0))


def test_refusals() -> None:
    case = testing.draw(AT)

    def why(**given: object) -> str | None:
        return FLEX.why_not(replace(case, **given).problem, True)

    assert rg.Flex().why_not(case.problem, True) == "it serves cuda tensors; these are on cpu"
    assert why(dropout=rg.Dropout(0.1)) == "it has no dropout"
    assert why(score=rg.Distance()) == "its scores begin with a dot product, not with Distance()"
    slopes = torch.ones(6, dtype=torch.float64, requires_grad=True)
    learned = rg.ScaledDot() >> rg.Alibi(slopes)
    assert why(score=learned) == "a tensor of the score requires a gradient"
    with torch.no_grad():
        assert why(score=learned) is None
    for size in ({"nq": 0}, {"nk": 0}, {"heads": 0}, {"batch": (0,)}):
        assert FLEX.why_not(testing.draw(testing.frame(**size)).problem, True) == "an axis is empty"
    for name in "qkv":
        bad = getattr(case, name).clone()
        bad[1, 0, 0, 3, 2] = math.inf
        said = why(**{name: bad}, mask=rg.Causal())
        assert said == "it lets what is not finite leak out of masked places"
        assert why(**{name: bad}) is None


def test_explain_names_what_attention_takes() -> None:
    q = torch.randn(1, 6, 5, 16)
    learned = {"score": rg.ScaledDot() >> rg.Alibi(torch.ones(6, requires_grad=True)), "backend": FLEX}
    for call in (rg.attention, rg.explain):
        with pytest.raises(rg.Unsupported, match="a tensor of the score requires a gradient"):
            call(q, q, q, **learned)
        with torch.no_grad():
            call(q, q, q, **learned)


@dataclass(frozen=True)
class Centred(rg.Modifier):
    def modify(self, s: torch.Tensor, at: Any) -> torch.Tensor:
        return s - s.mean(-1, keepdim=True)


def test_a_function_of_a_whole_row_is_refused() -> None:
    """The mean of one number is the number."""
    q = torch.randn(1, 2, 5, 16)
    last = rg.Where(lambda b, h, i, j: j == j.amax(-1, keepdim=True))
    for given in ({"score": rg.ScaledDot() >> Centred()}, {"mask": last}):
        with torch.no_grad(), pytest.raises(rg.Unsupported, match="of a pair depends on other pairs"):
            rg.attention(q, q, q, **given, backend=FLEX)


def test_it_prints_as_it_is_written() -> None:
    assert repr(rg.Flex()) == "Flex()" and eval(repr(FLEX), {"Flex": rg.Flex}) == FLEX
