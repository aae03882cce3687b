"""The command `regard`, as a person meets it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from regard.compat.folder import MINILM
from regard.inspect.report.save import WRITERS
from regard_command import main
from regard_command.paths import SUFFIXES
from regard_command.version import __version__

ROOT = Path(__file__).resolve().parents[2]
TEXT = (files("regard.demo") / "text.txt").read_bytes()

COMMAND = "import sys; from regard_command import main; sys.exit(main({!r}))"

# What a help text must not wait for.
HEAVY = """
import sys
from regard_command import main
try:
    main({!r})
finally:
    print("torch" in sys.modules)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["look", "--help"], ["demo", "--help"], ["bench", "--help"], ["--version"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-c", HEAVY.format(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.startswith(("usage: regard", f"regard {__version__}\n")) and done.stdout.endswith("False\n"), (
        done.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["look", "nowhere.txt"], "regard look: nowhere.txt: No such file or directory"),
        (["look", "-t", "words", "-o", "nowhere/a.png"], "regard look: nowhere/a.png: there is no folder nowhere"),
        (["look"], "regard look: there is no text; name a FILE, write -t 'some words', or --probe for random tokens."),
        (["demo", "-o", "a.docx"], "its suffix is none of .png .svg .pdf .html .json .npz."),
        (["look", "-t", "words", "--model", "nowhere"], "nowhere is no model of transformers: expected a folder"),
        (["doctor", "nowhere"], "regard doctor: nowhere is no model of transformers: expected a folder"),
    ],
)
def test_wrong_paths_are_found_before_torch_is_loaded(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-c", HEAVY.format(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert said in done.stderr and done.stderr.count("\n") == 1 and done.stdout == "False\n"


def test_reports_are_written_as_what_is_checked() -> None:
    assert tuple(WRITERS) == SUFFIXES


def test_words_are_looked_at_and_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "-t", "the cat sat on the cat"]) == 0
    shown = capsys.readouterr().out
    assert "22 bytes" in shown and "max score" in shown and "wrote" not in shown
    assert list(Path().iterdir()) == []


def test_the_page_is_opened(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    monkeypatch.setattr("tempfile.tempdir", str(Path().resolve()))
    assert main(["look", "-t", "the cat", "--open"]) == 0
    assert main(["look", "-t", "the cat", "--open", "-o", "mine.html"]) == 0
    first, second = (Path(url.removeprefix("file://")) for url in opened)
    assert first.read_text().lower().startswith("<!doctype html>") and second == Path("mine.html").resolve()
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert main(["look", "-t", "the cat", "--open", "-o", "mine.html"]) == 1
    assert sentence(capsys) == "regard look: no browser could be started; open mine.html by hand."


def test_a_head_is_named_by_its_label(capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("L1H2", "l1h2", "1,2"):
        assert main(["look", "-t", "the cat", "-o", "a.json", "--head", label]) == 0
        shown = json.loads(Path("a.json").read_text())["shown"]
        assert (shown["layer"], shown["head"]) == (1, 2)
    assert "(L1H2: " in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="needs pseudo-terminals")
@pytest.mark.parametrize("width", [60, 200])
def test_the_report_is_as_wide_as_the_terminal(width: int) -> None:
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    command = [sys.executable, "-c", COMMAND.format(["look", "-t", "the cat sat on the cat"])]
    bare = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=bare)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux ends a closed terminal by EIO
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert running.wait(60) == 0
    lengths = [len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in shown.decode().splitlines()]  # without colours
    assert max(lengths) <= width and max(lengths) > width // 2 and (width < 80 or max(lengths) > 80)


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-c", COMMAND.format(["look", "-t", "the cat sat on the cat"])]
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["look", "-t", "the cat"], ["doctor"]])
def test_a_full_disk_is_named(arguments: list[str]) -> None:
    command = [sys.executable, "-c", COMMAND.format(arguments)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (1, f"regard {arguments[0]}: standard output: No space left on device\n")


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.run._read", interrupted)
    assert main(["look", "-t", "the cat"]) == 130
    assert capsys.readouterr().err == "regard look: interrupted\n"


def test_the_root_cause_of_a_failed_import_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object) -> None:
        try:
            raise ImportError("libjpeg.so.8: cannot open shared object file")
        except ImportError as error:
            raise ModuleNotFoundError("Could not import module 'AutoModel'.\nAre they there?") from error

    monkeypatch.setattr("regard.cli.run._read", failing)
    assert main(["look", "-t", "the cat"]) == 1
    assert sentence(capsys) == (
        "regard look: Could not import module 'AutoModel'. Are they there? "
        "(cause: ImportError: libjpeg.so.8: cannot open shared object file)"
    )


def test_python_m_regard_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((["--help"], 0), (["look", "missing.txt"], 1)):
        monkeypatch.setattr(sys, "argv", ["regard", *arguments])
        monkeypatch.delitem(sys.modules, "regard.__main__", raising=False)  # a test that imports all modules left it
        with pytest.raises(SystemExit) as left:
            runpy.run_module("regard", run_name="__main__")
        assert left.value.code == status
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: regard") and printed.err.startswith("regard look: missing.txt")


def test_demo_writes_a_picture_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "induction heads: " in shown and re.search(r"^wrote regard-demo.png  \(L\dH\d: ", shown, re.MULTILINE)
    assert Path("regard-demo.png").read_bytes().startswith(b"\x89PNG")


def test_look_reads_a_file_and_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.txt").write_bytes(TEXT[:400])
    assert main(["look", "some.txt", "-o", "a.svg", "--head", "1,2"]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT[:400])))
    assert main(["look", "--text", "-", "-o", "b.html"]) == 0
    first, second = re.findall(r"byte model .*?400 bytes.*?loss\s+(\d\.\d\d)", capsys.readouterr().out, re.DOTALL)
    assert first == second
    assert Path("a.svg").read_text().startswith("<?xml") and Path("b.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.skipif(find_spec(MINILM) is None or find_spec("transformers") is None, reason="MiniLM is not installed")
@pytest.mark.parametrize("name", ["minilm", "folder"])
def test_look_at_a_model_of_transformers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = find_spec(MINILM)
    folder = str(Path(spec.origin).parent / "model")  # type: ignore[union-attr, arg-type]
    Path("some.txt").write_text("The keys that a query sees, the keys that a query sees.")
    assert main(["look", "some.txt", "--model", "minilm" if name == "minilm" else folder, "-o", "a.json"]) == 0
    shown, content = capsys.readouterr(), json.loads(Path("a.json").read_text())
    assert "(BertModel)  16 tokens, 6 × 12 heads" in shown.out.replace("\n", " ")
    assert [layer["name"] for layer in content["layers"]] == [f"encoder.layer.{n}.attention.self" for n in range(6)]
    assert content["title"] == ("minilm" if name == "minilm" else "model")
    assert content["layers"][0]["keys"]["tokens"][0] == "[CLS]"


@pytest.mark.skipif(find_spec(MINILM) is None or find_spec("transformers") is None, reason="MiniLM is not installed")
def test_a_text_longer_than_the_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("long.txt").write_bytes(TEXT)
    assert main(["look", "long.txt", "--model", "minilm"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("regard look: ")]
    assert len(errors) == 1 and re.search(r"the text has [\d,]+ tokens; BertModel has positions for 512", errors[0])
    assert not Path("regard-look.png").exists()


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        (None, [], "No such file"),
        (b"", [], "holds 0 bytes; expected 2 to 65,536"),
        (b"abc", ["--head", "7,0"], "there is no head L7H0; this model has layers 0 to 3, heads 0 to 3"),
        (b"abc", ["-o", "nowhere/at/all.png"], "nowhere/at/all.png: there is no folder nowhere/at; make it first"),
        (None, [], "for the words themselves write -t 'file.txt'"),
        (
            b"a" * 70_000,
            [],
            "expected 2 to 65,536: the byte model takes a step a byte, and time grows with the square",
        ),
        (b"a" * 70_000, [], "Look at a part of it: head -c 65536 file.txt | regard look -"),
        (b"abc", ["-o", "picture.xyz"], "is not supported"),
        (b"abc", ["--model", "nowhere"], "nowhere is no model of transformers: expected a folder with config.json"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    content: bytes | None, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("file.txt").write_bytes(content)
    assert main(["look", "file.txt", *arguments]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("regard look: ")]
    assert len(error) == 1 and sentence in error[0]
    assert [path.name for path in Path().iterdir()] == ([] if content is None else ["file.txt"])


def sentence(capsys: pytest.CaptureFixture[str], command: str = "look") -> str:
    """The one line that says what could not be done."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"regard {command}: ")]
    return line


def folder(name: str, config: str | None = None, weights: bytes | None = None, words: tuple[str, ...] = ()) -> str:
    """A folder with the files of a model of transformers, or some of them."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=9, max_position_embeddings=12, **sizes)).save_pretrained(name)
    if config is not None:
        (Path(name) / "config.json").write_text(config)
    if weights is not None:
        (Path(name) / "model.safetensors").write_bytes(weights)
    if words:
        (Path(name) / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    return name


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("files", "text", "said"),
    [
        ({}, "a b", "whole holds no tokenizer; expected one of vocab.txt, tokenizer.json beside the weights"),
        ({"weights": b"none"}, "a b", "transformers cannot load whole: "),
        ({"config": "{"}, "a b", "transformers cannot load whole: "),
        ({"config": '{"model_type": "none"}'}, "a b", "transformers cannot load whole: "),
        ({"words": ("a", "b")}, " \n ", "the text is blank; expected something to read"),
        ({"words": ("a", "b")}, "a " * 20, "the text has 22 tokens; BertModel has positions for 12"),
        ({"words": tuple("abcdefgh")}, "a h", "the text holds token 12; BertModel knows 9"),
    ],
)
def test_what_is_wrong_with_a_model_is_one_line(
    files: dict[str, object], text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.txt").write_text(text)
    assert main(["look", "some.txt", "--model", folder("whole", **files)]) == 1
    assert said in sentence(capsys)
    assert not Path("regard-look.png").exists()


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("arguments", [["doctor", "whole"], ["look", "some.txt", "--model", "whole", "--ablate"]])
def test_weights_that_cannot_be_read_are_one_line_in_every_command(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a download that was broken off leaves them, or one of a pointer in place of the file."""
    Path("some.txt").write_text("a b")
    for weights in (b"version https://git-lfs.github.com/spec/v1", b""):
        folder("whole", weights=weights, words=("a", "b"))
        assert main(arguments) == 1
        assert "transformers cannot load whole: " in sentence(capsys, arguments[0])


def test_a_long_text_in_the_place_of_a_command_or_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than a file's name may be."""
    words = "the cat sat on the mat, " * 20
    with pytest.raises(SystemExit) as left:
        main([words])
    assert left.value.code == 2 and "regard look -t " in capsys.readouterr().err
    Path("some.txt").write_text("a text")
    with pytest.raises(SystemExit) as left:
        main(["look", "some.txt", "-t", words, words])
    assert left.value.code == 2 and "reads one text" in capsys.readouterr().err
    assert main(["look", words]) == 1
    assert "for the words themselves write -t" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_named_pipe_is_opened_once(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: Path("pipe").write_bytes(TEXT[:400]), daemon=True)
    writer.start()
    assert main(["look", "pipe", "-o", "a.json"]) == 0
    writer.join(10)
    assert not writer.is_alive() and "400 bytes" in capsys.readouterr().out


def test_a_closed_input_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["look", "-"]) == 1
    assert "standard input is closed" in sentence(capsys)


@pytest.mark.skipif(os.name != "posix", reason="a shell closes it")
def test_a_closed_output_takes_nothing() -> None:
    command = [sys.executable, "-m", "regard", "demo", "-o", "a.json"]
    ran = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "") and json.loads(Path("a.json").read_text(encoding="utf-8"))


def test_a_package_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("whole").mkdir()
    Path("whole/config.json").write_text("{}")
    Path("some.txt").write_text("a text")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["look", "some.txt", "--model", "whole"]) == 1
    assert sentence(capsys).endswith("needs transformers; install it with: pip install 'regard[hf]'")


def test_what_was_found_is_printed_where_no_picture_can_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("some.txt").write_text("a text")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["look", "some.txt", "-o", "picture.png"]) == 1
    told = capsys.readouterr()
    assert "max score" in told.out and "needs matplotlib; install it with: pip install 'regard[demo]'" in told.err
    assert [path.name for path in Path().iterdir()] == ["some.txt"]


def test_a_suffix_is_refused_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "nowhere.txt", "-o", "a.docx"]) == 1
    assert "its suffix is none of .png .svg .pdf .html .json .npz" in sentence(capsys)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["demo", "--head", "first"],
            "'first' is no head; expected a label such as L3H1 (layer 3, head 1), decoder L3H1,",
        ),
        (["look", "a", "--text", "b"], "regard look reads one text; 2 are given, 'b', 'a': leave one of them out."),
    ],
)
def test_what_is_no_command(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and sentence in capsys.readouterr().err
