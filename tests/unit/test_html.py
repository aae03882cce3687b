"""What notebooks show of masks, scores, plans, facts, tapes and monitors: safe markup, whose pictures are right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import regard as rg
import regard.core.html as html
from regard.core.region import Frame
from regard.inspect.report.texts import TextReports
from regard.masks.algebra import View
from regard.testing import masks, scores
from sample_reports import report

FRAME = Frame.of(11, 11, batch=(2,), heads=2)
HOSTILE = "</td><script>alert('1')</script>\"&\ud800"


def parsed(shown: object) -> ElementTree.Element:
    """The markup of an object: every element closed, nothing that runs or is fetched, nothing that no file can hold."""
    text = shown._repr_html_()  # type: ignore[attr-defined]
    text.encode()
    assert type(text) is html.Markup
    root = ElementTree.fromstring(text)
    for element in root.iter():
        assert element.tag not in ("script", "style", "link", "img", "iframe", "a", "object", "embed")
        for name, value in element.attrib.items():
            assert not name.startswith("on") and name not in ("src", "href"), name
            assert "url(" not in value and "//" not in value, value
    return root


def words(shown: object) -> str:
    return " ".join("".join(parsed(shown).itertext()).split())


def drawn(svg: ElementTree.Element) -> torch.Tensor:
    """The opacity of each cell of a picture."""
    _, _, columns, rows = map(int, svg.attrib["viewBox"].split())
    cells = torch.zeros(rows, columns)
    for path in svg:
        for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path.attrib["d"]):
            assert not cells[int(y), int(x) : int(x) + int(length)].any()
            cells[int(y), int(x) : int(x) + int(length)] = float(path.attrib["fill-opacity"])
    return cells


def pictures(shown: object) -> list[torch.Tensor]:
    return [drawn(svg) for svg in parsed(shown).iter("svg")]


class TestMarkup:
    @pytest.mark.parametrize(
        "build",
        [
            lambda text: html.panel(text),
            lambda text: html.element("p", text),
            lambda text: html.element("p", title=text),
            lambda text: html.table([(text, "a")]),
            lambda text: html.table([("a", text)]),
            lambda text: html.table([("a", "b")], (text, "c")),
            lambda text: html.quiet(text),
            lambda text: html.figure(text, html.quiet("a")),
            lambda text: html.figure("a", html.quiet("a"), text),
            lambda text: html.picture([[1.0]], text, 1, 1),
        ],
    )
    def test_text_stays_text(self, build: Callable[[str], str]) -> None:
        built = build(HOSTILE)
        root = ElementTree.fromstring(built)
        assert not list(root.iter("script")) and "?" in built
        said = "".join(root.itertext()) + "".join(value for one in root.iter() for value in one.attrib.values())
        assert HOSTILE.replace("\ud800", "?") in said

    def test_a_subclass_of_str_is_text(self) -> None:
        class Token(str):
            __slots__ = ()

        assert html.element("p", Token("<b>")) == "<p>&lt;b&gt;</p>"

    def test_ink(self) -> None:
        cells = drawn(ElementTree.fromstring(html.picture([[0.0, 1e-9, 0.5], [1.0, 7.0, float("nan")]], "", 3, 2)))
        assert (cells > 0).tolist() == [[False, True, True], [True, True, False]]
        assert cells[0, 1] < cells[0, 2] < cells[1, 0] == cells[1, 1]


class TestMask:
    @pytest.mark.parametrize("name", masks(FRAME))
    def test_the_picture_is_the_mask(self, name: str) -> None:
        view = View(masks(FRAME)[name], FRAME)
        whole = view.dense().expand(FRAME.shape).flatten(0, 1)
        drawn = torch.stack(pictures(view)) > 0
        assert torch.equal(drawn.expand(whole.shape), whole) and (len(drawn) > 1) == bool((whole != whole[0]).any())

    @pytest.mark.parametrize(
        ("mask", "said"),
        [
            (rg.Causal(), "16 queries (down) × 16 keys (across); 53.1% of the pairs are visible"),
            (rg.Window(before=30, after=2), "66 queries (down) × 66 keys"),
            (rg.Causal() & rg.Window(before=1023, after=0), "2,048 queries (down) × 2,048 keys (across); 37.5%"),
            (~rg.Prefix(12), "24 queries (down) × 24 keys"),
            (rg.Prefix(torch.tensor([3, 40])), "80 queries (down) × 80 keys"),
            (rg.Dilated(20), "40 queries (down) × 40 keys"),
            (rg.Lengths(keys=torch.tensor([5, 21])), "21 queries (down) × 21 keys"),
            (rg.Documents(torch.tensor([0, 0, 1])) & rg.Causal(), "3 queries (down) × 3 keys"),
            (rg.Documents(torch.tensor([0, 1]), torch.tensor([0, 0, 1])), "2 queries (down) × 3 keys"),
            (rg.Dense(torch.ones(5, 3, 7, dtype=torch.bool)), "3 queries (down) × 7 keys (across); 100% of the pairs"),
            (rg.Dense(torch.ones(1, 7, dtype=torch.bool)), "7 queries (down) × 7 keys"),
            (rg.Dense(torch.ones(7, 1, dtype=torch.bool)), "7 queries (down) × 7 keys"),
        ],
    )
    def test_the_picture_is_as_large_as_its_numbers_ask(self, mask: rg.Mask, said: str) -> None:
        assert said in words(mask)

    def test_heads_and_sequences_are_named(self) -> None:
        allowed = torch.rand(3, 2, 5, 6) < 0.5
        shown = words(rg.Dense(allowed))
        assert "sequence 0, head 0" in shown and "sequence 1, head 1" in shown and "sequence 2" not in shown
        assert "the first 4 of 6 maps" in shown
        seen = [(one > 0).tolist() for one in pictures(rg.Dense(allowed))]
        assert seen == allowed.flatten(0, 1)[:4].tolist()

    def test_long_calls_are_drawn_from_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: View) -> torch.Tensor:
            raise AssertionError("written out")

        monkeypatch.setattr(View, "dense", refuse)
        mask = rg.Causal() & rg.Window(before=199_999, after=0)
        (one,) = pictures(mask)
        (cover,) = mask.on(400_000).cover(3125, 3125)
        assert one.shape == (128, 128)
        assert torch.equal((2 * one / one.max()).round(), cover.float())
        assert len(mask._repr_html_() or "") < 20_000
        (some,) = pictures(rg.Dilated(2).on(1000))
        assert bool((some == some[0, 0]).all()) and 0 < some[0, 0] < 0.5

    def test_no_queries(self) -> None:
        assert "0 queries" in words(rg.Causal().on(0)) and "0 of" not in words(rg.Causal().on(0))

    @pytest.mark.parametrize(
        "mask",
        [
            rg.Documents(torch.tensor([0, 1]), torch.tensor([0, 0, 1])) & rg.Causal(),  # no positions
            rg.Where(lambda b, h, i, j: torch.ones(3, dtype=torch.bool)[i] & (j >= 0)),  # fits 3 queries
        ],
    )
    def test_what_cannot_be_drawn_stays_text(self, mask: rg.Mask) -> None:
        assert mask._repr_html_() is None and repr(mask)

    def test_plain_text_stays(self) -> None:
        assert repr(rg.Causal() & rg.Prefix(3)) == "Causal() & Prefix(n=3)"


class TestScore:
    def test_stages(self) -> None:
        score = rg.ScaledDot() >> rg.SoftCap(50.0) >> rg.Alibi(torch.tensor([0.5, 0.25]))
        shown = words(score)
        assert "s_ij = scale · q_i · k_j" in shown and "s -> cap · tanh(s / cap)cap = 50.0" in shown
        assert "slopes = float32[2], 0.25 to 0.5" in shown
        assert words(rg.Dot()).endswith("s_ij = q_i · k_j")  # no parameters, of which it has none

    @pytest.mark.parametrize("name", scores(FRAME))
    def test_the_formula_is_that_of_the_docstring(self, name: str) -> None:
        score = scores(FRAME)[name]
        for stage in score.stages:
            assert stage.formula and (type(stage).__doc__ or "").startswith(stage.formula)
            assert stage.formula in words(score)

    def test_hostile_names(self) -> None:
        def fn(q: Any, k: Any) -> Any: ...

        fn.__name__ = HOSTILE
        assert "alert" in words(rg.Custom(fn))


def test_a_plan_is_a_table_of_what_it_prints() -> None:
    x = torch.zeros(2, 3, 7, 8)
    plan = rg.explain(x, x, x, mask=rg.Causal(), backend=rg.Tiled())
    rows = [[cell.text for cell in row] for row in parsed(plan).iter("tr")]
    assert [" ".join(map(str, row)).split() for row in rows] == [line.split() for line in str(plan).splitlines()]


class TestFacts:
    def test_each_answer_has_a_row(self) -> None:
        q, k = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8)
        f = rg.facts
        facts = (f.Entropy(), f.MaxScore(), f.Map(7, 5), f.Top(3), f.Histogram(), f.Visible(), f.ScoreMap(3, 3))
        seen = rg.look(q, k, mask=rg.Causal(), facts=facts)
        rows = [row[0].text for row in parsed(seen).iter("tr")]
        answers = ["Entropy()", "MaxScore().score", "Map(rows=7, cols=5)", "Top(k=3).weights", "Top(k=3).rest"]
        scores = [f"{f.ScoreMap(3, 3)!r}.mean", f"{f.ScoreMap(3, 3)!r}.most"]
        assert rows == ["fact", "lse", *answers, "Histogram()", "Visible()", *scores]
        by_token, pooled = pictures(seen)[1], pictures(seen)[3]
        assert by_token.shape == (4, 60) and pooled.shape == (7, 5)
        assert int(pooled.argmax()) == int(seen[f.Map(7, 5)][0].mean(0).argmax())
        assert f"{float(seen[f.Entropy()].mean()):.4g}" in words(seen)

    def test_without_heads_or_batch(self) -> None:
        x = torch.randn(9, 8)
        seen = rg.look(x, x, mask=rg.Causal(), facts=(rg.facts.Entropy(), rg.facts.Map(3, 3)))
        assert [one.shape for one in pictures(seen)] == [(1, 9), (1, 9), (3, 3)]
        seen = rg.look(x.expand(5, 9, 8), x.expand(5, 9, 8), facts=(rg.facts.Entropy(), rg.facts.Map(3, 3)))
        assert [one.shape for one in pictures(seen)] == [(1, 9), (1, 9), (3, 3)]

    def test_nothing_to_see(self) -> None:
        x = torch.randn(1, 2, 9, 8)
        seen = rg.look(x, x, mask=~rg.Everything(), facts=(rg.facts.MaxScore(),))
        assert "–" in words(seen) and not pictures(seen)
        empty = rg.look(x[:, :, :0], x, facts=(rg.facts.MaxScore(),))
        assert "(1, 2, 0)" in words(empty)


class Model(nn.Module):
    """Two layers, with names as hostile as torch admits, of which the first runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, rg.nn.MultiHeadAttention(8, heads=2))
        self.second = rg.nn.MultiHeadAttention(8, heads=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = getattr(self, HOSTILE)
        return self.second(first(first(x, mask=rg.Causal())))


class TestRecorded:
    def test_a_row_a_layer_and_a_grid_a_fact(self) -> None:
        torch.manual_seed(0)
        model = Model()
        with rg.record(model, (rg.facts.Entropy(), rg.facts.MaxScore(), rg.facts.Inputs())) as tape:
            model(torch.randn(3, 5, 8))
        assert "Tape, 3 calls of 2 layers" in words(tape) and "Causal()" in words(tape)
        entropy, peak = pictures(tape)
        assert entropy.shape == peak.shape == (2, 4)
        assert entropy[0, :2].all() and not entropy[0, 2:].any() and entropy[1].all()
        means = [torch.stack([call[rg.facts.Entropy()] for call in tape[name]]).mean((0, 1, 3)) for name in tape.names]
        assert means[0].max() < means[1].min() and entropy[0].max() < entropy[1].min()
        assert len(pictures(tape.calls[0])) == 3 + 1  # lse, two facts; one mask for all
        assert "alert" in words(tape.calls[0])

    def test_a_monitor_shows_its_last_block(self) -> None:
        watch = rg.monitor(model := Model(), every=2)
        assert "nothing seen" in words(watch) and not pictures(watch)
        with watch:
            model(torch.randn(3, 5, 8))
        assert "1 step" in words(watch) and [one.shape for one in pictures(watch)] == [(2, 4), (2, 4)]
        name = "attention/second/max_score"
        assert f"{watch.scalars()[name]:.4g}" in words(watch)
        with watch:
            model(torch.randn(3, 5, 8))
        assert "nothing seen" in words(watch) and not pictures(watch)


def test_several_reports_show_their_means() -> None:
    reports = TextReports((report(), report(n=11)))
    assert "mean over 2 texts" in words(reports) and "[1]11 tokens" in words(reports)
    assert pictures(reports)[0].shape == (2, 3)
