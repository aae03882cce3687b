"""The byte model, its report, and the command line, as a person meets them."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.cli import main
from regard.demo.model import ByteTransformer, Shape, load, save
from regard.demo.report import Reading, describe, picture, read

TEXT = (files("regard.demo") / "text.txt").read_bytes()


@pytest.fixture(scope="module")
def model() -> ByteTransformer:
    return load()


@pytest.fixture(scope="module")
def reading(model: ByteTransformer) -> Reading:
    return read(model, TEXT)


def test_shipped_model_is_as_its_card_says(model: ByteTransformer) -> None:
    card = (files("regard.demo") / "CARD.md").read_text()
    count = sum(p.numel() for p in model.parameters())
    assert count < 1_000_000 and f"{count:,} parameters" in card
    assert (files("regard.demo") / "weights.safetensors").stat().st_size < 3_000_000  # type: ignore[attr-defined]


def test_model_has_learned(reading: Reading) -> None:
    assert reading.loss < 2.0  # ln 256 = 5.5 is no knowledge at all


def test_model_sees_no_future(model: ByteTransformer) -> None:
    tokens = torch.tensor([list(TEXT[:97])])
    changed = tokens.clone()
    changed[0, 61:] = 32
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0, :61], model(changed)[0, :61])


def test_model_is_as_good_far_into_a_text(reading: Reading, model: ByteTransformer) -> None:
    assert reading.loss < 1.25 * read(model, TEXT[:600]).loss


def test_reading_agrees_with_the_dense_weights(model: ByteTransformer) -> None:
    reading, text = read(model, TEXT[:151]), torch.tensor([list(TEXT[:151])])
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(
            lambda layer, inputs, options: seen.append(layer.weights(*inputs, **options)[0]), with_kwargs=True
        )
    with torch.no_grad():
        model(text)
    for block in model.blocks:
        block.attention._forward_pre_hooks.clear()
    p = torch.stack(seen)
    torch.testing.assert_close(reading.received, p.sum(-2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reading.entropy, -torch.special.xlogy(p, p).sum(-1), rtol=1e-4, atol=1e-5)
    assert (p.gather(-1, reading.top[..., :1])[..., 0] >= p.amax(-1) - 1e-6).all()


def test_looking_leaves_no_hook_and_changes_no_output(model: ByteTransformer) -> None:
    tokens = torch.tensor([list(TEXT[:89])])
    with torch.no_grad():
        before = model(tokens)
        read(model, TEXT[:89])
        assert torch.equal(model(tokens), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_report_has_facts_grids_and_findings(reading: Reading) -> None:
    text = describe(reading, 1.0)
    assert re.search(r"kept \d+\.\d MB \(dense weights: \d+\.\d [MG]B\)", text)
    assert len(re.findall(r"^L\d ", text, re.MULTILINE)) == 4
    assert re.search(r"^previous-token heads: L\dH\d \(\d+%\)", text, re.MULTILINE)
    assert re.search(r"^induction heads: L\dH\d \(\d+%\)", text, re.MULTILINE)
    assert re.search(r"the first byte receives \d+\.\d% of the mass of the 256 rows", text)
    assert reading.kept < reading.dense / 50


def test_a_text_without_repetition_says_so(model: ByteTransformer) -> None:
    assert "no row repeats 8 bytes within 255" in describe(read(model, bytes(range(32, 120))), 1.0)


def test_picture_of_a_head_that_is_not_there(reading: Reading, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no head L9H9; this model has layers 0 to 3, heads 0 to 3"):
        picture(reading, tmp_path / "x.png", (9, 9))
    assert not list(tmp_path.iterdir())


def test_demo_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    assert "induction heads: " in capsys.readouterr().out
    assert (tmp_path / "regard-demo.png").read_bytes().startswith(b"\x89PNG")


def test_look_command_reads_a_file_and_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.txt"
    file.write_bytes(TEXT[:400])
    assert main(["look", str(file), "-o", str(tmp_path / "a.svg"), "--head", "1,2"]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT[:400])))
    assert main(["look", "-", "-o", str(tmp_path / "b.png")]) == 0
    first, second = re.findall(r"byte model  400 bytes.*?loss (\d\.\d\d)", capsys.readouterr().out)
    assert first == second
    assert (tmp_path / "a.svg").exists() and (tmp_path / "b.png").exists()


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        (None, [], "No such file"),
        (b"", [], "holds 0 bytes; expected 2 to 65,536"),
        (b"abc", ["--head", "7,0"], "there is no head L7H0"),
        (b"abc", ["-o", "nowhere/at/all.png"], "No such file or directory"),
        (b"abc", ["-o", "picture.xyz"], "is not supported"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    content: bytes | None,
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("file.txt").write_bytes(content)
    assert main(["look", "file.txt", *arguments]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("regard look: ")]
    assert len(error) == 1 and sentence in error[0]


def test_a_head_that_is_no_head(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--head", "first"])
    assert "'first' is no head; expected layer,head, for example 2,5" in capsys.readouterr().err


def test_weights_survive_saving(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = ByteTransformer(Shape(width=16, layers=1, heads=2))
    save(model, str(tmp_path / "w.safetensors"))
    for name, t in load_file(tmp_path / "w.safetensors").items():
        torch.testing.assert_close(t, model.state_dict()[name].half())


def test_training_learns_and_repeats_itself(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    script = Path(__file__).parents[1] / "examples" / "train_bytes.py"
    runs = [
        subprocess.run(
            [sys.executable, str(script), "--steps", "8", "--out", str(tmp_path / f"{n}.safetensors")],
            capture_output=True, text=True, check=True,
        ).stdout
        for n in range(2)
    ]  # fmt: skip
    losses = [[float(x) for x in re.findall(r"held-out loss (\d\.\d+)", run)] for run in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 2 and losses[0][0] < 5.0
    first, second = (load_file(tmp_path / f"{n}.safetensors") for n in range(2))
    assert all(torch.equal(t, second[name]) for name, t in first.items())


def test_model_is_of_regard(model: ByteTransformer) -> None:
    assert all(isinstance(block.attention, rg.nn.MultiHeadAttention) for block in model.blocks)
