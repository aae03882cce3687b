"""The text of the page: whole rows, who looks at a token, lines, what is left out, long texts, two texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports

# A visit takes half a second: a plain run makes those of test_page.py and test_served_page.py alone.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, rg.Report, torch.Tensor]:
    """A page of two layers, its report, and the weights of the second layer's last head."""
    random = torch.Generator().manual_seed(1)
    report = reports.report(2, 3, 43, tokens=["[CLS]", *"abcd", "[SEP]", *(f"t{i}" for i in range(37))])
    for _ in range(2):
        q, k = torch.randn(2, 1, 3, 43, 8, generator=random) * 2  # as the report's own
    path = tmp_path_factory.mktemp("page") / "a.html"
    report.save(path, head=(1, 2))
    return path, report, rg.attention_weights(q.double(), k.double(), mask=rg.Causal())[0, 2]


def grounds(seen: Any, where: str = "#words") -> list[str]:
    return seen.page.locator(f"{where} > bdi").evaluate_all("words => words.map(w => w.style.background)")


def test_a_word_shows_the_whole_row(made: Any, visit: Any) -> None:
    path, report, p = made
    seen = visit(path, address="#L1H2&scale=log")
    seen.choose(29)
    assert seen.page.locator("#words .on").get_attribute("data-n") == "29"
    order = p[29].argsort(descending=True)[:8].tolist()
    found = seen.listed()
    assert set(found) == set(order)
    for key, share in found.items():
        assert share / 100 == pytest.approx(float(p[29, key]), abs=float(p[29, key]) ** 0.5 / 127 + 0.006)
    entropy = float(report.layers[1].entropy[2, 29])
    mass = float(p[29, order].sum())
    said = re.fullmatch(r"8 heaviest, (\d+) % of the mass; entropy ([\d.]+) nats", seen.page.inner_text("#mass"))
    assert said and float(said[1]) == pytest.approx(100 * mass, abs=2.5) and float(said[2]) == round(entropy, 2)
    key, share = next(iter(found.items()))
    assert re.search(
        rf"→ key {key} .*: {share:.0f} %$", seen.page.inner_text("#readout")
    )  # the one that it looks at most
    # every key of a weight that the scale shows is shaded, not the heaviest alone
    shown, visible = grounds(seen), p[29] > 2e-4
    assert visible[:30].sum() > 15
    assert all(bool(ground) == bool(p[29, n] > 1e-4) for n, ground in enumerate(shown) if not 5e-5 < p[29, n] < 2e-4)


def test_who_looks_at_a_word(made: Any, visit: Any) -> None:
    path, _, p = made
    seen = visit(path)
    seen.choose(11)
    seen.page.locator("[value='keys']").click()
    assert seen.page.locator("#words .on").get_attribute("data-n") == "11"
    assert "key t5 (11) is read by" in seen.page.inner_text("#about").replace("\u2066", "").replace("\u2069", "")
    assert set(seen.listed()) == set(p[:, 11].argsort(descending=True)[:8].tolist())
    said = re.fullmatch(r"8 heaviest readers, .* that this key receives \(([\d.]+)\)", seen.page.inner_text("#mass"))
    assert said and float(said[1]) == pytest.approx(float(p[:, 11].sum()), rel=0.1)


def test_hovering_shows_and_leaving_brings_back(made: Any, visit: Any) -> None:
    seen = visit(made[0])
    seen.choose(29)
    before = seen.page.inner_text("#about"), seen.page.url
    seen.page.locator("#words [data-n='7']").hover()
    assert "(7)" in seen.page.inner_text("#about") and seen.page.url == before[1]
    seen.page.mouse.move(2, 2)
    assert (seen.page.inner_text("#about"), seen.page.url) == before


def test_a_finger_chooses_a_word(made: Any, visit: Any) -> None:
    seen = visit(made[0], has_touch=True)
    seen.page.locator("#words [data-n='9']").tap()
    seen.settle()
    assert "(9)" in seen.page.inner_text("#about")


def test_keys_reach_every_word(made: Any, visit: Any) -> None:
    seen = visit(made[0])
    at = "#words [tabindex='0']"
    assert seen.page.locator(at).count() == 1
    for key, number in (
        ("Home", 0),
        ("ArrowRight", 1),
        ("ArrowDown", 2),
        ("ArrowLeft", 1),
        ("End", 42),
        ("ArrowUp", 41),
    ):
        seen.press(key, at=at)
        assert seen.page.evaluate("document.activeElement.dataset.n") == str(number), key


def test_left_out_keys_have_no_colour(made: Any, visit: Any) -> None:
    path, _, p = made
    seen = visit(path)
    for what, gone in (("first", 0), ("special", 5)):
        chosen = int(p[9:, gone].argmax()) + 9
        seen.page.select_option("#hide", "nothing")
        seen.choose(chosen)
        assert grounds(seen)[gone] and "not counted" not in seen.page.inner_text("#mass")
        seen.page.select_option("#hide", what)
        seen.settle()
        assert not grounds(seen)[gone] and not {0, gone} & set(seen.listed())
        assert "not counted" in seen.page.inner_text("#mass")
        order = [n for n in p[chosen].argsort(descending=True).tolist() if n not in (0, gone)]
        assert next(iter(seen.listed())) == order[0]


def test_the_linear_scale_ends_at_the_heaviest(made: Any, visit: Any) -> None:
    path, _, p = made
    seen = visit(path, address="#L1H2&scale=log")
    seen.choose(29)
    ends = seen.page.inner_text("#text-scale .least"), seen.page.inner_text("#text-scale .most")
    assert ends == ("0.01 %", "100 %")
    seen.page.locator("[value='linear']").click()
    seen.settle()
    assert seen.page.inner_text("#text-scale .least") == "0"
    assert float(seen.page.inner_text("#text-scale .most")[:-2]) == pytest.approx(100 * float(p[29].max()), abs=1.5)
    dark = [n for n, ground in enumerate(grounds(seen)) if ground == "rgb(20, 15, 52)"]
    assert dark == [int(p[29].argmax())]


# How many colours, coarsely, the canvas of lines holds.
INKED = """() => {
  const canvas = document.getElementById("lines"), hues = new Set();
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let n = 0; n < data.length; n += 4) {
    if (data[n + 3] > 60) hues.add([data[n], data[n + 1], data[n + 2]].map((part) => part >> 5).join());
  }
  return hues.size;
}"""


def test_lines_of_several_heads(made: Any, visit: Any) -> None:
    seen = visit(made[0])
    inked = f"({INKED})()"
    seen.page.locator("[value='lines']").click()
    seen.settle()
    assert seen.page.locator("#left > bdi").count() == 43 == seen.page.locator("#right > bdi").count()
    one = seen.page.evaluate(inked)
    assert one > 0
    seen.page.locator("#heads [data-head='0']").click()
    seen.settle()
    pressed = seen.page.locator("#heads [aria-pressed='true']").all_inner_texts()
    assert pressed == ["H0", "H2"] and seen.page.evaluate(inked) > one and seen.name() == "L1H2"
    seen.page.locator("#heads [data-head='2']").click()
    seen.settle()
    assert seen.name() == "L1H0" and seen.page.locator("#heads [aria-pressed='true']").all_inner_texts() == ["H0"]
    seen.page.locator("#right [data-n='5']").click()
    seen.settle()
    assert "is read by" in seen.page.inner_text("#about") and "(5)" in seen.page.inner_text("#about")
    assert all("willReadFrequently" in said for said in seen.said)  # which is about this test's own reading


def test_a_long_text_says_what_it_holds(visit: Any, tmp_path: Path) -> None:
    report = reports.report(1, 2, 3010)
    report.save(tmp_path / "a.html", head=(0, 1))
    seen = visit(tmp_path / "a.html", address="#L0H1&query=1200")
    mass = 100 * float(report.layers[0].top_weights[1, 1200].sum())
    assert set(seen.listed()) == set(report.layers[0].top_keys[1, 1200].tolist())
    assert seen.page.inner_text("#mass").startswith(f"4 heaviest, {mass:.0f} % of the mass")
    assert "exact for the 4 heaviest keys of a row" in seen.page.inner_text("#text-scale")
    assert "(1200)" in seen.page.inner_text("#about")
    inside = (
        "w => w.offsetTop >= w.parentNode.scrollTop && w.offsetTop < w.parentNode.scrollTop + w.parentNode.clientHeight"
    )
    assert seen.page.locator("#words .on").evaluate(inside)
    assert seen.page.locator("#words > bdi").count() <= 2048


def test_search_finds_tokens(visit: Any, tmp_path: Path) -> None:
    reports.report(1, 1, 3010).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H0&query=3")
    seen.page.fill("#search", "T29")
    seen.settle()
    assert "(29)" in seen.page.inner_text("#about") and seen.page.inner_text("#found") == "111 found"
    seen.press("Enter", at="#search")
    assert "(290)" in seen.page.inner_text("#about")
    seen.press("Shift+Enter", "Shift+Enter", at="#search")
    assert "(2999)" in seen.page.inner_text("#about")
    assert seen.page.locator("#words .on").inner_text() == "t2999"


def test_two_texts_stand_one_below_the_other(visit: Any, tmp_path: Path) -> None:
    q, k = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 11, 8)
    call = reports.call(q, k, positions=rg.Positions(torch.arange(7), torch.arange(11)))
    report = rg.Report.of([call], title="two", model="Made", tokens=list("abcdefg"), key_tokens=list("hijklmnopqr"))
    report.save(tmp_path / "a.html", head=(0, 1))
    seen = visit(tmp_path / "a.html")
    p = rg.attention_weights(q.double(), k.double())[0, 1]
    seen.choose(5)
    assert seen.page.locator("#words > bdi").all_inner_texts() == list("abcdefg")
    assert all(grounds(seen, "#others")) and not any(grounds(seen))
    assert next(iter(seen.listed())) == int(p[5].argmax())
    seen.page.locator("#others [data-n='3']").click()
    seen.settle()
    seen.page.mouse.move(2, 2)
    assert all(grounds(seen)) and not any(grounds(seen, "#others"))
    assert next(iter(seen.listed())) == int(p[:, 3].argmax())


def test_text_of_two_directions_stays_in_order(visit: Any, tmp_path: Path) -> None:
    words = ["##ح", "40", "שלום", "a"]
    reports.report(1, 1, 4, tokens=words).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H0&query=2&key=0")
    lefts = seen.page.locator("#words > bdi").evaluate_all("ws => ws.map(w => w.getBoundingClientRect().left)")
    assert lefts == sorted(lefts)
    letters = """bdi => [0, 2].map((n) => {
      const range = document.createRange();
      range.setStart(bdi.firstChild, n);
      range.setEnd(bdi.firstChild, n + 1);
      return range.getBoundingClientRect().left;
    })"""
    sharp, letter = seen.page.locator("#words [data-n='0']").evaluate(letters)
    assert sharp < letter  # as the tokenizer writes it
    line = seen.page.locator("#best .bar-line").filter(has_text="##ح")
    places = line.evaluate("l => [...l.children].map(c => c.getBoundingClientRect().left)")
    assert places == sorted(places)
    seen.press("Shift+ArrowUp", "Shift+ArrowUp")
    said = seen.page.inner_text("#readout")
    assert said.startswith("query 0 ‘\u2066##ح\u2069’ → key 0 ‘\u2066##ح\u2069’: 100 %")
