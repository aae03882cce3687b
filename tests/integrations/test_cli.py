"""The command `regard`, as a person meets it."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from regard.compat.folder import MINILM
from regard_command import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (files("regard.demo") / "text.txt").read_bytes()

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


@pytest.mark.parametrize("arguments", [["--help"], ["look", "--help"], ["demo", "--help"], ["bench", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-c", HEAVY.format(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.startswith("usage: regard") and done.stdout.endswith("False\n"), done.stderr


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
        (b"abc", ["-o", "nowhere/at/all.png"], "nowhere/at/all.png: No such file or directory"),
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


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says what could not be done."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("regard look: ")]
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
        ({"words": tuple("abcdefgh")}, "a h", "the tokenizer has given token 12; BertModel knows 9"),
    ],
)
def test_what_is_wrong_with_a_model_is_one_line(
    files: dict[str, object], text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.txt").write_text(text)
    assert main(["look", "some.txt", "--model", folder("whole", **files)]) == 1
    assert said in sentence(capsys)
    assert not Path("regard-look.png").exists()


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
    assert main(["look", "some.txt"]) == 1
    told = capsys.readouterr()
    assert "max score" in told.out and "needs matplotlib; install it with: pip install 'regard[demo]'" in told.err
    assert [path.name for path in Path().iterdir()] == ["some.txt"]


def test_a_suffix_is_refused_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "nowhere.txt", "-o", "a.docx"]) == 1
    assert "its suffix is none of .png .svg .pdf .html .json .npz" in sentence(capsys)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--head", "first"], "'first' is no head; expected layer,head, for example 2,5"),
        (["look"], "one of the arguments FILE --text is required"),
        (["look", "a", "--text", "b"], "not allowed with argument"),
    ],
)
def test_what_is_no_command(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and sentence in capsys.readouterr().err
