"""The page of a comparison of two images: the changes of their patches, drawn over both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report.picture import Picture
from test_page_compare import said

pytestmark = pytest.mark.full


def image(seed: int, rows: int = 3, columns: int = 5) -> rg.Report:
    random, n = torch.Generator().manual_seed(seed), 1 + rows * columns
    call = reports.call(*torch.randn(2, 1, 2, n, 8, generator=random) * 2)
    tokens = ["[CLS]", *(f"{row},{column}" for row in range(rows) for column in range(columns))]
    picture = Picture.of(torch.rand(3, 30, 50, generator=random), rows, columns, 1)
    return rg.Report.of([call], title=f"image {seed}", model="Made", tokens=tokens, picture=picture)


def test_images_show_the_changes_of_their_patches(visit: Any, tmp_path: Path) -> None:
    found = image(1).compare(image(2))
    found.save(tmp_path / "a.html", heads=("L0H1", "L0H1"))
    seen = visit(tmp_path / "a.html", address="#L0H1&query=0&key=1")
    assert seen.page.locator("#before-chosen bdi").all_inner_texts() == ["[CLS]"] and seen.said == []
    moved = found.moved("L0H1")[0, 1:]
    for side in ("before", "after"):
        painted = seen.page.evaluate(
            """([id, rows, columns]) => {
              const c = document.getElementById(id), pen = c.getContext("2d");
              const at = (n, size, count) => Math.floor(((n + 0.5) / count) * size);
              const place = (n) => [at(n % columns, c.width, columns), at(Math.floor(n / columns), c.height, rows)];
              return Array.from({ length: rows * columns }, (_, n) => [...pen.getImageData(...place(n), 1, 1).data]);
            }""",
            [f"{side}-overlay", 3, 5],
        )
        for n in (int(moved.argmax()), int(moved.argmin())):
            red, _, blue, alpha = painted[n]
            assert alpha > 40 and (red > blue) == bool(moved[n] > 0)
    seen.page.locator("#after-overlay").click(position={"x": 3, "y": 3})
    seen.settle()
    assert said(seen, "#about").startswith("query 0,0:") and "query=1&" in seen.page.url
    seen.press("ArrowRight", at="#before-overlay")
    assert said(seen, "#about").startswith("query 0,1:")
