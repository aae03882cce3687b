"""`regard compare`: two texts, two models, two heads; what is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from regard_command import main
from test_cli import folder, sentence


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("She sells sea shells.")
    Path("other.txt").write_text("He sells old shells.")


def test_two_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "one.txt", "other.txt", "-o", "a.html"]) == 0
    said = capsys.readouterr().out
    assert "heads that changed most: L" in said and "without a counterpart" in said and "wrote a.html" in said
    assert "‘She sells sea shells.’ → ‘He sells old shells.’" in Path("a.html").read_text(encoding="utf-8")
    assert main(["compare", "-t", "She sells", "-t", "He sells", "-o", "a.json"]) == 0
    content = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert content["schema"] == "regard-comparison-1" and len(content["layers"]) == 4


def test_two_heads_of_one_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "one.txt", "--head", "L3H1", "--with-head", "L2H0", "-o", "a.html"]) == 0
    assert "L3H1 before, L2H0 after: " in capsys.readouterr().out
    assert '"shown":[[3,1],[2,0]]' in Path("a.html").read_text(encoding="utf-8")


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_two_models(capsys: pytest.CaptureFixture[str]) -> None:
    Path("words.txt").write_text("a b a")
    first, second = (folder(name, words=("a", "b")) for name in ("first", "second"))
    assert main(["compare", "words.txt", "--model", first, "--with-model", second]) == 0
    said = capsys.readouterr().out
    assert "before: first" in said and "after:  second" in said and "counterpart" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is no text; name a FILE, or two, or write -t 'some words'"),
        (["one.txt"], "there is one text, one model and no second head; name another text, --with-model DIR"),
        (["one.txt", "other.txt", "-t", "c"], "there are 3 texts; expected one or two"),
        (["one.txt", "none.txt"], "none.txt: No such file"),
        (["one.txt", "other.txt", "-o", "a.png"], "not supported as a comparison's file: its suffix is none of .html"),
        (["one.txt", "--with-head", "L1H1"], "--with-head is the head after; name the one before too"),
        (["one.txt", "other.txt", "--head", "L7H0"], "there is no layer L7 here"),
        (["one.txt", "--with-model", "nowhere"], "nowhere is no model of transformers"),
    ],
)
def test_what_cannot_be_compared(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *arguments]) == 1
    assert said in sentence(capsys, "compare")
