"""The page, in a real browser: offline, with hostile tokens, by keyboard, light and dark, and without any script."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sample_reports as reports

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser with playwright")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
if CHROMIUM is None:
    pytest.skip("no Chromium on the path", allow_module_level=True)

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    reports.nasty().save(path, head=(0, 1))
    return path


class Visit:
    """A page that was opened without a network, and all that it said and asked for."""

    def __init__(self, browser: Any, file: Path, before: str = "", **form: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **form})
        self.context.set_offline(True)
        self.page, self.said, self.asked = self.context.new_page(), list[str](), list[str]()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.add_init_script(before)
        self.page.goto(file.as_uri())

    def name(self) -> str:
        return self.page.inner_text("#name").split()[0]

    def style(self, where: str, name: str) -> str:
        return self.page.evaluate(f"getComputedStyle(document.querySelector('{where}'))['{name}']")


@pytest.fixture
def visit(browser: Any, file: Path) -> Iterator[Any]:
    opened: list[Visit] = []

    def visiting(path: Path = file, **form: Any) -> Visit:
        opened.append(Visit(browser, path, **form))
        return opened[-1]

    yield visiting
    for one in opened:
        one.context.close()


def test_nothing_is_asked_of_the_network_and_nothing_goes_wrong(visit: Any, file: Path) -> None:
    seen = visit()
    for key in ("ArrowRight", "ArrowDown", "Shift+ArrowDown"):
        seen.page.keyboard.press(key)
    seen.page.locator("#map").hover(position={"x": 300, "y": 200})
    seen.page.locator("#theme").click()
    assert seen.asked == [file.as_uri()]
    assert seen.said == []


def test_the_file_names_no_address_and_forbids_connections(file: Path) -> None:
    html = file.read_text(encoding="utf-8")
    markup, script = html.split('id="data">')[0], html.rsplit("<script>", 1)[1]
    markup = re.sub(r"base64,[\w/+=]+", "", markup)  # the letters of a picture mean nothing
    for part in (markup, script):
        assert not re.search(r"https?:|//\w|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", part)
    assert "default-src 'none'; connect-src 'none'" in html
    assert html.count("<script>") == 1 and html.count("</script>") == 2


def test_a_script_that_is_not_the_pages_own_does_not_run(visit: Any, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.html"
    html = file.read_text(encoding="utf-8").replace("</body>", "<script>document.title = 'broken in'</script></body>")
    other.write_text(html, encoding="utf-8")
    seen = visit(other)
    assert seen.page.title() == "a model – regard" and "Content Security Policy" in seen.said[0]


def test_tokens_are_text(visit: Any) -> None:
    seen = visit()
    words = seen.page.locator("#words > span").all_inner_texts()
    assert words[:2] == ["</script><script>alert(1)</script>", "<b>"] and words[5] == "\\x2028"
    assert seen.page.locator("b, i").filter(has_text="quoted").count() == 0
    assert seen.page.evaluate("document.scripts.length") == 2 and seen.said == []


def test_arrows_move_layer_and_head(visit: Any) -> None:
    seen = visit()
    names = [seen.name()]
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowUp", "ArrowUp"):
        seen.page.keyboard.press(key)
        names.append(seen.name())
    assert names == ["L0H1", "L0H2", "L1H2", "L1H1", "L1H0", "L1H0", "L0H0", "L0H0"]
    assert seen.page.locator(".grid td.on").evaluate_all("cells => cells.map(c => c.dataset.at)") == ["0,0"] * 3
    assert (seen.page.input_value("#layer"), seen.page.input_value("#head")) == ("0", "0")


def test_lists_and_cells_choose_a_head_and_arrows_in_lists_are_theirs(visit: Any) -> None:
    seen = visit()
    seen.page.select_option("#layer", "1")
    assert seen.name() == "L1H1"
    seen.page.locator(".grid.violet td[data-at='0,2']").click()
    assert seen.name() == "L0H2"
    seen.page.locator("#head").focus()
    seen.page.keyboard.press("ArrowUp")
    assert seen.name() == "L0H1"


def test_the_cursor_tells_weights_and_tokens(visit: Any) -> None:
    seen, layer = visit(), reports.nasty().layers[0]
    for _ in range(7):
        seen.page.keyboard.press("Shift+ArrowDown")
    assert seen.name() == "L0H1"
    said = seen.page.inner_text("#readout")
    weight = re.fullmatch(r"query 7 ‘␣a’ → key 0 ‘.*’: ([\d.e-]+)( or less)?", said)
    assert weight, said
    seen.page.keyboard.press("Shift+ArrowRight")
    for _ in range(8):
        seen.page.keyboard.press("Shift+ArrowRight")
    assert seen.page.inner_text("#readout").endswith(": cannot attend")
    assert seen.page.locator("#tops .row").count() == 1 and layer.heads == 3


def test_what_is_shown_is_what_was_measured(browser: Any, tmp_path: Path) -> None:
    report = reports.report(2, 3, 23)
    report.save(tmp_path / "a.html", head=(1, 2))
    seen, layer = Visit(browser, tmp_path / "a.html"), report.layers[1]
    for _ in range(9):
        seen.page.keyboard.press("Shift+ArrowDown")
    for _ in range(4):
        seen.page.keyboard.press("Shift+ArrowRight")
    shown = float(re.sub(r".*: ([\d.e-]+).*", r"\1", seen.page.inner_text("#readout")))
    assert shown == pytest.approx(max(float(layer.maps[2, 9, 4]), 1e-4), rel=0.08)  # a level is 3.7 %, two digits
    lines = seen.page.locator("#tops .key").all_inner_texts()
    keys = [int(re.search(r"t\d+ (\d+)", line)[1]) for line in lines]
    shares = [float(re.search(r"([\d.]+) %", line)[1]) for line in lines]
    assert keys == layer.top_keys[2, 9].tolist()
    assert shares == pytest.approx((100 * layer.top_weights[2, 9]).tolist(), rel=0.05)
    assert f"entropy {float(layer.entropy[2, 9]):.2f} nats" in seen.page.inner_text("#tops")
    assert seen.page.locator("#best .share").first.inner_text() == f"{float(layer.received[2].max()):.3g}".ljust(4, "0")
    seen.context.close()


def test_a_word_is_a_query(visit: Any) -> None:
    seen = visit()
    seen.page.locator("#words > span").nth(11).click()
    assert "query 11" in seen.page.inner_text("#tops")
    assert seen.page.locator("#words > span.on").get_attribute("data-n") == "11"


@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 21, 27)")])
def test_light_and_dark_follow_the_reader_and_the_button(visit: Any, scheme: str, ground: str) -> None:
    seen, other = visit(color_scheme=scheme), {"rgb(255, 255, 255)", "rgb(18, 21, 27)"} - {ground}
    assert {seen.style(where, "backgroundColor") for where in ("html", "body")} == {ground}
    corner = "[...document.getElementById('map').getContext('2d').getImageData(110, 30, 1, 1).data]"
    before = seen.page.evaluate(corner)
    seen.page.locator("#theme").click()
    assert {seen.style(where, "backgroundColor") for where in ("html", "body")} == other
    assert seen.page.evaluate(corner) != before


def contrast(a: str, b: str) -> float:
    """The ratio of two colours rgb(...), as WCAG 2.2 defines it."""

    def luminance(colour: str) -> float:
        parts = [float(x) / 255 for x in re.findall(r"[\d.]+", colour)[:3]]
        r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(visit: Any, scheme: str) -> None:
    seen = visit(color_scheme=scheme)
    ground = seen.style("body", "backgroundColor")
    for where in ("h1", ".facts", ".rule", ".hint", ".readout"):
        assert contrast(seen.style(where, "color"), ground) > 4.5, where
    value = "n => getComputedStyle(document.body).getPropertyValue(n).trim()"
    for hue in (seen.page.evaluate(value, name) for name in ("--teal", "--amber", "--violet", "--cell")):
        rgb = "rgb({}, {}, {})".format(*(int(hue[i : i + 2], 16) for i in (1, 3, 5)))
        assert contrast(seen.style(".grid td", "color"), rgb) > 4.5, hue


@pytest.mark.parametrize("width", [340, 700, 1600])
def test_the_page_is_as_wide_as_the_screen(visit: Any, width: int) -> None:
    seen = visit(viewport={"width": width, "height": 800})
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.locator("#map").bounding_box()["width"] > 250


# Where a canvas has texts: [text, left, top, right, bottom], as shares of its width and height.
WRITTEN = """
window.written = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const box = this.measureText(text), at = this.getTransform(), { width, height } = this.canvas;
  const corners = [
    [x - box.actualBoundingBoxLeft, y - box.actualBoundingBoxAscent],
    [x + box.actualBoundingBoxRight, y + box.actualBoundingBoxDescent],
  ].map((corner) => at.transformPoint({ x: corner[0], y: corner[1] }));
  const [xs, ys] = [corners.map((p) => p.x / width), corners.map((p) => p.y / height)];
  window.written.push([text, Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)]);
  fillText.call(this, text, x, y);
};
"""


@pytest.mark.parametrize("n", [20, 3010])
@pytest.mark.parametrize("width", [340, 1200])
def test_no_name_at_the_map_is_cut_off(n: int, width: int, visit: Any, tmp_path: Path) -> None:
    reports.report(1, 1, n, tokens=[f"{i}averyverylongtokenname" for i in range(n)]).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", before=WRITTEN, viewport={"width": width, "height": 800})
    written = seen.page.evaluate("window.written")
    assert {"query", "key"} < {text for text, *_ in written} and len(written) > 9
    for text, left, top, right, bottom in written:
        assert min(left, top) > -0.005 and max(right, bottom) < 1.005, text


def test_everything_has_a_name_for_who_cannot_see_it(visit: Any) -> None:
    seen = visit()
    named = "e.getAttribute('aria-label') || e.closest('label') || e.innerText"
    unnamed = f"elements => elements.filter(e => !({named})).map(e => e.outerHTML)"
    assert seen.page.locator("canvas, button, select, [tabindex]").evaluate_all(unnamed) == []
    assert "attention map of L0H1" in seen.page.get_attribute("#map", "aria-label")
    assert seen.page.locator("table caption").count() == 3 and seen.page.locator("th[scope]").count() == 3 * (3 + 2)


def test_the_overview_needs_no_script(visit: Any) -> None:
    seen = visit(java_script_enabled=False)
    text = seen.page.inner_text("body")
    assert "max score" in text and "needs no script" in text and "‘</script>" in text
    assert seen.page.locator("#still img").bounding_box()["width"] > 200
    assert not seen.page.locator("#live").is_visible()


@pytest.mark.full
def test_long_texts_are_sampled_and_stay_small(visit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.inspect.report.payload.ENTRIES", 100)
    monkeypatch.setattr("regard.inspect.report.payload.KEYS", 100)
    report = reports.report(1, 2, 300)
    report.save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html")
    for _ in range(5):
        seen.page.keyboard.press("Shift+ArrowDown")
    first = int(report.layers[0].row_edges[5])
    assert f"query {first}," in seen.page.inner_text("#tops") and seen.said == []


@pytest.mark.full
def test_a_page_of_twelve_heads_and_512_tokens_is_small(tmp_path: Path) -> None:
    reports.report(6, 12, 512).save(tmp_path / "a.html")
    assert (tmp_path / "a.html").stat().st_size < 4_000_000
