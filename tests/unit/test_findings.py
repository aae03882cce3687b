"""The rules by which heads are named, on weights where the answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report import heads
from regard.inspect.report.findings import Shares, findings, largest, percent, quoted, received, shown, striking
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
    back, chance, rows = heads.looks_by(layer, -1)
    assert back.tolist() == pytest.approx([1, 0, 1 / 19])
    assert chance.tolist() == pytest.approx([1 / 20] * 3) and rows == 19
    assert heads.looks_by(layer, 1)[0].tolist() == pytest.approx([0, 1, 0])


def said(layer: Layer, unit: str = "token") -> list[str]:
    return [one.said for one in findings([layer], 2, unit)]


def test_sentences_have_names_and_numbers() -> None:
    layer = looking_at(torch.stack([BACK, BACK * 0]), "A" + "bcdefghijklmnopqrst", rg.Everything())
    assert said(layer) == [
        "previous-token heads: L0H0 (100%, 79 to 100%)",
        "induction heads: no rows repeat 2 tokens, too few in this text for a finding",
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
    passage = "one passage…one passage"
    copies = torch.arange(len(passage)).sub(11).clamp(min=0)
    keys = torch.stack([torch.arange(len(passage)), copies])
    assert str(striking([looking_at(keys, passage)], 2, "token")[0]) == "L0H1 (100%, 67 to 100%)"
    layer = looking_at(torch.stack([BACK * 0, BACK]), "abcdefghijklmnopqrst")
    assert striking([layer], 2, "token")[1] == "looks one token back in 100% of rows"
    dull = replace(layer, top_keys=torch.full_like(layer.top_keys, 0), own=torch.full_like(layer.own, -1))
    assert striking([dull], 2, "token")[1].startswith("lowest mean entropy, ")


def test_heads_are_sorted_by_share_and_named_where_they_are_above_chance() -> None:
    share, low = (
        [torch.tensor([0.1, 0.75, 0.8]), torch.tensor([0.9])],
        [torch.tensor([0.0, 0.6, 0.7]), torch.tensor([0.8])],
    )
    high, layers = [one + 0.2 for one in low], reports.report(heads=(3, 1)).layers
    shares = Shares(share, [torch.tensor([0.0, 0.5, 0.75]), torch.tensor([0.0])], low, high, layers)
    assert [str(head) for head in shares.above(0.5)] == ["L1H0 (90%, 80 to 100%)", "L0H1 (75%, 60 to 80%)"]
    assert str(largest(layers, share)) == "L1H0 (90%)"


def test_two_rows_are_no_evidence_of_a_neighbour() -> None:
    layer = looking_at(torch.tensor([[0, 0, 1]]), "abc")
    assert said(layer)[0] == "previous-token heads: none; the nearest is L0H0 (100%)"


def test_a_small_score_keeps_its_digits() -> None:
    layer = looking_at(BACK[None], "x" * 20)
    small = replace(layer, max_score=layer.max_score / 1000)
    assert said(small)[-1] == "max score 0.02 at L0H0" and said(layer)[-1] == "max score 20.0 at L0H0"


def test_tokens_and_numbers_are_readable() -> None:
    assert quoted("a\u202eb") == "‘a\\x202eb’" and shown("") == "␀"
    assert shown("averyverylongtoken_indeed") == "averyvery…n_indeed" and len(shown("x" * 99)) == 18
    assert percent(0.5) == "50%" and percent(0) == "0%"
