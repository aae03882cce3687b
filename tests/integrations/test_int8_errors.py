"""examples/int8_errors.py: which models it measures, and that its errors are those of rounding."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators", reason="needs transformers 5.23 or later"
)

import regard as rg


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("int8_errors")


@pytest.mark.full
def test_every_model_has_a_row(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["int8_errors", "--tokens=24"])
    example.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", row)[0] for row in rows][-10:] == [*example.RANDOM]
    assert head.split()[:2] == ["model", "weights"] and rows[0].startswith("byte model")
    for row in rows:
        each = [float(x) / 100 for x in re.findall(r"([\d.]+)%", row)]
        if "not installed" not in row:
            int8, keys, values, bfloat16, worst = each
            assert 0 < max(keys, values) <= 1.2 * int8 <= 1.2 * worst < 0.03 and 0 < bfloat16 < int8


def test_errors_are_those_of_the_rounded_rows(example: Any) -> None:
    layer, x = rg.nn.MultiHeadAttention(8, heads=1), torch.randn(1, 5, 8)
    found = example.errors(lambda: layer(x, mask=rg.Causal()))
    assert {len(each) for each in found.values()} == {1}
    calls = list[Any]()
    with torch.no_grad(), example.observing(calls.append):
        layer(x, mask=rg.Causal())
    k, v = (t.numbers * t.scales for t in example.rounded(calls[0].k, calls[0].v))
    exact = example.attend(calls[0], calls[0].k, calls[0].v)
    off = (example.attend(calls[0], k, v) - exact).norm() / exact.norm()
    assert found["int8"] == [pytest.approx(float(off), rel=1e-3)]
