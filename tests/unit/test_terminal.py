"""What a terminal is shown: colour and width where it has them, plain text everywhere else."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import regard.cli.terminal as terminal
import sample_reports as reports
from regard.inspect.report.texts import TextReports

pytest.importorskip("rich", reason="colours need rich (regard[demo])")

ESCAPE = "\x1b["


class Stream(io.StringIO):
    """Standard output, as a terminal or as a pipe."""

    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def printed(text: str, styles: Mapping[str, str] = terminal.REPORT, tty: bool = True) -> str:
    with redirect_stdout(Stream(tty)) as stream:
        terminal.show(text, styles)
    return stream.getvalue()


def test_a_terminal_has_colours() -> None:
    shown = printed("byte model\n▁█\nmax score 1 at decoder cross L1H2")
    assert "\x1b[1mbyte model\x1b[0m" in shown and "\x1b[36m▁\x1b[0m\x1b[36m█\x1b[0m" in shown
    assert "at \x1b[1;35mdecoder cross L1H2\x1b[0m" in shown


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM", "pipe", "rich"])
def test_plain_text_is_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    elif name != "pipe":
        monkeypatch.setenv(name, {"NO_COLOR": "1", "TERM": "dumb"}[name])
    text = str(reports.nasty()) + "[bold]markup[/bold] :smile:\tL0H1"
    assert printed(text, tty=name != "pipe") == f"{text}\n"


def test_colours_change_no_letter() -> None:
    text = reports.nasty().text(60) + "\n[bold]markup[/bold] :smile: " + "long " * 60
    shown = printed(text)
    assert ESCAPE in shown and re.sub(r"\x1b\[[0-9;]*m", "", shown) == f"{text}\n"


def test_forced_colours_are_heard_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert ESCAPE in printed("L0H1", tty=False)


def test_width_is_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "61")
    for tty, columns in ((True, 61), (False, terminal.PIPED)):
        with redirect_stdout(Stream(tty)):
            assert terminal.width() == columns


def test_long_texts_hang_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    rows = "regard   0.1.0\n\nto eager  a text that is much longer than that"
    with redirect_stdout(Stream(tty=True)):
        found = terminal.hanging(rows).splitlines()
    assert found == ["regard   0.1.0", "", "to eager  a text that is much", "          longer than that"]
    with redirect_stdout(Stream(tty=False)):
        assert terminal.hanging(rows) == rows


def test_what_doctor_says_is_coloured_by_its_verdict() -> None:
    shown = printed("rich       not installed: pip install x\nverdict    regard serves this model", terminal.DOCTOR)
    assert "\x1b[33mnot installed: pip install x\x1b[0m" in shown and "\x1b[1;32mregard serves this" in shown
    assert "\x1b[1mverdict\x1b[0m" in shown


class TestSeveralTexts:
    def test_a_file_for_each(self, tmp_path: Path) -> None:
        many = TextReports(tuple(reports.report(n=n) for n in range(5, 16)))
        files = many.save(f"{tmp_path}/look.json", head="L1H2")
        assert [file.name for file in files][::5] == ["look-00.json", "look-05.json", "look-10.json"]
        assert all('"head":2' in file.read_text() for file in files)
        assert '"queries":{"positions":[0,1,2,3,4]' in files[0].read_text()

    def test_nothing_is_written_where_one_is_refused(self, tmp_path: Path) -> None:
        two = TextReports((reports.report(layers=2), reports.report(layers=1)))
        for path, head, said in (
            ("a.json", "L1H0", "no layer L1"),
            ("a.json", (1, 0), "L1H0"),
            ("a.xyz", None, "none"),
        ):
            with pytest.raises(ValueError, match=said):
                two.save(f"{tmp_path}/{path}", head)
        assert not list(tmp_path.iterdir())
