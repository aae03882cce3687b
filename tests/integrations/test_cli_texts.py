"""What `regard look` reads: text in UTF-8, or in the encoding that --encoding names; anything else is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from regard_command import main
from regard_command.encoding import of_words
from test_cli import folder, sentence

WORDS = "café naïve"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tokens(*arguments: str) -> str:
    """What was read, from the report's tokens."""
    assert main(["look", *arguments, "-o", "a.json"]) == 0
    return "".join(json.loads(Path("a.json").read_text())["layers"][0]["keys"]["tokens"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            WORDS.encode("latin-1"),
            "some.txt is not UTF-8: byte 0xe9 at offset 3 (line 1, after 'caf'). If it is a text, name its encoding, "
            "as in --encoding latin-1.",
        ),
        (b"one\ntwo \xff\n", "some.txt is not UTF-8: byte 0xff at offset 8 (line 2, after 'two ')."),
        (WORDS.encode("utf-16"), "byte 0xff at offset 0 (line 1). It begins as UTF-16 does: --encoding utf-16."),
        (b"\x7fELF\x02\x01\x01\x00\x00", "some.txt is no text: it has a NUL byte at offset 7."),
        ("ab é".encode()[:-1], "byte 0xc3 at offset 3 (line 1, after 'ab '): the text ends inside of a character."),
    ],
)
def test_a_text_in_another_encoding_is_refused(content: bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.txt").write_bytes(content)
    assert main(["look", "some.txt"]) == 1
    assert said in sentence(capsys)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_model_of_transformers_reads_no_broken_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.txt").write_bytes(WORDS.encode("latin-1"))
    assert main(["look", "some.txt", "--model", folder("whole", words=("caf", "nave"))]) == 1
    assert "some.txt is not UTF-8: byte 0xe9 at offset 3" in sentence(capsys)


def test_standard_input_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(WORDS.encode("latin-1"))))
    assert main(["look", "-"]) == 1
    assert "standard input is not UTF-8: byte 0xe9 at offset 3" in sentence(capsys)


def test_the_encoding_that_is_named_is_read() -> None:
    Path("utf-8.txt").write_text(WORDS, encoding="utf-8")
    expected = tokens("utf-8.txt")
    for encoding in ("latin-1", "utf-16", "utf-8-sig", "cp1252"):
        Path("some.txt").write_text(WORDS, encoding=encoding)
        assert tokens("some.txt", "--encoding", encoding) == expected
    Path("some.txt").write_text(WORDS, encoding="utf-8-sig")  # its mark is no part of the text
    assert tokens("some.txt") == expected


def test_a_code_page_without_the_letters_of_a_report_does_not_matter() -> None:
    """Windows opens files and pipes in such a page: what a command prints to them is UTF-8."""
    words = [sys.executable, "-m", "regard_command", "look", "-t", "She sells sea shells."]
    ran = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "cp1252"})
    assert ran.returncode == 0, ran.stderr.decode()
    assert "▁" in ran.stdout.decode("utf-8")


def test_an_encoding_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.txt").write_text(WORDS, encoding="utf-8")
    assert main(["look", "some.txt", "--encoding", "ascii"]) == 1
    assert "some.txt is not ASCII: byte 0xc3 at offset 3 (line 1, after 'caf')." in sentence(capsys)


@pytest.mark.parametrize("name", ["latni-1", "hex"])
def test_an_encoding_that_is_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["look", "some.txt", "--encoding", name])
    assert left.value.code == 2
    assert f"{name!r} is no encoding of texts; expected one such as utf-8, latin-1, utf-16" in capsys.readouterr().err


def test_words_in_a_terminal_of_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has decoded them before; os.fsencode would write them in the terminal's encoding again."""
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("latin-1", "surrogateescape"))
    assert of_words("né, 中") == ("the text", "né, 中")
    with pytest.raises(ValueError, match="the text is not UTF-8: byte 0xe9"):
        of_words(b"n\xe9".decode("utf-8", "surrogateescape"))


def test_the_part_that_is_advised_ends_with_a_character(capsys: pytest.CaptureFixture[str]) -> None:
    content = "a" + "é" * 40_000
    Path("some.txt").write_text(content, encoding="utf-8")
    assert main(["look", "some.txt"]) == 1
    said = sentence(capsys)
    assert "head -c 65535 some.txt | regard look -" in said
    content.encode()[:65535].decode("utf-8")
