"""The rules by which heads are named, on weights where the answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report import heads
from regard.inspect.report.findings import above, findings, largest, percent, quoted, received, shown, striking
from regard.inspect.report.layer import Layer


def looking_at(keys: torch.Tensor, tokens: str, mask: rg.Mask = rg.Causal()) -> Layer:
    """A layer whose query i looks at keys[:, i] most, heads first."""
    n = keys.shape[-1]
    k = torch.eye(n)[None, None]
    return Layer.of(reports.call(20.0 * n**0.5 * torch.eye(n)[keys][None], k, mask), 0, tokens)


BACK = torch.arange(20).sub(1).clamp(min=0)


def test_neighbours_are_shares_of_rows() -> None:
    ahead = torch.arange(20).add(1).clamp(max=19)
    layer = looking_at(torch.stack([BACK, ahead, BACK * 0]), "x" * 20, rg.Everything())
    assert heads.looks_by(layer, -1).tolist() == pytest.approx([1, 0, 1 / 19])
    assert heads.looks_by(layer, 1).tolist() == pytest.approx([0, 1, 0])


def test_contexts_are_numbered_and_their_copies_found() -> None:
    ids = heads.context_ids("abcabdabc", 3)
    assert (ids[:2] == -1).all() and ids[8] == ids[2] and len(set(ids[2:8].tolist())) == 6
    assert heads.last_copies(ids).tolist() == [-1] * 8 + [2]
    assert heads.context_ids("ab", 5).tolist() == [-1, -1]


PASSAGE = "one passage"
TWICE = f"{PASSAGE}…{PASSAGE}"


def followers(tokens: str, context: int) -> torch.Tensor:
    """A key that followed the last copy of each context; the row's own, where there is none."""
    last = heads.last_copies(heads.context_ids(tokens, context))
    return torch.where(last >= 0, last + 1, torch.arange(len(tokens)))


def test_induction_is_a_share_of_the_rows_that_repeat() -> None:
    right = followers(TWICE, 2)
    half = torch.where(torch.arange(len(TWICE)) % 2 == 0, right, torch.arange(len(TWICE)))
    layer = looking_at(torch.stack([right, half, torch.arange(len(TWICE))]), TWICE)
    share, rows = heads.induction(layer, 2)
    assert rows == len(PASSAGE) - 1
    assert share.tolist() == [1.0, 0.5, 0.0]


def test_a_copy_out_of_reach_does_not_count() -> None:
    near = looking_at(followers(TWICE, 2)[None], TWICE, rg.Causal() & rg.Window(before=len(PASSAGE), after=0))
    far = looking_at(torch.arange(len(TWICE))[None], TWICE, rg.Causal() & rg.Window(before=5, after=0))
    assert heads.induction(near, 2)[1] == len(PASSAGE) - 1
    assert heads.induction(far, 2)[1] == 0


def test_few_rows_are_no_evidence() -> None:
    tokens = "abcd.abcd.xyz"
    layer = looking_at(followers(tokens, 2)[None], tokens)
    share, rows = heads.induction(layer, 2)
    assert 0 < rows < heads.EVIDENCE and share.tolist() == [0.0]
    assert any(
        "4 rows repeat 2 tokens, too few of this text to tell" in one.said for one in findings([layer], 2, "token")
    )


def said(layer: Layer, unit: str = "token") -> list[str]:
    return [one.said for one in findings([layer], 2, unit)]


def test_sentences_have_names_and_numbers() -> None:
    layer = looking_at(torch.stack([BACK, BACK * 0]), "A" + "bcdefghijklmnopqrst", rg.Everything())
    assert said(layer) == [
        "previous-token heads: L0H0 (100%)",
        "induction heads: no rows repeat 2 tokens, too few of this text to tell",
        "‘A’ (key 0) receives 55% of all mass, most from L0H1 (100%)",
        "max score 20.0 at L0H0 (next head 20.0)",
    ]
    assert all(one.rule for one in findings([layer], 2, "token"))


def test_a_first_key_that_few_may_see_has_its_own_sentence() -> None:
    layer = looking_at(BACK[None], "A" + "bcdefghijklmnopqrst", rg.Causal() & rg.Window(before=4, after=0))
    assert "the first byte receives 40% of the mass of the 5 rows that see it, most from L0H0 (40%)" in said(
        layer, "byte"
    )


def test_mass_is_of_all_rows_and_heads() -> None:
    layer = looking_at(torch.stack([BACK * 0, BACK * 0 + 3]), "x" * 20, rg.Everything())
    torch.testing.assert_close(received([layer])[[0, 3]], torch.tensor([0.5, 0.5]))
    assert float(received([layer, layer]).sum()) == pytest.approx(1)


def test_cross_attention_alone_is_told_without_neighbours() -> None:
    layer = Layer.of(reports.call(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)), 0)
    assert [one.split()[0] for one in said(layer)] == ["max"]


def test_layers_of_unlike_lengths_are_told_together() -> None:
    layers = [Layer.of(reports.call(*torch.randn(2, 1, 2, n, 8), rg.Causal()), 0, "x" * n) for n in (7, 11)]
    assert len(received(layers)) == 11
    assert len(findings(layers, 2, "token")) >= 3


def test_the_striking_head() -> None:
    keys = torch.stack([torch.arange(len(TWICE)), followers(TWICE, 2)])
    assert str(striking([looking_at(keys, TWICE)], 2, "token")[0]) == "L0H1 (100%)"
    layer = looking_at(torch.stack([BACK * 0, BACK]), "abcdefghijklmnopqrst")
    assert striking([layer], 2, "token")[1] == "looks one token back in 100% of rows"
    dull = replace(layer, top_keys=torch.full_like(layer.top_keys, 0), own=torch.full_like(layer.own, -1))
    assert striking([dull], 2, "token")[1].startswith("lowest mean entropy, ")


def test_heads_are_sorted_by_share() -> None:
    shares = [torch.tensor([0.1, 0.75]), torch.tensor([0.9])]
    assert [str(head) for head in above(shares, 0.5)] == ["L1H0 (90%)", "L0H1 (75%)"]
    assert str(largest(shares)) == "L1H0 (90%)"


def test_a_small_score_keeps_its_digits() -> None:
    layer = looking_at(BACK[None], "x" * 20)
    small = replace(layer, max_score=layer.max_score / 1000)
    assert said(small)[-1] == "max score 0.02 at L0H0" and said(layer)[-1] == "max score 20.0 at L0H0"


def test_tokens_and_numbers_are_readable() -> None:
    assert quoted("a\u202eb") == "‘a\\x202eb’" and shown("") == "␀"
    assert shown("averyverylongtoken_indeed") == "averyvery…n_indeed" and len(shown("x" * 99)) == 18
    assert percent(0.5) == "50%" and percent(0) == "0%"
