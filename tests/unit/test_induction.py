"""Induction heads are named where a text shows them, and not where chance, a run of spaces or a fixed distance does."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.demo import model as byte_model
from regard.demo.reading import read
from regard.inspect.report.findings import findings
from regard.inspect.report.induction import (
    EVIDENCE,
    context_ids,
    induction,
    last_copies,
    periodic,
    wilson_interval,
)
from regard.inspect.report.layer import Layer
from test_findings import looking_at

PASSAGE = "one passage"
TWICE = f"{PASSAGE}…{PASSAGE}"
LICENCE = (Path(__file__).parents[2] / "LICENSE").read_bytes()[:4000]


def test_contexts_are_numbered_and_their_copies_found() -> None:
    ids = context_ids("abcabdabc", 3)
    assert (ids[:2] == -1).all() and ids[8] == ids[2] and len(set(ids[2:8].tolist())) == 6
    assert last_copies(ids).tolist() == [-1] * 8 + [2]
    assert context_ids("ab", 5).tolist() == [-1, -1]


def followers(tokens: str, context: int) -> torch.Tensor:
    """A key that followed the last copy of each context; the row's own, where there is none."""
    last = last_copies(context_ids(tokens, context))
    return torch.where(last >= 0, last + 1, torch.arange(len(tokens)))


def test_induction_is_a_share_of_the_rows_that_repeat() -> None:
    right = followers(TWICE, 2)
    half = torch.where(torch.arange(len(TWICE)) % 2 == 0, right, torch.arange(len(TWICE)))
    layer = looking_at(torch.stack([right, half, torch.arange(len(TWICE))]), TWICE)
    found = induction(layer, 2)
    assert found.rows == found.contexts == len(PASSAGE) - 1
    assert found.share.tolist() == [1.0, 0.5, 0.0] and (found.chance < 0.1).all()


def test_a_copy_out_of_reach_does_not_count() -> None:
    near = looking_at(followers(TWICE, 2)[None], TWICE, rg.Causal() & rg.Window(before=len(PASSAGE), after=0))
    far = looking_at(torch.arange(len(TWICE))[None], TWICE, rg.Causal() & rg.Window(before=5, after=0))
    assert induction(near, 2).rows == len(PASSAGE) - 1
    assert induction(far, 2).rows == 0


def test_few_rows_are_no_evidence() -> None:
    tokens = "abcd.abcd.xyz"
    layer = looking_at(followers(tokens, 2)[None], tokens)
    found = induction(layer, 2)
    assert 0 < found.rows < EVIDENCE and found.share.tolist() == [0.0]
    assert "induction heads: 4 rows repeat 2 tokens, too few in this text for a finding" in said(layer)


def said(layer: Layer, context: int = 2) -> list[str]:
    return [one.said for one in findings([layer], context, "token") if "induction" in one.said]


def back(tokens: str, distance: int) -> torch.Tensor:
    """The key that stands so many tokens before each one."""
    return torch.arange(len(tokens)).sub(distance).clamp(min=0)


@pytest.mark.parametrize("tokens", [" " * 300, "ab" * 150, "| --- " * 50, f"{PASSAGE}{' ' * 200}the end"])
def test_in_a_run_nothing_is_told(tokens: str) -> None:
    """There, what followed a copy, the token before and the row itself cannot be told apart."""
    layer = looking_at(torch.stack([back(tokens, d) for d in (0, 1, 2, 5)]), tokens)
    assert induction(layer, 2).rows < EVIDENCE
    assert "too few" in said(layer)[0]


def test_where_a_run_begins_and_ends() -> None:
    text = "xyz" + "-" * 5 + "abcdefabcdefg"
    runs = periodic(text, last_copies(context_ids(text, 1)))
    assert runs.nonzero().flatten().tolist() == [5, 6, 7]
    twice = TWICE + PASSAGE[:4]
    assert not periodic(twice, last_copies(context_ids(twice, 2))).any()


def test_a_fixed_distance_is_no_induction() -> None:
    """A head that looks back by the distance that many copies happen to have is expected to hit them."""
    random = torch.Generator().manual_seed(3)
    line = "".join(chr(97 + int(n)) for n in torch.randint(26, (12,), generator=random))
    noise = "".join(chr(0x4E00 + n) for n in range(200))
    tokens = noise + "".join(f"{line}{chr(0x3B1 + n)}" for n in range(12))
    copies = looking_at(torch.stack([followers(tokens, 2), back(tokens, 12)]), tokens)
    found = induction(copies, 2)
    assert found.share.tolist() == pytest.approx([1, 1], abs=0.01)
    assert found.chance[1] > 0.9 > 0.5 > found.chance[0]
    assert "L0H0" in said(copies)[0] and "L0H1" not in said(copies)[0]


def test_a_head_that_always_looks_at_one_place_is_none() -> None:
    tokens = "ab" + "".join(f"{chr(0x4E00 + n)}ab" for n in range(40))
    layer = looking_at(torch.full((1, len(tokens)), 2), tokens)
    assert induction(layer, 2).share.tolist() == pytest.approx(induction(layer, 2).chance.tolist(), abs=0.1)
    assert said(layer)[0].startswith("induction heads: none")


def test_an_interval_is_wide_for_few_contexts_and_for_many_heads() -> None:
    share = torch.tensor([0.3])
    assert wilson_interval(share, 10)[0] < wilson_interval(share, 1000)[0] < share < wilson_interval(share, 10)[1]
    assert wilson_interval(share, 100, heads=144)[0] < wilson_interval(share, 100)[0]
    assert [float(x) for x in wilson_interval(share, 0)] == [0, 1]


@pytest.mark.parametrize("name", ["licence", "random, twice"])
def test_the_byte_model_has_one(name: str) -> None:
    random = torch.randint(97, 123, (120,), generator=torch.Generator().manual_seed(0))
    text = LICENCE if name == "licence" else bytes(random.tolist() * 2)
    report = read(byte_model.load(), text)
    (found,) = (one for one in report.findings if one.said.startswith("induction"))
    assert [head.name for head in found.heads] == ["L3H1"]
    assert found.heads[0].interval is not None
    low, high = found.heads[0].interval
    assert 0.3 < low < found.heads[0].value < high <= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_model_of_random_weights_has_none(seed: int) -> None:
    torch.manual_seed(seed)
    model = copy.deepcopy(byte_model.load())
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.2)
    report = read(model, LICENCE)
    assert [one.heads for one in report.findings if "heads" in one.said] == [(), ()]


def test_spaces_have_none() -> None:
    report = read(byte_model.load(), b" " * 300)
    assert "induction heads: no rows repeat 8 bytes, too few in this text for a finding" in [
        one.said for one in report.findings
    ]
