"""The page, in a real browser: offline, with hostile tokens, by keyboard, light and dark, and without any script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import sample_reports as reports


def test_nothing_is_asked_of_the_network_and_nothing_goes_wrong(visit: Any, file: Path) -> None:
    seen = visit()
    seen.press("ArrowRight", "ArrowDown", "Shift+ArrowDown", "+")
    seen.page.locator("[value='lines']").click()
    seen.page.select_option("#sort", "0")
    seen.page.fill("#search", "a")
    seen.page.locator("#map").hover(position={"x": 300, "y": 200})
    seen.page.locator("#theme").click()
    assert seen.asked == [file.as_uri()]
    assert seen.said == []


def test_the_file_names_no_address_and_forbids_connections(file: Path) -> None:
    html = file.read_text(encoding="utf-8")
    markup, script = html.split('id="data">')[0], html.rsplit("<script>", 1)[1]
    markup = re.sub(r"(base64,|sha256-)[\w/+=]+", "", markup)  # the letters of a picture or a hash mean nothing
    for part in (markup, script):
        assert not re.search(r"https?:|//\w|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", part)
    assert "default-src 'none'; connect-src 'none'" in html
    assert html.count("<script>") == 1 and html.count("</script>") == 2


@pytest.mark.full
def test_a_script_that_is_not_the_pages_own_does_not_run(visit: Any, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.html"
    html = file.read_text(encoding="utf-8").replace("</body>", "<script>document.title = 'broken in'</script></body>")
    other.write_text(html, encoding="utf-8")
    seen = visit(other)
    assert seen.page.title() == "a model – regard" and "Content Security Policy" in seen.said[0]


@pytest.mark.full
def test_tokens_are_text(visit: Any) -> None:
    seen = visit()
    words = seen.page.locator("#words > bdi").all_inner_texts()
    assert words[:2] == ["</script><script>alert(1)</script>", "<b>"] and words[5] == "\\x2028"
    assert seen.page.locator("b, i").filter(has_text="quoted").count() == 0
    assert seen.page.evaluate("document.scripts.length") == 2 and seen.said == []


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(visit: Any, scheme: str) -> None:
    seen = visit(color_scheme=scheme)
    ground = seen.style("body", "backgroundColor")
    for where in ("h1", ".facts", ".rule", ".hint", ".readout", "#mass", "#found"):
        assert contrast(seen.style(where, "color"), ground) > 4.5, where
    value = "n => getComputedStyle(document.body).getPropertyValue(n).trim()"
    for hue in (seen.page.evaluate(value, name) for name in ("--blue", "--teal", "--amber", "--violet", "--cell")):
        rgb = "rgb({}, {}, {})".format(*(int(hue[i : i + 2], 16) for i in (1, 3, 5)))
        assert contrast(seen.style(".grid td", "color"), rgb) > 4.5, hue


@pytest.mark.full
@pytest.mark.parametrize("width", [340, 390, 768, 1280, 1920])
def test_the_page_is_as_wide_as_the_screen(visit: Any, width: int) -> None:
    seen = visit(viewport={"width": width, "height": 800})
    for view in ("lines", "text"):
        seen.page.locator(f"[value='{view}']").click()
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


@pytest.mark.full
@pytest.mark.parametrize("n", [20, 3010])
@pytest.mark.parametrize("width", [340, 1200])
def test_no_name_at_the_map_is_cut_off(n: int, width: int, visit: Any, tmp_path: Path) -> None:
    reports.report(1, 1, n, tokens=[f"{i}averyverylongtokenname" for i in range(n)]).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", before=WRITTEN, viewport={"width": width, "height": 800})
    written = seen.page.evaluate("window.written")
    assert {"query", "key"} < {text for text, *_ in written} and len(written) > 9
    for text, left, top, right, bottom in written:
        assert min(left, top) > -0.005 and max(right, bottom) < 1.005, text


@pytest.mark.full
def test_everything_has_a_name_for_who_cannot_see_it(visit: Any) -> None:
    seen = visit()
    named = "e.getAttribute('aria-label') || e.closest('label') || e.innerText"
    unnamed = f"elements => elements.filter(e => !({named})).map(e => e.outerHTML)"
    assert (
        seen.page.locator("canvas:not([aria-hidden]), button, select, input, [role], [tabindex]").evaluate_all(unnamed)
        == []
    )
    assert "attention map of L0H1" in seen.page.get_attribute("#map", "aria-label")
    assert seen.page.locator("table caption").count() == 3 and seen.page.locator("th[scope]").count() == 3 * (3 + 2)


@pytest.mark.full
def test_the_overview_needs_no_script(visit: Any) -> None:
    seen = visit(java_script_enabled=False)
    text = seen.page.inner_text("body")
    assert "max score" in text and "needs no script" in text and "‘</script>" in text
    assert seen.page.locator("#still img").bounding_box()["width"] > 200
    assert not seen.page.locator("#live").is_visible()


@pytest.mark.full
def test_the_page_works_in_a_notebook(visit: Any, tmp_path: Path) -> None:
    cell = reports.nasty()._repr_html_()
    (tmp_path / "a.html").write_text(f"<!DOCTYPE html><body data-ready='cell'>{cell}", encoding="utf-8")
    seen = visit(tmp_path / "a.html", viewport={"width": 900, "height": 900})
    frame = seen.page.frame_locator("iframe")
    frame.locator("#sheet [data-at='1,2']").click()
    frame.locator("#words [data-n='7']").click()
    frame.locator("[value='lines']").click()
    seen.settle()
    assert frame.locator("#name").inner_text().startswith("L1H2") and "(7)" in frame.locator("#about").inner_text()
    frame.locator(".findings a").last.click()
    seen.settle()
    assert frame.locator("#name").inner_text().split()[0] == frame.locator(".findings a").last.inner_text()
    assert seen.said == [] and seen.asked == [(tmp_path / "a.html").as_uri()]
    inside = seen.page.frames[1]
    assert inside.evaluate("() => { try { return parent.document.title } catch { return 'refused' } }") == "refused"
