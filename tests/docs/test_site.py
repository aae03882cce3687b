"""What makes the site: docstrings and formulas as the pages show them, and pages that fetch nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FETCHED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc="?(?:https?:)?//|<link[^>]*\shref="?(?:https?:)?//""")


def test_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe")
    from generate.docstrings import to_markdown

    text = "Shapes (*batch, n), `a*b`.\n\n>>> print(1)\n1\n\nn   width\n\nThen more:\n\n    import regard\n"
    expected = (
        "Shapes (\\*batch, n), `a*b`.\n\n```pycon\n>>> print(1)\n1\n```\n\n```text\nn   width\n```\n\nThen more:\n\n"
    )
    expected += "    import regard"
    assert to_markdown(text) == expected


def test_formulas_become_mathml() -> None:
    pytest.importorskip("latex2mathml")
    from generate.formulas import to_mathml

    page = to_mathml('<p>x <span class="arithmatex">\\(a &lt; b_i\\)</span> y</p>')
    assert page.startswith("<p>x <math") and page.endswith("</math> y</p>")
    assert "arithmatex" not in page and "<mo>&#x0003C;</mo>" in page and "<msub>" in page


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_site_builds_and_its_pages_fetch_nothing(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {"index.html", "reference/masks.html"} <= set(pages)
    assert [name for name, page in pages.items() if FETCHED.search(page)] == []
    assert 'id="regard.Causal"' in pages["reference/masks.html"]
    assert (site / "search" / "search_index.json").stat().st_size > 10_000
