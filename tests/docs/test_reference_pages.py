"""The API reference has every public name of regard, once, and the navigation has every page of it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import regard
from generate import reference

ROOT = Path(__file__).resolve().parents[2]
SHOWN = [name for page in reference.PAGES for name in page.names()]


@pytest.mark.parametrize("module", ["regard", "regard.nn", "regard.facts", "regard.heads", "regard.sources"])
def test_every_public_name_stands_in_the_reference_once(module: str) -> None:
    found = regard if module == "regard" else getattr(regard, module.removeprefix("regard."))
    public = regard.__all__ if found is regard else [name for name in dir(found) if re.match("[a-zA-Z]", name)]
    public = [name for name in public if inspect.isclass(x := getattr(found, name)) or inspect.isroutine(x)]
    assert len(public) > 3
    assert [name for name in public if SHOWN.count(f"{module}.{name}") != 1] == []


def test_what_most_readers_look_for_stands_first() -> None:
    pages = {page.file: page.names() for page in reference.PAGES}
    assert pages["attention"][0] == "regard.attention"
    assert pages["inspection"][:2] == ["regard.look", "regard.record"]
    assert pages["attention"].index("regard.tail") < pages["attention"].index("regard.Dropout")


@pytest.mark.parametrize("module", ["facts", "heads", "nn", "sources"])
def test_a_module_of_regard_has_a_page_under_its_name(module: str) -> None:
    page = next(page for page in reference.PAGES if page.file == module)
    assert page.title == f"regard.{module}" and f"rg.{module}" in page.text


def test_modules_are_read_without_importing_what_they_serve() -> None:
    assert "regard.compat.jax.dot_product_attention" in SHOWN
    assert "regard.compat.transformers.packed" in SHOWN
    assert len(SHOWN) == len(set(SHOWN))


def test_navigation_has_every_page_of_the_docs() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [f"reference/{page.file}.md" for page in reference.PAGES]
    pages += [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not re.search(rf"[ :-] {re.escape(page)}$", navigation, re.MULTILINE)] == []
