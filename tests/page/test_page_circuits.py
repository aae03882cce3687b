"""Circuits by token on the page: the tokens that rg.heads.circuits finds, for the head and the token that are shown."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import regard as rg
from regard.demo.model import ByteTokenizer, load
from regard.demo.reading import read
from regard.inspect.report.findings import shown
from regard_command import main
from test_access import SIZES, axe, serious

pytestmark = pytest.mark.full
__all__ = ["axe"]  # the fixture

TEXT = b"She sells sea shells"


@pytest.fixture(scope="module")
def found() -> Any:
    return rg.heads.circuits(load(), list(TEXT), tokenizer=ByteTokenizer())


@pytest.fixture
def seen(visit: Any, found: Any, tmp_path: Path) -> Any:
    read(load(), TEXT).with_heads(found).save(tmp_path / "a.html", head="L3H1")
    return visit(tmp_path / "a.html", address="#L3H1&query=4")


def line(seen: Any, of: str) -> str:
    return re.sub("[\u2066\u2069]", "", seen.page.inner_text(of))


def test_the_tokens_are_those_of_the_circuits(seen: Any, found: Any) -> None:
    for head, query in (("L3H1", 4), ("L1H0", 11)):
        seen.page.goto(seen.page.url.split("#")[0] + f"#{head}&query={query}")
        seen.settle()
        for of, table in (("#raised", found.ov(head, [TEXT[query]])), ("#sought", found.qk(head, [TEXT[query]]))):
            words = seen.page.locator(f"{of} .word").all_inner_texts()
            assert words == [shown(text) for text in table.others[0]]
            assert line(seen, of).endswith(f"rank of itself: {int(table.rank[0])} (0 is first)")
        assert line(seen, "#raised").startswith(f"a head that reads {chr(TEXT[query])} raises ")
        assert line(seen, "#sought").startswith(f"a query at {chr(TEXT[query])} seeks ")
    assert seen.said == [] and len(seen.asked) == 1


def test_a_token_whose_circuits_are_not_there_says_so(
    visit: Any, found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    circuits = importlib.import_module("regard.inspect.heads.circuits")  # heads.circuits is the function
    monkeypatch.setattr(circuits, "ROWS", 48)  # 16 heads, three tokens: S, h, e
    few = rg.heads.circuits(load(), list(TEXT), tokenizer=ByteTokenizer())
    read(load(), TEXT).with_heads(few).save(tmp_path / "a.html")
    seen = visit(tmp_path / "a.html", address="#L3H1&query=2")
    assert seen.page.locator("#raised").is_visible() and not seen.page.locator("#no-circuit").is_visible()
    seen.choose(8)
    assert seen.page.locator("#no-circuit").is_visible() and not seen.page.locator("#raised").is_visible()


def test_the_page_of_the_command_shows_them(visit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "-t", TEXT.decode(), "--circuits", "-o", str(tmp_path / "a.html"), "--head", "L3H1"]) == 0
    assert "copying, eigenvalues of OV" in capsys.readouterr().out
    seen = visit(tmp_path / "a.html", address="#L3H1&query=4")
    assert line(seen, "#raised").startswith("a head that reads s raises ")
    assert line(seen, "#sought").startswith("a query at s seeks ")
    assert seen.said == [] and len(seen.asked) == 1


def test_without_circuits_there_is_no_such_part(visit: Any) -> None:
    assert not visit().page.locator("#circuits").is_visible()


@pytest.mark.parametrize(("scheme", "width"), SIZES)
def test_axe_finds_nothing(visit: Any, axe: str, found: Any, tmp_path: Path, width: int, scheme: str) -> None:
    read(load(), TEXT).with_heads(found).save(tmp_path / "a.html", head="L3H1")
    form = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
    seen = visit(tmp_path / "a.html", address="#L3H1&query=4", **form)
    assert seen.page.locator("#raised").is_visible()
    assert serious(seen, axe) == []
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.said == [] and len(seen.asked) == 1
