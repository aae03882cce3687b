"""What `regard` answers to options and commands that it does not have, and to none: a table to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard_command import main


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("look --modle minilm -t hello", "regard look has no option --modle; did you mean --model?"),
        ("look -t hello --modle=minilm", "regard look has no option --modle; did you mean --model?"),
        ("look notes.txt --txet other.txt", "regard look has no option --txet; did you mean --text?"),
        (
            "look notes.txt --format json",
            "regard look has no option --format; the suffix of -o says it: -o",
        ),
        ("look notes.txt --seconds 4", "regard look has no option --seconds; regard bench has it."),
        ("look notes.txt --prob", ""),  # the beginning of a name is enough
        ("look notes.txt --colour", "regard look has no option --colour; it has --help, --text, --words, --encoding,"),
        ("look notes.txt -x", "regard look has no option -x; it has --help, --text,"),
        ("look -model minilm", "regard look has no option -model; did you mean --model?"),
        ("demo --words hello", "regard demo has no option --words; regard look has it."),
        ("bench --second 4 --minutes 2", "regard bench has no option --minutes; it has --help, --seconds."),
        ("doctor --model minilm", "regard doctor has no option --model; write regard doctor DIR."),
        ("--versoin", "regard has no option --versoin; did you mean --version?"),
        ("-t hello", "regard has no option -t; regard look has it."),
        ("--model minilm look", "regard has no option --model; write it behind the command look."),
        ("lok notes.txt", "regard has no command lok; did you mean look?"),
        ("train", "regard has no command train; it has demo, look, compare, bench, doctor."),
        ("look a.txt b.txt", "regard look reads one text; 2 are given, 'a.txt', 'b.txt': quote words: -t"),
    ],
)
def test_an_unknown_option_is_named_first(
    line: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if not said:
        assert main(line.split()) == 1  # there is no such file
        return
    with pytest.raises(SystemExit) as left:
        main(line.split())
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.count("error: ") == 1 and f"error: {said}" in error


def test_words_that_begin_with_dashes_are_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "-t", "--model is an option", "--head", "99,0"]) == 1
    assert "there is no head L99H0" in capsys.readouterr().err
    assert main(["look", "--", "--modle"]) == 1
    assert "--modle: No such file or directory" in capsys.readouterr().err


def test_bare_regard_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: regard") and "doctor" in printed.out and printed.err == ""


@pytest.mark.parametrize(
    ("words", "said"), [("a", "the text holds 1 byte; expected 2 to"), ("", "the text holds 0 bytes; expected 2 to")]
)
def test_numbers_agree_with_their_nouns(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "-t", words]) == 1
    assert said in capsys.readouterr().err
