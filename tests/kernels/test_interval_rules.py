"""Masks whose intervals the kernels work out by themselves, from a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard as rg
from kernel_checks import check
from needed import needs_kernels
from regard import testing
from regard.backends.native.lower_mask import lower_mask
from regard.core.region import Frame
from regard.masks.intervals import IntervalRule

KEYS = torch.tensor([31, 0, 17])
FIRST = torch.tensor([0, 31, 5])
IDS = torch.tensor([0, 0, 1, 1, 1, 4, 4])
K_IDS = torch.tensor([0] * 5 + [1] * 11 + [2] * 3 + [4] * 12)
EACH = torch.stack([K_IDS, K_IDS.flip(0).sort().values // 2, torch.zeros(31, dtype=torch.int64)])
RULES: dict[str, rg.Mask] = {
    "causal": rg.Causal(),
    "window": rg.Window(5, 3),
    "bounded before": rg.Window(2, None),
    "lengths": rg.Lengths(keys=KEYS),
    "int32 lengths": rg.Lengths(keys=KEYS.int()),
    "first keys": rg.Lengths(first=FIRST),
    "int32 first keys": rg.Lengths(first=FIRST.int()),
    "causal from first keys": rg.Causal() & rg.Lengths(first=FIRST),
    "keys in the middle": rg.Lengths(keys=KEYS, first=FIRST) & rg.Window(11, 11),
    "padded queries": rg.Lengths(keys=KEYS, queries=torch.tensor([7, 3, 0])),
    "causal within lengths": rg.Causal() & rg.Lengths(keys=KEYS) & rg.Window(11, 11),
    "documents": rg.Documents(IDS, K_IDS),
    "documents a sequence": rg.Documents(IDS, EACH),
    "causal documents": rg.Documents(IDS, K_IDS) & rg.Causal() & rg.Lengths(keys=KEYS),
    "documents out of order": rg.Documents(IDS.flip(0), K_IDS.flip(0)),
    "causal documents out of order": rg.Documents(IDS, EACH.flip(-1)) & rg.Causal() & rg.Lengths(keys=KEYS),
    "documents from first keys": rg.Documents(IDS, K_IDS) & rg.Lengths(first=FIRST),
    "documents out of order from first keys": rg.Documents(IDS.flip(0), K_IDS.flip(0)) & rg.Lengths(first=FIRST),
    "far": rg.Window(1 << 40, 1 << 62),
}
PLACES: dict[str, Callable[[int], rg.Positions]] = {
    "head": lambda nq: rg.head(nq, 31),
    "tail": lambda nq: rg.tail(nq, 31),
    "tail of each sequence": lambda nq: rg.tail(nq, [31, 3, 18]),
    "tail of more": lambda nq: rg.Positions(torch.arange(nq), torch.arange(40, 71)),
}


def visible_by(rule: IntervalRule, frame: Frame) -> torch.Tensor:
    """The definition in IntervalRule's docstring, pair by pair."""
    at = frame.region()
    seen = torch.ones(frame.shape, dtype=torch.bool)
    if rule.before is not None:
        seen = seen & (at.i - at.j <= rule.before)
    if rule.after is not None:
        seen = seen & (at.j - at.i <= rule.after)
    if rule.keys is not None:
        seen = seen & (at.col < at.sequences(rule.keys))
    if rule.first is not None:
        seen = seen & (at.col >= at.sequences(rule.first))
    if rule.queries is not None:
        seen = seen & (at.row < at.sequences(rule.queries))
    if rule.q_ids is not None and rule.k_ids is not None:
        seen = seen & (at.queries(rule.q_ids) == at.keys(rule.k_ids))
    return seen


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_what_the_mask_says(name: str, at: str) -> None:
    rule, frame = RULES[name].rule(), Frame.of(7, 31, batch=(3,), heads=2, positions=PLACES[at](7))
    assert rule is not None
    expected = RULES[name].visible(frame.region()).expand(frame.shape)
    assert torch.equal(visible_by(rule, frame), expected)


def test_rules_of_every_mask_hold() -> None:
    frame = Frame.of(13, 29, batch=(2,), heads=3, positions=rg.tail(13, 29))
    found = {name: mask for name, mask in testing.masks(frame).items() if mask.rule() is not None}
    assert len(found) > 5
    for name, mask in found.items():
        rule = mask.rule()
        assert rule is not None
        assert torch.equal(visible_by(rule, frame), mask.visible(frame.region()).expand(frame.shape)), name


@needs_kernels
@pytest.mark.parametrize("nq", [7, 1])
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("name", RULES)
def test_the_kernels_follow_a_rule(name: str, at: str, nq: int) -> None:
    places, mask = PLACES[at](nq), RULES[name]
    if nq == 1:
        mask = mask if "documents" not in name and "queries" not in name else rg.Causal() & rg.Lengths(keys=KEYS)
    q, k, v = torch.randn(3, 4, nq, 16), torch.randn(3, 2, 31, 16), torch.randn(3, 2, 31, 5)
    case = testing.Case(q, k, v, rg.ScaledDot(), mask=mask, positions=places)
    assert "start" not in lower_mask(case.problem, (64, 128))
    check(case)


@needs_kernels
def test_documents_that_come_in_another_order_later() -> None:
    """The plan of documents in order serves others too."""
    x = torch.randn(1, 2, 6, 8)
    for ids in ([0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 2, 2], [5, 5, 5, 7, 7, 9]):
        mask = rg.Documents(torch.tensor(ids))
        expected = rg.attention(x, x, x, mask=mask, backend=rg.Reference())
        torch.testing.assert_close(rg.attention(x, x, x, mask=mask), expected)


@needs_kernels
@pytest.mark.parametrize("name", ["keys", "queries", "first"])
@pytest.mark.parametrize(("wrong", "said"), [(7, "2 to 7"), (-1, "-1 to 2")])
def test_a_number_that_is_wrong_later(name: str, wrong: int, said: str) -> None:
    x = torch.randn(2, 2, 6, 8)
    for _ in range(2):
        rg.attention(x, x, x, mask=rg.Lengths(**{name: torch.tensor([6, 2])}))
    with pytest.raises(rg.ShapeError, match=rf"Lengths\.{name} holds {said}; expected numbers from 0 to 6"):
        rg.attention(x, x, x, mask=rg.Lengths(**{name: torch.tensor([wrong, 2])}))


@needs_kernels
def test_dropout_draws_one_seed_whatever_the_mask() -> None:
    """A call that its plan refuses must not move torch's generator twice."""
    x, ids = torch.randn(1, 2, 6, 8), torch.tensor([0, 1, 0, 1, 2, 2])
    drop = rg.Dropout(0.5)

    def drawn() -> torch.Tensor:
        torch.manual_seed(7)
        rg.attention(x, x, x, mask=rg.Documents(ids), dropout=drop)
        return torch.randint(1 << 40, ())

    first = drawn()
    rg.attention(x, x, x, mask=rg.Documents(ids.sort().values), dropout=drop)
    assert drawn() == first


HEADS = torch.arange(5)
PLACED = {
    "head": rg.head(5, 9),
    "tail": rg.tail(5, 9),
    "tail of each sequence": rg.tail(5, [9, 6]),
    "consecutive tensors": rg.Positions(HEADS + 2, torch.arange(9)),
    "far apart": rg.Positions(HEADS + 100, torch.arange(9) * 30),
    "with gaps": rg.Positions(HEADS * 2, torch.arange(9) + 3),
}
# with a rule, with none, and with tensors that decide
MOVING = {
    "Causal": rg.Causal(),
    "Window": rg.Window(2, 1),
    "prefix": rg.Prefix(4),
    "prefix a sequence": rg.Prefix(torch.tensor([3, 5])),
    "causal or prefix": rg.Causal() | rg.Prefix(2),
    "not causal": ~rg.Causal(),
    "lengths": rg.Causal() & rg.Lengths(keys=torch.tensor([6, 9])),
    "lengths in a list": rg.Causal() & rg.Lengths([6, 9]),
    "documents": rg.Causal() & rg.Documents(HEADS // 2, torch.arange(9) // 4),
    "dense": rg.Causal() & rg.Dense(torch.arange(45).reshape(5, 9) % 7 > 0),
}


@needs_kernels
@pytest.mark.parametrize("drop", [None, rg.Dropout(0.3, seed=5)], ids=["", "dropout"])
@pytest.mark.parametrize("name", MOVING)
def test_positions_that_change_while_all_else_is_the_same(name: str, drop: rg.Dropout | None) -> None:
    """Calls of one structure after each other, in both orders: each sees what its own positions say, both ways."""
    inputs = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 3)
    given: dict[str, Any] = {"mask": MOVING[name], "dropout": drop}
    for at in (*PLACED, *reversed(PLACED)):
        found = list[tuple[torch.Tensor, ...]]()
        for backend in (None, rg.Reference()):
            q, k, v = (t.clone().requires_grad_() for t in inputs)
            out = rg.attention(q, k, v, **given, positions=PLACED[at], backend=backend)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        with torch.no_grad():  # the plan without gradients is another
            assert torch.equal(rg.attention(*inputs, **given, positions=PLACED[at]), found[0][0]), at
        for mine, right in zip(*found, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5, msg=lambda text, at=at: f"{at}: {text}")


@pytest.mark.parametrize("far", [1 << 61, -(1 << 61), 1 << 62, -(1 << 62), (1 << 63) - 9, -(1 << 63)])
def test_positions_as_far_apart_as_int64_can_hold(far: int) -> None:
    q, at = torch.randn(1, 2, 6, 8), torch.arange(6)
    here, there = rg.Positions(at, at), rg.Positions(at + far, at)
    whole = rg.attention(q, q, q)
    seen = {"causal": far > 0, "ahead": far < 0, "near": False, "all": True}
    masks = {
        "causal": rg.Causal(),
        "ahead": rg.Window(before=0, after=None),
        "near": rg.Window(3, 3),
        "all": rg.Window(before=1 << 70, after=1 << 70),
    }
    for name, mask in masks.items():
        for _ in range(2):
            rg.attention(q, q, q, mask=mask, positions=here)
            out = rg.attention(q, q, q, mask=mask, positions=there)
            torch.testing.assert_close(out, whole if seen[name] else torch.zeros_like(out))
