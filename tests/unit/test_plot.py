"""The overview picture, read back: what its axes say, that nothing is cut off or lies on something else."""

from __future__ import annotations

import io
from itertools import combinations
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report import plot
from selection import few

pytest.importorskip("matplotlib", reason="pictures need matplotlib (regard[plot])")

LONG = "averyverylongtokenname_with_more"
SHAPES = {
    "6 x 12 of 512": {"layers": 6, "heads": 12, "n": 512},
    "4 x 6 of 20": {"layers": 4, "heads": 6, "n": 20, "tokens": [LONG] * 20},
    "24 x 16 of 60": {"layers": 24, "heads": 16, "n": 60, "tokens": [f"{i}{LONG}" for i in range(60)]},
    "wide names": {"layers": 2, "heads": 2, "n": 31, "tokens": ["W" * 12] * 31},
    "unlike heads": {"layers": 3, "heads": (2, 5, 3), "n": 36, "mask": rg.Everything()},
    "stacks": {"layers": 6, "heads": 4, "names": reports.stacks(2, 2)},
    "one layer of a decoder": {"layers": 26, "heads": 4, "names": reports.stacks(24, 1)},
    "one": {"layers": 1, "heads": 1, "n": 1},
}


def drawn(report: rg.Report, head: tuple[int, int] | None = None) -> Any:
    figure = plot.overview_figure(report, head)
    figure.canvas.draw()
    return figure


def texts(figure: Any) -> list[Any]:
    """Every text that is drawn: ticks beyond the ends of an axis are not."""
    from matplotlib.text import Text

    hidden = set[Any]()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                hidden |= {tick.label1, tick.label2}
    found = (text for text in figure.findobj(Text) if text not in hidden)
    return [text for text in found if text.get_text().strip() and text.get_visible()]


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_no_text_is_cut_off_or_covered(name: str) -> None:
    figure = drawn(reports.report(**SHAPES[name]))
    page = figure.bbox
    boxes = {text: text.get_window_extent().padded(-1) for text in texts(figure)}
    assert len(boxes) > 20
    for text, box in boxes.items():
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text.get_text()
    for (a, of_a), (b, of_b) in combinations(boxes.items(), 2):
        assert not of_a.overlaps(of_b), f"{a.get_text()!r} lies on {b.get_text()!r}"


@pytest.mark.full
def test_axes_say_what_they_count() -> None:
    figure = drawn(reports.report(2, 3, 60), (1, 2))
    labels = [(a.get_title(loc="left"), a.get_xlabel(), a.get_ylabel()) for a in figure.axes]
    assert ("entropy, nats", "head", "layer") in labels
    assert ("first token, % of mass", "head", "layer") in labels and ("max score", "head", "layer") in labels
    assert ("L1H2: layers.1.attention", "key", "query") in labels
    assert ("", "", "weight") in labels  # a cell a token
    assert any(title.startswith("mass that each key receives") for title, *_ in labels)


@pytest.mark.full
def test_a_few_tokens_are_all_named() -> None:
    figure = drawn(reports.nasty(23))
    chart = next(a for a in figure.axes if a.get_ylabel() == "query")
    names = [label.get_text() for label in chart.get_yticklabels()]
    assert len(names) == 23 and "$x^2$" in names and "␣a" in names and "‹65E5›…8A9E›" in names


@pytest.mark.full
def test_the_map_is_the_head_asked_for() -> None:
    report = reports.report(2, 3, 40)
    chart = next(a for a in drawn(report, (1, 2)).axes if a.get_ylabel() == "query")
    shown = torch.as_tensor(chart.collections[0].get_array().filled(float("nan")))
    wanted = report.layers[1].maps[2].clamp(min=1e-4).masked_fill(~report.layers[1].cells, float("nan"))
    torch.testing.assert_close(shown.float(), wanted, equal_nan=True)
    assert type(chart.collections[0].norm).__name__ == "LogNorm"


@pytest.mark.full
def test_cells_that_nothing_can_reach_have_a_colour_of_their_own() -> None:
    from matplotlib.colors import to_hex
    from matplotlib.image import imread

    file = io.BytesIO()
    plot.write(reports.report(1, 1, 40), file, "png", None)
    file.seek(0)
    pixels = (torch.from_numpy(imread(file))[..., :3] * 255).round().int().flatten(0, 1)
    grey = torch.tensor([int(plot.NOWHERE[i : i + 2], 16) for i in (1, 3, 5)])
    assert 0.04 < float((pixels == grey).all(-1).float().mean()) < 0.2
    assert to_hex(plot.NOWHERE) not in {to_hex(c) for c in ("#fbf7e8", "#140f34")}


@pytest.mark.full
def test_the_colour_of_such_cells_is_explained_where_there_are_any() -> None:
    for mask, there in ((rg.Causal(), 1), (rg.Everything(), 0)):
        figure = drawn(reports.report(1, 1, 9, mask=mask))
        assert sum(text.get_text() == "cannot attend" for text in texts(figure)) == there == len(figure.artists)


@pytest.mark.full
def test_a_mass_of_nearly_nothing_leaves_room_for_the_others() -> None:
    figure = drawn(reports.report(1, 1, 300))
    profile = next(a for a in figure.axes if a.get_title(loc="left").startswith("mass"))
    low, high = profile.get_ylim()
    assert high / low < 2e4


@pytest.mark.full
def test_cross_attention_alone_has_a_picture() -> None:
    call = reports.call(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8))
    figure = drawn(rg.Report.of([call], title="cross", model="Made"))
    assert any("no self-attention" in text.get_text() for text in texts(figure))


@pytest.mark.full
def test_a_picture_is_small() -> None:
    file = io.BytesIO()
    plot.write(reports.report(6, 12, 512), file, "png", None)
    assert len(file.getvalue()) < 300_000


@pytest.mark.full
def test_layers_of_an_encoder_and_a_decoder_are_counted_apart() -> None:
    figure = drawn(reports.report(7, 2, names=reports.stacks(3, 2)))
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels() if label.get_text()] == list("0120101")
    middles = {text.get_text(): text.xy[1] for text in axes.texts}
    assert middles == pytest.approx({"encoder": 1, "decoder": 3.5, "decoder cross": 5.5}, abs=0.4)


def map_of(report: rg.Report, head: str | None = None) -> Any:
    figure = report.plot(head)
    figure.canvas.draw()
    return figure


@pytest.mark.parametrize("name", few(SHAPES, "4 x 6 of 20", "wide names", "one"))
def test_the_map_of_a_head_has_room_for_its_labels(name: str) -> None:
    figure = map_of(reports.report(**SHAPES[name]))
    page, boxes = figure.bbox, [text.get_window_extent().padded(-1) for text in texts(figure)]
    assert len(boxes) > 5
    for box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1


def test_the_map_of_a_head_shows_its_weights_between_both_texts() -> None:
    random = torch.Generator().manual_seed(1)
    call = reports.call(torch.randn(1, 2, 4, 8, generator=random), 9 * torch.randn(1, 2, 6, 8, generator=random))
    report = rg.Report.of([call], title="dates", model="Made", tokens="1979", key_tokens="3 May ")
    axes = map_of(report, "L0H1").axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list("1979")
    assert [tick.get_text() for tick in axes.get_xticklabels()][2:5] == list("May")
    shown = torch.tensor(axes.collections[0].get_array().filled(0)).reshape(4, 6)
    torch.testing.assert_close(shown.float(), report.layers[0].maps[1].clamp(min=plot.LEAST))
    assert axes.collections[0].norm.vmin == 0  # large scores: the mass is in few weights


def test_a_diffuse_head_has_a_logarithmic_scale() -> None:
    weights = torch.full((8, 8), 1.0)
    weights[0, 0] = 50.0
    scales = plot._scale_of(torch.eye(8)), plot._scale_of(weights)  # pyright: ignore[reportPrivateUsage]
    assert [scale.vmin for scale in scales] == [0, plot.LEAST]


def test_a_token_of_two_dollars_is_no_formula() -> None:
    call = reports.call(*torch.randn(2, 1, 2, 5, 8))
    figure = map_of(rg.Report.of([call], title="dollars", model="Made", tokens=["$$", "a", "$", "\\frac", "$$b$$"]))
    assert figure.axes[0].get_yticklabels()[0].get_text() == "$$"
