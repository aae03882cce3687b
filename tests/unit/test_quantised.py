"""Quantised: every weight within its step, by the kernels and by tiles; nothing of a long call."""

from __future__ import annotations

import pytest
import torch

import fact_checks
import regard as rg
import sample_reports as reports
from regard.inspect.facts.quantised import dequantise, quantise
from regard.inspect.report.element import HIDDEN
from regard.inspect.report.layer import Layer

MASKS = (rg.Causal(), rg.Window(before=5, after=2), rg.Where(lambda b, h, i, j: (i + j + h) % 3 > 0))


def test_each_level_is_what_its_weight_rounds_to() -> None:
    p = torch.linspace(0, 1, 10_007, dtype=torch.float64)
    assert ((dequantise(quantise(p)) - p).abs() <= p.sqrt() / 127 + 1.6e-5).all()
    assert torch.equal(quantise(dequantise(torch.arange(128, dtype=torch.uint8))), torch.arange(128).byte())


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_the_weights_are_those_of_the_definition(mask: rg.Mask, tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if tiles:
        fact_checks.tiles(monkeypatch, 7, 5)
    q, k = torch.randn(2, 6, 29, 8) * 3, torch.randn(2, 3, 29, 8)
    found = rg.look(q, k, mask=mask, facts=(rg.facts.Quantised(), rg.facts.Map(5, 7)))[rg.facts.Quantised()]
    p = rg.attention_weights(q.double(), k.double(), mask=mask)
    assert found.dtype == torch.uint8
    assert ((dequantise(found) - p).abs() <= p.sqrt() / 127 + 2e-5).all()


@pytest.mark.parametrize("tiles", [False, True])
def test_a_long_call_has_none(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if tiles:
        fact_checks.tiles(monkeypatch, 7, 5)
    x = torch.randn(2, 13, 8)[None]
    assert rg.look(x, x, facts=(rg.facts.Quantised(12),))[rg.facts.Quantised(12)].shape == (1, 2, 0, 0)
    with pytest.raises(ValueError, match=r"Quantised\(limit=-1\): expected 0 or more"):
        rg.facts.Quantised(-1)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_a_layer_knows_what_is_hidden(mask: rg.Mask) -> None:
    q, k = torch.randn(1, 3, 23, 8), torch.randn(1, 3, 23, 8)
    layer = Layer.of(reports.call(q, k, mask), 0)
    seen = mask.on(23, batch=(1,), heads=3).dense().expand(1, 3, 23, 23)[0]
    assert torch.equal(layer.weights == HIDDEN, ~seen)
    p = rg.attention_weights(q.double(), k.double(), mask=mask)[0]
    assert ((dequantise(layer.weights) - p)[seen].abs() <= p[seen].sqrt() / 127 + 2e-5).all()
