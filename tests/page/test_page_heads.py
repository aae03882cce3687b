"""Heads: by keys, lists, cells, thumbnails and links; what is shown is in the address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import sample_reports as reports
from regard.inspect.report.element import HIDDEN

# A visit takes half a second: a plain run makes those of test_page.py and test_served_page.py alone.
pytestmark = pytest.mark.full


def marked(seen: Any) -> list[str]:
    return seen.page.locator("#sheet [aria-selected='true']").evaluate_all("found => found.map(t => t.dataset.at)")


def test_arrows_move_layer_and_head_while_the_map_has_the_focus(visit: Any) -> None:
    seen = visit()
    names = [seen.name()]
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowUp", "ArrowUp"):
        seen.press(key)
        names.append(seen.name())
    assert names == ["L0H1", "L0H2", "L1H2", "L1H1", "L1H0", "L1H0", "L0H0", "L0H0"]
    assert seen.page.locator(".grid td.on").evaluate_all("cells => cells.map(c => c.dataset.at)") == ["0,0"] * 3
    assert (seen.page.input_value("#layer"), seen.page.input_value("#head")) == ("0", "0")


def test_elsewhere_arrows_scroll(visit: Any) -> None:
    seen = visit(viewport={"width": 800, "height": 400})
    seen.page.locator("h1").click()
    seen.page.keyboard.press("ArrowDown")
    seen.page.keyboard.press("ArrowRight")
    # by frames of the page: its policy forbids what wait_for_function does
    seen.page.evaluate(
        "new Promise(done => { const look = () => scrollY > 0 ? done() : requestAnimationFrame(look); look(); })"
    )
    assert seen.name() == "L0H1"


def test_lists_and_cells_choose_a_head_and_arrows_in_lists_are_theirs(visit: Any) -> None:
    seen = visit()
    seen.page.select_option("#layer", "1")
    seen.settle()
    assert seen.name() == "L1H1"
    seen.page.locator(".grid.violet td[data-at='0,2']").click()
    seen.settle()
    assert seen.name() == "L0H2"
    seen.press("ArrowUp", at="#head")
    assert seen.name() == "L0H1"


def test_thumbnails_choose_a_head_by_pointer_and_keys(visit: Any) -> None:
    seen = visit()
    assert seen.page.locator("#sheet .thumb").count() == 6 and marked(seen) == ["0,1"]
    seen.page.locator("#sheet [data-at='1,0']").click()
    seen.settle()
    assert seen.name() == "L1H0" and marked(seen) == ["1,0"]
    names = []
    for key in ("ArrowRight", "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowDown"):
        seen.press(key, at="#sheet [tabindex='0']")
        names.append(seen.name())
        assert seen.page.evaluate("document.activeElement.ariaSelected") == "true"
    assert names == ["L1H1", "L0H1", "L0H0", "L0H0", "L1H0"]


def test_thumbnails_in_the_order_of_a_number(visit: Any, tmp_path: Path) -> None:
    report = reports.report(2, 3, 23)
    report.save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html")
    entropy = {f"L{n}H{h}": float(v) for n, one in enumerate(report.layers) for h, v in enumerate(one.entropy.mean(-1))}
    for value, sign in (("0", -1), ("-0", 1)):
        seen.page.select_option("#sort", value)
        order = [name.split()[0] for name in seen.page.locator("#sheet .thumb").all_inner_texts()]
        assert order == sorted(entropy, key=lambda name: sign * entropy[name])
    label = seen.page.locator("#sheet .thumb").first.get_attribute("aria-label")
    assert re.fullmatch(r"L\dH\d, entropy, nats [\d.]+", label)


def test_thumbnails_of_a_finding(visit: Any, tmp_path: Path) -> None:
    report = reports.report(2, 3, 23)
    report.save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html")
    peak = report.findings[-1]
    seen.page.select_option("#filter", label=peak.said.split(":")[0])
    assert seen.page.locator("#sheet .thumb span").all_inner_texts() == [peak.heads[0].name]
    assert seen.page.inner_text("#count") == "1 head"


def test_a_thumbnail_shows_its_head(visit: Any) -> None:
    seen = visit()
    seen.settle()
    pixels = "t => [...t.querySelector('canvas').getContext('2d').getImageData(0, 0, 23, 23).data]"
    found = [seen.page.locator(f"#sheet [data-at='0,{head}']").evaluate(pixels) for head in (0, 1)]
    hidden = found[0][4 * 22 : 4 * 23]  # the first query sees the first key alone
    assert hidden == [213, 217, 224, 255] and found[0][:4] == [20, 15, 52, 255] and found[0] != found[1]


def test_findings_lead_to_their_heads(visit: Any, tmp_path: Path) -> None:
    report = reports.report(2, 3, 23)
    report.save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L0H0&query=5")
    link = seen.page.locator(".findings a").last
    assert link.inner_text() == report.findings[-1].heads[0].name
    link.click()
    seen.settle()
    assert re.search(rf"#{seen.name()}&query=5&key=\d$", seen.page.url) and seen.name() == link.inner_text()


def test_a_query_alone_is_shown_with_the_key_that_it_looks_at_most(visit: Any) -> None:
    levels = reports.nasty().layers[1].weights[2, 17]
    key = int(levels.masked_fill(levels == HIDDEN, 0).argmax())
    assert key > 0 and visit(address="#L1H2&query=17").page.url.endswith(f"#L1H2&query=17&key={key}")
    assert visit(address="#L1H2&query=17&key=3").page.url.endswith("#L1H2&query=17&key=3")


def test_a_link_shows_what_it_was_taken_from(visit: Any) -> None:
    seen = visit()
    seen.page.locator("[value='lines']").click()
    seen.page.locator("[value='keys']").click()
    seen.page.locator("[value='linear']").click()
    seen.page.select_option("#hide", "first")
    seen.page.locator("#heads [data-head='2']").click()
    seen.page.locator("#closer").click()
    seen.page.locator("#right [data-n='9']").click()
    seen.settle()
    address = seen.page.url.partition("#")[2]
    readers = reports.nasty().layers[0].weights[1, :, 9]
    query = int(readers.masked_fill(readers == HIDDEN, 0).argmax())  # with a key goes who looks at it most
    assert address == f"L0H1&query={query}&key=9&by=keys&view=lines&scale=linear&hide=first&zoom=1&heads=2"
    other = visit(address=f"#{address}")
    for where in ("#name", "#about", "#tops", "#mass", "#readout"):
        assert other.page.inner_text(where) == seen.page.inner_text(where)
    pressed = "found => found.map(b => b.innerText)"
    assert other.page.locator("[aria-pressed='true']").evaluate_all(pressed) == [
        *("lines", "who looks at it", "weights", "linear", "H1", "H2"),
    ]
    other.page.evaluate("location.hash = '#L1H2&query=3'")
    other.settle()
    assert other.name() == "L1H2" and other.page.url.endswith(
        "#L1H2&query=3&key=9&by=keys&view=lines&scale=linear&hide=first&zoom=1&heads=2"
    )


@pytest.mark.parametrize(
    "address", ["#L9H9&query=99&key=-3&zoom=99", "#nothing", "#L0H0&by=constructor&zoom=x&heads=7&query=%"]
)
def test_an_address_of_what_does_not_exist_shows_what_does(visit: Any, address: str) -> None:
    seen = visit(address=address)
    assert seen.name() in ("L1H2", "L0H1", "L0H0") and seen.said == []
    assert "looks at" in seen.page.inner_text("#about")


def test_the_cursor_tells_weights_and_tokens(visit: Any) -> None:
    seen = visit(address="#L0H1&query=0&key=0")
    seen.press(*["Shift+ArrowDown"] * 7)
    assert re.fullmatch(
        r"query 7 ‘\u2066␣a\u2069’ → key 0 ‘\u2066.*\u2069’: (< )?[\d.]+ %", seen.page.inner_text("#readout")
    )
    seen.press(*["Shift+ArrowRight"] * 9)
    assert seen.page.inner_text("#readout").endswith(": cannot attend") and seen.name() == "L0H1"


# From now on, names holds what is written on canvases.
NAMES = """() => {
  window.names = [];
  const fillText = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
    names.push(text);
    fillText.call(this, text, ...at);
  };
}"""


def test_the_map_comes_closer_until_tokens_have_names(visit: Any, tmp_path: Path) -> None:
    report = reports.report(1, 2, 3010)
    report.save(tmp_path / "a.html")
    key = int(report.layers[0].top_keys[1, 1200, 0])
    seen = visit(tmp_path / "a.html", address=f"#L0H1&query=1200&key={key}")
    share = 100 * float(report.layers[0].top_weights[1, 1200, 0])
    assert float(seen.page.inner_text("#readout").split(": ")[1][:-2]) == pytest.approx(share, abs=0.6)
    seen.page.evaluate(NAMES)
    seen.press(*["+"] * 12)
    assert seen.page.url.endswith("zoom=9")
    names = seen.page.evaluate("names")
    assert any("t1200" in name for name in names) and any(f"t{key}" in name for name in names)
    box = seen.page.locator("#map").bounding_box()
    seen.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.4)
    near = int(re.match(r"query (\d+)", seen.page.inner_text("#readout"))[1])
    assert abs(near - 1200) < 8
    seen.press(*["-"] * 12)
    assert "zoom" not in seen.page.url and seen.said == []
