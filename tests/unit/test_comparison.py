"""Comparison: the change of each head against its definition, alignment, signed maps, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import torch

import regard as rg
import regard.inspect.report.page_compare as page_compare
import sample_reports as reports
from regard.inspect.report.alignment import NONE, Alignment
from regard.inspect.report.axis import Axis
from regard.inspect.report.compared import beginning
from regard.inspect.report.layer import Layer
from regard.inspect.report.layer_pair import LayerPair, by_cell, in_cells, of_tokens


def axis(text: str) -> Axis:
    return Axis(torch.arange(len(text.split())), tuple(text.split()))


def of_text(text: str, seed: int = 1, title: str = "a model", heads: int = 2, dim: int = 8) -> rg.Report:
    """Two layers whose queries and keys are random."""
    random, n = torch.Generator().manual_seed(seed), len(text.split())
    calls = [
        reports.call(*torch.randn(2, 1, heads, n, dim, generator=random) * 2, name=f"layers.{at}") for at in range(2)
    ]
    return rg.Report.of(calls, title=title, model="Made", tokens=text.split())


def weights(report: rg.Report, layer: int, head: int) -> torch.Tensor:
    return report.layers[layer].maps[head]  # a cell a token


def test_the_change_is_the_mass_on_other_keys() -> None:
    q, k, other = (torch.randn(1, 3, 29, 8) for _ in range(3))
    before, after = (Layer.of(reports.call(q, keys, rg.Causal()), 0) for keys in (k, other))
    p, r = (rg.attention_weights(q.double(), keys.double(), mask=rg.Causal())[0] for keys in (k, other))
    for a, b in ((0, 0), (1, 1), (2, 0)):
        expected = float(((p[a] - r[b]).abs().sum(-1) / 2).mean())
        assert of_tokens(before, after).change(a, b) == pytest.approx(expected, rel=1e-5)
    assert of_tokens(before, before).change(1, 1) == 0


def test_rows_that_see_nothing_do_not_count() -> None:
    q, k, other = (torch.randn(1, 1, 11, 8) for _ in range(3))
    mask = rg.Causal() & rg.Where(lambda b, h, i, j: (i != 4) & (i != 7))
    before, after = (Layer.of(reports.call(q, keys, mask), 0) for keys in (k, other))
    p, r = (rg.attention_weights(q.double(), keys.double(), mask=mask)[0] for keys in (k, other))
    expected = float((p - r).abs().sum((-1, -2)) / 2 / 9)
    assert of_tokens(before, after).change(0, 0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("a b c", "a b c", ["a", "b", "c"]),
        ("a b c", "a x c", ["a", "b → x", "c"]),
        ("a b c", "a c d", ["a", "b (before)", "c", "d (after)"]),
        ("a b c", "x y z", ["a → x", "b → y", "c → z"]),
        ("a b", "x y z", ["a (before)", "b (before)", "x (after)", "y (after)", "z (after)"]),
    ],
)
def test_tokens_are_aligned(before: str, after: str, names: list[str]) -> None:
    found = Alignment.of(axis(before), axis(after))
    assert list(found.names) == names
    for side, text in ((found.before, before), (found.after, after)):
        assert [n for n in side.tolist() if n != NONE] == list(range(len(text.split())))
    assert found.both.tolist() == ["(" not in name for name in names]


def test_without_texts_tokens_correspond_by_number() -> None:
    found = Alignment.of(Axis(torch.arange(2)), Axis(torch.arange(5)))
    assert found.before.tolist() == [0, 1, -1, -1, -1] and found.after.tolist() == [0, 1, 2, 3, 4]
    assert found.names == () and found.alone("after") == [2, 3, 4] and found.alone("before") == []


def test_a_signed_map_says_where_the_mass_moved() -> None:
    before, after = of_text("the cat sat down", 1), of_text("the old dog sat down", 2)
    found = before.compare(after)
    moved = found.moved("L1H0", "L1H1")
    p, q = weights(before, 1, 0), weights(after, 1, 1)
    # the, cat (before), old (after), dog (after), sat, down
    rows, cols = [(0, 0), None, None, None, (2, 3), (3, 4)], [(0, 0), (1, NONE), (NONE, 1), (NONE, 2), (2, 3), (3, 4)]
    for r, row in enumerate(rows):
        for c, (a, b) in enumerate(cols):
            if row is None:
                assert torch.isnan(moved[r, c])
                continue
            old, new = (0.0 if n == NONE else float(of[i, n]) for of, i, n in ((p, row[0], a), (q, row[1], b)))
            assert float(moved[r, c]) == pytest.approx(new - old, abs=1e-6)
    assert torch.allclose(moved[[0, 4, 5]].sum(-1), torch.zeros(3), atol=1e-5)  # what is lost is gained elsewhere
    assert found.between("L1H0", "L1H1") == pytest.approx(float(moved[[0, 4, 5]].abs().sum() / 2 / 3), rel=1e-5)


def test_findings_name_the_keys_and_what_has_no_counterpart() -> None:
    before, after = of_text("the cat sat down", 1), of_text("the old dog sat down", 2)
    found = before.compare(after)
    said = [finding.said for finding in found.findings]
    head = found.heads[0]
    mean = found.moved((head.layer, head.head))[[0, 4, 5]].mean(0)
    names = ["the", "cat (before)", "old (after)", "dog (after)", "sat", "down"]
    assert said[0].startswith(f"heads that changed most: {head.name} (")
    numbers = int(mean.argmin()), int(mean.argmax())
    low, high = (names[n] for n in numbers)
    keys = [[0, 1, 1, 2, 2, 3][n] for n in numbers]  # in its text: that before, where it has the token
    assert said[1].startswith(f"{head.name} moved mass from ‘{low}’ (key {keys[0]}, −")
    assert f"to ‘{high}’ (key {keys[1]}, +" in said[1]
    assert said[2] == "without a counterpart: 1 of 4 keys before (‘cat’); 2 of 5 keys after (‘old’, ‘dog’)"
    assert before.compare(before).findings[0].said == "heads that changed most: none; all weights are the same"


def test_long_texts_are_compared_by_place() -> None:
    before, after = (reports.report(2, 2, n, rg.Everything()) for n in (530, 613))
    found = before.compare(after)
    assert found.by == "cells" and found.moved("L0H0").shape == (128, 128)
    first, second = before.layers[0].maps, after.layers[0].maps
    expected = (first - second).abs().sum(-1).mean(-1) / 2
    assert found.change.values[0] == pytest.approx((100 * expected).tolist(), rel=1e-4)
    assert "compared by their place in the text, in 128 × 128 cells" in str(found).replace("\n   ", "")


def test_a_map_is_pooled_to_the_cells_of_the_other() -> None:
    before, after = (reports.report(2, 3, n, rg.Everything()) for n in (23, 46))
    (first, *_), (second, *_) = in_cells(before.layers, after.layers)
    pooled = after.layers[0].maps.unflatten(-1, (23, 2)).sum(-1).unflatten(-2, (23, 2)).mean(-2)
    torch.testing.assert_close(second.maps, pooled)
    torch.testing.assert_close(first.maps, before.layers[0].maps)
    assert second.row_edges.tolist() == list(range(0, 47, 2)) and second.weights.numel() == 0
    expected = float((first.maps - pooled)[1].abs().sum(-1).mean() / 2)
    pair = LayerPair(first.maps, second.maps, *by_cell(first, second))
    assert pair.change(1, 1) == pytest.approx(expected, rel=1e-5)


def test_texts_without_a_common_token_are_compared_by_place() -> None:
    assert of_text("a b c").compare(of_text("x y z w")).by == "cells"
    assert of_text("a b c").compare(of_text("x y z")).by == "tokens"  # replaced by as many


def test_heads_that_changed_most_come_first() -> None:
    before, after = reports.report(2, 3, 23), reports.report(2, 3, 23, rg.Window(before=2, after=0))
    found = before.compare(after)
    values = [head.value for head in found.heads]
    assert values == sorted(values, reverse=True) and len(values) == 6
    assert str(found).split("\n\n")[3].startswith(found.heads[0].name)
    entropy = [float(one.layers[found.heads[0].layer].entropy[found.heads[0].head].mean()) for one in (before, after)]
    assert found.numbers(found.heads[0])[0] == f"entropy, nats {entropy[0]:.3g} → {entropy[1]:.3g}"


def test_labels_tell_the_two_apart() -> None:
    one, other = of_text("the cat sat"), of_text("the dog sat")
    assert one.compare(other).labels == ("‘the cat sat’", "‘the dog sat’")
    assert one.compare(of_text("the dog sat", title="tuned")).labels == ("a model", "tuned")
    assert one.compare(of_text("the cat sat", 2)).labels == ("a model", "a model")
    assert beginning(["a ", "b\n", "<|end|>"]) == "a b"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 layers of \[3\] heads and 3 layers of \[2\] heads; expected the same"):
        reports.report(2, 3).compare(reports.report(3, 2))
    found = reports.report(2, 3).compare(reports.report(2, 3))
    with pytest.raises(ValueError, match="there is no layer L5 here; there are L0 to L1"):
        found.moved("L5H0")
    with pytest.raises(ValueError, match="there is no head L0H7"):
        found.save("a.html", heads=("L0H0", "L0H7"))
    cross = [reports.call(torch.randn(1, 2, n, 8), torch.randn(1, 2, m, 8)) for n, m in ((600, 600), (9, 600))]
    one = rg.Report.of(cross, title="two", model="Made")
    found = one.compare(one)
    with pytest.raises(ValueError, match=r"map of L0H0 has 128 × 128 cells, that of L1H0 9 × 128; expected as many"):
        found.moved("L0H0", "L1H0")


def test_a_comparison_is_a_page(tmp_path: Path) -> None:
    found = reports.nasty().compare(reports.nasty())
    found.save(tmp_path / "a.html", heads=("L1H0", "L0H2"))
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert text.count("<script") == 2 and "http:" not in text and "<script>alert" not in text
    assert '"shown":[[1,0],[0,2]]' in text and text.count('<a href="#L') >= 6
    with pytest.raises(ValueError, match=r"a\.png is not supported as a comparison's file: its suffix is none of"):
        found.save(tmp_path / "a.png")


def test_a_comparison_is_numbers(tmp_path: Path) -> None:
    found = of_text("the cat sat down", 1).compare(of_text("the old dog sat down", 2))
    for suffix in ("json", "npz"):
        found.save(tmp_path / f"a.{suffix}")
    content = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert content["schema"] == "regard-comparison-1" and content["by"] == "tokens"
    assert content["layers"][1]["keys"]["before"] == [0, 1, -1, -1, 2, 3]
    assert content["layers"][1]["keys"]["names"][:2] == ["the", "cat (before)"]
    assert content["change"]["values"][0] == pytest.approx(found.change.values[0], rel=1e-3)
    with numpy.load(tmp_path / "a.npz") as arrays:
        assert arrays["schema"] == "regard-comparison-1" and arrays["queries_after/0"].tolist() == [0, -1, 1, 2, 3, 4]
        for head in range(2):
            expected = found.moved((1, head)).numpy()
            numpy.testing.assert_array_equal(arrays["moved/1"][head], expected)
        numpy.testing.assert_allclose(100 * arrays["change/1"], found.change.values[1], rtol=1e-5)


def test_maps_of_unlike_sides_have_numbers_of_their_own() -> None:
    """Both sides have as many cells, of unlike numbers of tokens."""
    q, k = torch.randn(1, 2, 600, 8), torch.randn(1, 2, 700, 8)
    report = rg.Report.of([reports.call(q, k, name="cross")], title="long", model="Made", cross="*")
    found = report.compare(report)
    axes, rows, cols = page_compare._axes(found, [])  # pyright: ignore[reportPrivateUsage]
    edges = found.before.layers[0].row_edges, found.before.layers[0].col_edges
    for at, wanted in zip((rows[0][0], cols[0][0]), edges, strict=True):
        assert axes[at]["numbers"] == wanted[:-1].tolist()
