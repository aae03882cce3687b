"""Comparison: the change of each head against its definition, other lengths, files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report.comparison import change
from regard.inspect.report.layer import Layer


def test_the_change_is_the_mass_on_other_keys() -> None:
    q, k, other = (torch.randn(1, 3, 29, 8) for _ in range(3))
    before, after = (Layer.of(reports.call(q, keys, rg.Causal()), 0) for keys in (k, other))
    p, r = (rg.attention_weights(q.double(), keys.double(), mask=rg.Causal())[0] for keys in (k, other))
    torch.testing.assert_close(
        change(before, after).double(), ((p - r).abs().sum(-1) / 2).mean(-1), rtol=1e-5, atol=1e-6
    )
    assert float(change(before, before).max()) == 0


def test_rows_that_see_nothing_do_not_count() -> None:
    q, k, other = (torch.randn(1, 1, 11, 8) for _ in range(3))
    mask = rg.Causal() & rg.Where(lambda b, h, i, j: (i != 4) & (i != 7))
    before, after = (Layer.of(reports.call(q, keys, mask), 0) for keys in (k, other))
    p, r = (rg.attention_weights(q.double(), keys.double(), mask=mask)[0] for keys in (k, other))
    expected = (p - r).abs().sum((-1, -2)) / 2 / 9
    torch.testing.assert_close(change(before, after).double(), expected, rtol=1e-5, atol=1e-6)


def test_texts_of_other_lengths_are_compared_by_place() -> None:
    before, after = (reports.report(2, 3, n, rg.Everything()) for n in (23, 46))
    found = change(before.layers[0], after.layers[0])
    pooled = after.layers[0].maps.unflatten(-1, (23, 2)).sum(-1).unflatten(-2, (23, 2)).mean(-2)
    torch.testing.assert_close(found, (before.layers[0].maps - pooled).abs().sum(-1).mean(-1) / 2)


def test_heads_that_changed_most_come_first() -> None:
    before, after = reports.report(2, 3, 23), reports.report(2, 3, 23, rg.Window(before=2, after=0))
    found = before.compare(after)
    values = [head.value for head in found.heads]
    assert (
        values == sorted(values, reverse=True)
        and len(values) == 6
        and found.heads[0].name in str(found).split("\n\n")[2]
    )
    entropy = [float(one.layers[found.heads[0].layer].entropy[found.heads[0].head].mean()) for one in (before, after)]
    assert found.numbers(found.heads[0])[0] == f"entropy, nats {entropy[0]:.3g} → {entropy[1]:.3g}"


def test_other_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 layers of \[3\] heads and 3 layers of \[2\] heads; expected the same"):
        reports.report(2, 3).compare(reports.report(3, 2))


def test_a_comparison_is_a_page(tmp_path: Path) -> None:
    found = reports.nasty().compare(reports.nasty())
    found.save(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert text.count('<section class="change">') == 6 and "<script" not in text and "http:" not in text
    assert text.count("data:image/png") == 6 * 2 * 2
    with pytest.raises(
        ValueError, match=r"a\.png is not supported as a comparison's file; its suffix has to be \.html"
    ):
        found.save(tmp_path / "a.png")
