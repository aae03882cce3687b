"""What notebooks and prompts show of results about heads, findings, grids, lint and states: tables, short lines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.demo.model import load
from regard.inspect.lint.defect import Defect, Lint
from regard.inspect.report.findings import Finding, Findings
from regard.inspect.report.grids import Grid
from test_html import HOSTILE, parsed, pictures, words

REPORT = reports.report(2, 3)
RESULTS = (*reports.results(REPORT), *reports.results_of_tokens(REPORT))


@pytest.mark.parametrize("result", RESULTS, ids=lambda one: type(one).__name__)
def test_a_result_about_heads_is_a_short_line_and_a_panel(result: Any) -> None:
    assert repr(result).startswith(f"{type(result).__name__}(2 layers, 6 heads: ") and len(repr(result)) < 200
    said = words(result)
    for finding in result.findings:
        assert finding.said in said and finding.rule in said
    for grid in result.grids:
        assert grid.title in said
    assert len(pictures(result)) == len(result.grids) > 0
    assert "tensor(" not in said


def test_circuits_by_token_are_a_table() -> None:
    table = RESULTS[4].qk("L1H2", [5, 7], k=3)
    rows = list(parsed(table).iter("tr"))
    assert len(rows) == 1 + 2
    said = words(table)
    assert said.startswith("L1H2 at a token seeks others")
    for row, text, others, rank in zip(rows[1:], table.texts, table.others, table.rank.tolist(), strict=True):
        shown = "".join(row.itertext())
        assert shown.startswith(text) and shown.endswith(str(rank)) and all(other in shown for other in others)


def test_numbers_of_two_directions_are_drawn_by_their_size() -> None:
    grid = Grid("loss", "nats", ((2.0, -1.0), (0.0, 0.5)), -2.0, 2.0, signs=("falls", "grows"))
    (drawn,) = pictures(grid)
    assert drawn[0, 0] > drawn[0, 1] > drawn[1, 1] > drawn[1, 0]
    assert "2 at L0H0 (grows), −1 at L0H1 (falls)" in words(grid)
    assert repr(grid) == "Grid('loss, nats', 2 layers, 4 heads, -2 to 2)"
    plain = Grid("entropy", "nats", ((0.5, 2.5),), 0.0, 3.0, ("encoder L0",))
    assert "0.5 (faint) to 2.5 (strong)" in words(plain) and "entropy, nats" in words(plain)


def test_findings_are_a_table_with_their_rules() -> None:
    assert isinstance(REPORT.findings, Findings) and isinstance(REPORT.findings, tuple)
    held = REPORT.with_heads(*RESULTS)
    for found in (held.findings, *(result.findings for result in RESULTS)):
        assert words(found).startswith("Findingsfindingrule")
        assert all(one.said in words(found) and one.rule in words(found) for one in found)
        assert repr(found).splitlines()[0].startswith(found[0].said[:40])
    assert "none" in words(Findings(())) and repr(Findings(())) == "no findings"
    assert repr(Finding("a head", "a rule")) == "Finding('a head')"


def test_lint_is_a_table_with_its_cures() -> None:
    q, k, v = torch.randn(3, 2, 2, 8, 4).unbind(0)
    found = rg.lint(q, k, v, mask=rg.Dense(torch.ones(8, 8).triu(1).bool()))
    said = words(found)
    for defect in found:
        assert all(part in said for part in (defect.name, str(defect.number), defect.said, defect.cure))
    assert "nothing found" in words(Lint(()))


def test_a_state_shows_its_shapes() -> None:
    x = torch.randn(2, 5, 8)
    assert repr(rg.attention_state(x, x, x)) == "State(m=float32[2, 5], l=float32[2, 5], o=float32[2, 5, 8])"


def test_what_holds_tensors_shows_their_shapes() -> None:
    model, text = load(), "She sells sea shells by the shore. "
    carried = rg.heads.carried(model, text)
    assert repr(carried.carried[3]) == (
        "CarriedLayer(norms=float32[4, 35], weights=float32[4, 35], received=float32[4, 35], "
        "top=(int64[4, 35, 4], float32[4, 35, 4], float32[4, 35]), map=float32[4, 35, 35])"
    )
    circuit = rg.heads.circuits(model, text).circuits[0]
    assert repr(circuit) == (
        "Circuit(inputs=InputProjections(w_v=float64[4, 128, 32], w_q=float64[4, 128, 32], w_k=float64[4, 128, 32]), "
        "w_o=float64[4, 32, 128])"
    )
    with rg.record(model, (rg.facts.Inputs(),)) as tape:
        model(torch.zeros(1, 5, dtype=torch.int64))
    assert repr(tape.calls[0][rg.facts.Inputs()]) == (
        "AttentionCall(layer=MultiHeadAttention, q=float32[1, 4, 5, 32], k=float32[1, 4, 5, 32], "
        "score=ScaledDot(), mask=Causal() & Window(before=255, after=0), positions=Positions(q=int64[5], k=int64[5]), "
        "cross=False)"
    )


@pytest.mark.parametrize(
    "shown",
    [
        Findings((Finding(HOSTILE, HOSTILE),)),
        Lint((Defect(HOSTILE, 1, HOSTILE, HOSTILE),)),
        Grid(HOSTILE, HOSTILE, ((1.0, 2.0),), 0.0, 2.0, (HOSTILE,)),
        Grid(HOSTILE, "", ((1.0, -2.0),), -2.0, 2.0, (HOSTILE,), (HOSTILE, HOSTILE)),
        replace(RESULTS[3], tokens=(HOSTILE,) * 23),
        replace(RESULTS[4].qk("L1H2"), what=HOSTILE, does=HOSTILE, texts=[HOSTILE] * 3, others=[[HOSTILE] * 5] * 3),
        SimpleNamespace(_repr_html_=replace(RESULTS[0], layers=(HOSTILE, HOSTILE))._repr_html_),
    ],
    ids=lambda one: type(one).__name__,
)
def test_text_stays_text(shown: Any) -> None:
    assert not list(parsed(shown).iter("script"))
