"""What heads add, in a report: in print, in numbers, in the picture; whose layers and heads have to be the report's."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.demo.model import ByteTokenizer, load
from regard.demo.reading import read
from regard.inspect.heads.ablation import Ablation
from regard.inspect.heads.contributions import Contributions
from regard.inspect.heads.probe import Probe
from regard.inspect.report.printed import grid

TEXT = b"Sally sells seashells by the seashore; Sally sells seashells."


def test_a_report_holds_what_its_model_was_asked() -> None:
    model, report = load(), read(load(), TEXT)
    logit = rg.heads.contributions(model, list(TEXT), tokenizer=ByteTokenizer(), token=ord("s"))
    found = rg.heads.ablation(model, list(TEXT)), logit
    held = report.with_heads(*found)
    assert report.head_results == () and len(held.grids) == len(report.grids) + 3
    change, norms, parts = held.grids[-3:]
    assert change.values == tuple(tuple(of.tolist()) for of in found[0].change)
    assert norms.values == tuple(tuple(of.mean(-1).tolist()) for of in found[1].norms)
    assert parts.values == tuple(tuple(of.tolist()) for of in found[1].logit.heads)
    assert found[1].logit.name == "s" and parts.label == "part in the logit of ‘s’, at position 60"
    worst = max((value, f"L{n}H{h}") for n, row in enumerate(change.values) for h, value in enumerate(row))
    said = held.findings[-2]
    assert said.said.startswith(
        f"the loss grows most without {worst[1]}: {worst[0]:+.3g} on {found[0].loss:.4g} (next "
    )
    assert [head.name for head in said.heads] == [worst[1]]
    for line in (*change.label.splitlines(), said.said.split(" (")[0], "part in the logit of"):
        assert line in str(held)


def test_any_of_them_in_any_order_and_the_last_of_a_kind() -> None:
    report = reports.report(2, 3)
    results = reports.results(report)
    texts = {report.with_heads(*order).text() for order in permutations(results)}
    one_by_one = report
    for result in results:
        one_by_one = one_by_one.with_heads(result)
    assert texts == {one_by_one.text()} and len(texts.pop().splitlines()) > len(report.text().splitlines())
    assert report.with_heads().text() == report.text()
    other = replace(results[1], loss=9.75)
    assert "on 9.75" in report.with_heads(*results).with_heads(other).text()
    assert "on 1.784" not in report.with_heads(*results, other).text()


def test_layers_are_matched_by_their_paths() -> None:
    """Of an encoder and a decoder the report has the layers in an order of its own; a path may come twice."""
    report = reports.report(5, 2, names=reports.stacks(1, 2))
    called = reports.stacks(1, 2)
    order = [called.index(layer.name) for layer in report.layers]
    assert order == [0, 1, 3, 2, 4]
    change = tuple(torch.tensor([n + 0.0, n + 0.5]) for n in range(5))
    held = report.with_heads(Ablation(tuple(called), change, 1.0, 9))
    assert [row[0] for row in held.grids[-1].values] == order
    assert held.grids[-1].rows == ("encoder L0", "decoder L0", "decoder L1", "decoder cross L0", "decoder cross L1")
    assert held.findings[-1].said.startswith("the loss grows most without decoder cross L1H1: +4.5")
    assert held.findings[-1].heads[0].layer == 4
    twice = reports.report(2, 2, names=["shared", "shared"])
    held = twice.with_heads(Ablation(("shared", "shared"), change[:2], 1.0, 9))
    assert [row[0] for row in held.grids[-1].values] == [0.0, 1.0]


def test_those_of_another_model_are_refused() -> None:
    report = reports.report(2, 3)
    for other in (reports.report(2, 4), reports.report(3, 3), reports.report(2, 3, names=["h.0.attn", "h.1.attn"])):
        for result in reports.results(other):
            with pytest.raises(ValueError, match=r"Expected the same layers and heads: make both with one model"):
                report.with_heads(result)
    with pytest.raises(
        ValueError,
        match=r"a Ablation of 2 layers, h.0.attn \(3 heads\) to h.1.attn \(3 heads\); the report is of 2 layers, "
        r"layers.0.attention \(3 heads\) to layers.1.attention \(3 heads\)",
    ):
        report.with_heads(reports.results(other)[1])
    with pytest.raises(TypeError, match=r"with_heads has a str; expected what rg.heads.contributions, carried"):
        report.with_heads("ablation")


def test_the_numbers_are_written(tmp_path: Path) -> None:
    report = reports.report(2, (3, 2))
    contributions, ablation, probe = reports.results(report)
    assert isinstance(contributions, Contributions) and isinstance(ablation, Ablation) and isinstance(probe, Probe)
    held = report.with_heads(contributions, ablation, probe)
    held.save(tmp_path / "a.json")
    held.save(tmp_path / "a.npz")
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["heads"]["ablation"] == {"loss": 1.784, "tokens": 23}
    assert content["heads"]["contributions"]["logit"]["name"] == "<b> tea"
    assert content["grids"][-1 - len(probe.grids)]["signs"] == ["lowers it", "raises it"]
    wanted = {
        "loss_change": ablation.change,
        "added_norm": contributions.norms,
        "logit_part": contributions.logit.heads,
        "probe_induction": probe.scores["induction"],
        "probe_first_token_error": probe.error["first-token"],
    }
    arrays = np.load(tmp_path / "a.npz")
    for name, values in wanted.items():
        assert content["arrays"][name]["axes"].startswith("head")
        for number, of_layer in enumerate(values):
            np.testing.assert_array_equal(arrays[f"{name}/{number}"], of_layer.numpy())
            np.testing.assert_allclose(content["layers"][number][name], of_layer.numpy(), rtol=1e-3, atol=1e-9)
    report.save(tmp_path / "b.json")
    without = json.loads((tmp_path / "b.json").read_text())
    assert without["heads"] == {} and set(wanted) <= set(content["arrays"]) - set(without["arrays"])


def test_signs_are_told_in_print_by_shape_and_in_words() -> None:
    report = reports.report(1, 4)
    change = Ablation(("layers.0.attention",), (torch.tensor([2.0, -2.0, -0.5, 0.01]),), 1.5, 9)
    label, scale, _, row = grid(report.with_heads(change).grids[-1])
    assert label == "loss without a head, more than 1.5 on the first 9 tokens"
    assert scale == "▓ -2 it falls  ▁ 0  █ +2 it grows" and row == "L0   █ ▓ ░ ▁"


def test_where_no_removal_costs_anything_that_is_said() -> None:
    change = Ablation(("layers.0.attention",), (torch.tensor([-0.25, -0.5]),), 1.5, 9)
    assert change.findings[0].said == "no head's removal raises the loss: it falls least without L0H0, -0.25"


def test_what_is_not_told_of_a_logit_is_a_finding() -> None:
    report = reports.report(1, 2)
    without = Contributions(("layers.0.attention",), (torch.ones(2, 5),), why_not="its logits are capped.")
    held = report.with_heads(without)
    assert held.grids[-1].title == "norm of what a head adds"
    assert held.findings[-1].said == "no parts in a logit: its logits are capped."


@pytest.mark.full
def test_the_picture_has_their_grids() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (regard[plot])")
    from matplotlib.colors import to_hex

    from regard.inspect.report import plot

    report = reports.report(2, 3)
    contributions, ablation, _ = reports.results(report)
    figure = plot.overview_figure(report.with_heads(ablation, contributions), None)
    titles = [axes.get_title(loc="left").replace("\n", " ") for axes in figure.axes]
    (place,) = [n for n, title in enumerate(titles) if title.startswith("loss without a head")]
    assert any(title.startswith("part in the logit of ‘<b>␣tea’") for title in titles)
    image = figure.axes[place].collections[0]
    low, middle, high = (to_hex(image.cmap(image.norm(x))) for x in (image.norm.vmin, 0.0, image.norm.vmax))
    assert image.norm.vmin == -image.norm.vmax and len({low, middle, high}) == 3
    of_zero, *of_ends = (sum(int(colour[n : n + 2], 16) for n in (1, 3, 5)) for colour in (middle, low, high))
    assert of_zero > 1.5 * max(of_ends)  # pale between two colours
    assert any("it falls" in axes.get_ylabel() and "it grows" in axes.get_ylabel() for axes in figure.axes)
