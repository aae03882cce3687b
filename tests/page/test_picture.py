"""A page about an image: its patches in the colours of a row, by pointer and by keys."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report.picture import LARGEST, Picture

# A visit takes half a second: a plain run makes those of test_page.py and test_served_page.py alone.
pytestmark = pytest.mark.full

ROWS, COLUMNS = 3, 5


def report(picture: Picture) -> rg.Report:
    """Of a model that sees [CLS] and the patches of an image, each looks at all."""
    random = torch.Generator().manual_seed(1)
    n = picture.special + ROWS * COLUMNS
    q, k = torch.randn(2, 1, 2, n, 8, generator=random) * 2
    tokens = ["[CLS]", *(f"{row},{column}" for row in range(ROWS) for column in range(COLUMNS))]
    return rg.Report.of([reports.call(q, k)], title="an image", model="Made", tokens=tokens, picture=picture)


@pytest.fixture
def seen(visit: Any, tmp_path: Any) -> Any:
    random = torch.Generator().manual_seed(1)
    report(Picture.of(torch.rand(3, 30, 50, generator=random), ROWS, COLUMNS, 1)).save(tmp_path / "a.html", head=(0, 1))
    return visit(tmp_path / "a.html")


def click(seen: Any, row: int, column: int) -> None:
    box = seen.page.locator("#overlay").bounding_box()
    x, y = (column + 0.5) / COLUMNS * box["width"], (row + 0.5) / ROWS * box["height"]
    seen.page.locator("#overlay").click(position={"x": x, "y": y})
    seen.page.mouse.move(2, 2)
    seen.settle()


def test_a_click_on_a_patch_shows_its_row(seen: Any) -> None:
    before = seen.page.evaluate("document.getElementById('overlay').toDataURL()")
    click(seen, 2, 3)
    assert "2,3" in seen.page.inner_text("#about") and "(14)" in seen.page.inner_text("#about")
    assert "query=14" in seen.page.url
    assert seen.page.evaluate("document.getElementById('overlay').toDataURL()") != before
    q, k = torch.randn(2, 1, 2, 16, 8, generator=torch.Generator().manual_seed(1)) * 2
    p = rg.attention_weights(q.double(), k.double())[0, 1, 14]
    assert set(seen.listed()) == set(p.argsort(descending=True)[:8].tolist())
    # the heaviest patch is coloured most
    alphas = seen.page.evaluate(
        """([rows, columns]) => {
          const c = document.getElementById("overlay"), pen = c.getContext("2d");
          const at = (n, size, count) => Math.floor(((n + 0.25) / count) * size);
          const place = (row, column) => [at(column, c.width, columns), at(row, c.height, rows)];
          const alpha = (row, column) => pen.getImageData(...place(row, column), 1, 1).data[3];
          return Array.from({ length: rows * columns }, (_, n) => alpha(Math.floor(n / columns), n % columns));
        }""",
        [ROWS, COLUMNS],
    )
    assert alphas.index(max(alphas)) == int(p[1:].argmax())


def test_keys_move_over_the_patches_and_the_text_is_what_is_no_patch(seen: Any) -> None:
    assert seen.page.locator("#words > bdi").all_inner_texts() == ["[CLS]"]
    click(seen, 1, 1)
    for key, name in (("ArrowRight", "1,2"), ("ArrowDown", "2,2"), ("ArrowLeft", "2,1"), ("ArrowUp", "1,1")):
        seen.press(key, at="#overlay")
        assert name in seen.page.inner_text("#about")
    assert seen.page.locator("#words .on").count() == 0
    seen.choose(0)
    assert "[CLS]" in seen.page.inner_text("#about") and seen.page.locator("#words .on").count() == 1
    seen.page.locator("#overlay").hover(position={"x": 3, "y": 3})
    assert "0,0" in seen.page.inner_text("#about")
    seen.page.mouse.move(2, 2)
    assert "[CLS]" in seen.page.inner_text("#about") and seen.said == [] and len(seen.asked) == 1


def test_a_picture_is_what_the_model_was_given() -> None:
    pixels = torch.rand(3, 4, 6)
    assert torch.equal(Picture.of(pixels, 2, 3, 1).pixels, (pixels * 255).round().byte().permute(1, 2, 0))
    wide = Picture.of((pixels - 0.5) / 0.25, 2, 3, 1).pixels
    spread = (pixels - pixels.min()) / (pixels.max() - pixels.min())
    assert (wide.int() - (spread * 255).permute(1, 2, 0)).abs().max() <= 0.51
    assert Picture.of(torch.zeros(1, 4, 6), 2, 3, 1).pixels.shape == (4, 6, 3)
    assert max(Picture.of(torch.rand(3, 2 * LARGEST, LARGEST), 2, 3, 1).pixels.shape) == LARGEST


def test_the_page_of_a_text_has_no_picture(visit: Any) -> None:
    assert visit().page.locator("#patches").count() == 0


def test_the_image_is_in_the_file(seen: Any) -> None:
    size = seen.page.locator("#patches img").evaluate("image => [image.naturalWidth, image.naturalHeight]")
    assert size == [50, 30]
    assert re.match(r"data:image/png;base64,", seen.page.locator("#patches img").get_attribute("src"))


def test_cls_asks_first_and_nothing_is_said_of_texts(seen: Any) -> None:
    assert (
        re.match(r"query \W*\[CLS\]\W* \(0\) looks at", seen.page.inner_text("#about")) and "query=0" in seen.page.url
    )
    assert seen.page.get_attribute("#search", "placeholder") == "row,column"
    assert seen.page.locator("#hide option").all_inner_texts()[1] == "[CLS]"
    assert seen.page.inner_text("[data-choice='view'][value='text']") == "image"
    said = seen.page.inner_text("body").lower()
    assert "induction" not in said and "previous" not in said and "find a token" not in said


def alphas(seen: Any) -> list[int]:
    return seen.page.evaluate(
        """() => {
          const c = document.getElementById("overlay"), of = c.getContext("2d").getImageData(0, 0, c.width, c.height);
          return Array.from(of.data).filter((_, n) => n % 4 === 3);
        }"""
    )


def test_the_image_is_seen_through_the_colours(seen: Any) -> None:
    before = sum(alphas(seen))
    assert min(alphas(seen)) < 60  # where there is little weight
    seen.page.locator("#opacity").fill("30")
    seen.settle()
    assert sum(alphas(seen)) < 0.6 * before and "opacity=30" in seen.page.url
    seen.page.locator("#opacity").fill("0")
    seen.settle()
    assert sum(alphas(seen)) == 0
