"""The byte model, and the report on what it reads."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.demo.model import ByteTransformer, Shape, character, load, save
from regard.demo.reading import read

TEXT = (files("regard.demo") / "text.txt").read_bytes()


@pytest.fixture(scope="module")
def model() -> ByteTransformer:
    return load()


@pytest.fixture(scope="module")
def report(model: ByteTransformer) -> rg.Report:
    return read(model, TEXT)


def loss(report: rg.Report) -> float:
    """As its first line has it."""
    return float(report.notes[0].split()[1])


def test_shipped_model_is_as_its_card_says(model: ByteTransformer) -> None:
    card = (files("regard.demo") / "CARD.md").read_text()
    count = sum(p.numel() for p in model.parameters())
    assert count < 1_000_000 and f"{count:,} parameters" in card
    assert (files("regard.demo") / "weights.safetensors").stat().st_size < 3_000_000  # type: ignore[attr-defined]


def test_model_has_learned(report: rg.Report) -> None:
    assert loss(report) < 2.0  # ln 256 = 5.5 is no knowledge at all


def test_model_sees_no_future(model: ByteTransformer) -> None:
    tokens = torch.tensor([list(TEXT[:97])])
    changed = tokens.clone()
    changed[0, 61:] = 32
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0, :61], model(changed)[0, :61])


def test_model_is_as_good_far_into_a_text(report: rg.Report, model: ByteTransformer) -> None:
    assert loss(report) < 1.25 * loss(read(model, TEXT[:600]))


def test_report_agrees_with_the_dense_weights(model: ByteTransformer) -> None:
    report, text = read(model, TEXT[:151]), torch.tensor([list(TEXT[:151])])
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(
            lambda layer, inputs, options: seen.append(layer.weights(*inputs, **options)[0]), with_kwargs=True
        )
    with torch.no_grad():
        model(text)
    for block in model.blocks:
        block.attention._forward_pre_hooks.clear()
    for layer, p in zip(report.layers, seen, strict=True):
        torch.testing.assert_close(layer.received, p.sum(-2), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.entropy, -torch.special.xlogy(p, p).sum(-1), rtol=1e-4, atol=1e-5)
        assert (p.gather(-1, layer.top_keys[..., :1])[..., 0] >= p.amax(-1) - 1e-6).all()


def test_looking_leaves_no_hook_and_changes_no_output(model: ByteTransformer) -> None:
    tokens = torch.tensor([list(TEXT[:89])])
    with torch.no_grad():
        before = model(tokens)
        read(model, TEXT[:89])
        assert torch.equal(model(tokens), before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_progress_is_told(model: ByteTransformer) -> None:
    told: list[int] = []
    read(model, TEXT[:89], told.append)
    assert told == [1, 2, 3, 4]


def test_report_finds_what_the_card_promises(report: rg.Report) -> None:
    text = str(report)
    assert len(re.findall(r"^L\d ", text, re.MULTILINE)) == 8
    assert re.search(r"^previous-byte heads: L\dH\d \(\d+%, \d+ to \d+%\)", text, re.MULTILINE)
    assert re.search(r"^induction heads: L\dH\d \(\d+%, \d+ to \d+%\)", text, re.MULTILINE)
    assert re.search(r"the first byte receives \d\.\d% of the mass of the 256 rows", text)
    assert report.kept < report.dense / 50
    assert report.striking[1].startswith("induction head")


def test_a_text_without_repetition_says_so(model: ByteTransformer) -> None:
    assert "no rows repeat 8 bytes, too few in this text for a finding" in str(read(model, bytes(range(32, 120))))


def test_look_takes_a_text_or_its_bytes(model: ByteTransformer) -> None:
    text = "né, né"
    expected = read(model, text.encode())
    for given in (text, list(text.encode()), torch.tensor(list(text.encode()))):
        report = rg.look(model, given)
        assert [one.keys.tokens for one in report.layers] == [one.keys.tokens for one in expected.layers]
        assert [one.heads for one in report.findings if one.heads][1:] == [
            one.heads for one in expected.findings if one.heads
        ][1:]


def test_a_model_that_takes_ids_by_position_is_looked_at() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(11, 8)
            self.attention = rg.nn.MultiHeadAttention(8, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.attention(self.embedding(tokens))

    with pytest.raises(TypeError, match="a text for Plain needs the model's tokenizer"):
        rg.look(Plain(), "a text")
    assert [len(one.keys.positions) for one in rg.look(Plain(), [1, 5, 10]).layers] == [3]


@pytest.mark.parametrize("measure", ["look", "contributions", "ablation", "carried", "circuits"])
def test_a_number_that_is_no_byte_is_refused(model: ByteTransformer, measure: str) -> None:
    measured = rg.look if measure == "look" else getattr(rg.heads, measure)
    with pytest.raises(ValueError, match=r"the text holds token 300; ByteTransformer knows 256\. Pass the tokenizer"):
        measured(model, [104, 300, 105])
    with pytest.raises(ValueError, match="the text is blank"):
        measured(model, [])
    with pytest.raises(TypeError, match=r"reads a text, not bytes; write given\.decode\(\), or list\(given\)"):
        measured(model, b"hello")


def test_a_probe_of_tokens_that_are_no_bytes_is_refused(model: ByteTransformer) -> None:
    with pytest.raises(ValueError, match=r"the text holds token 2[5-9][0-9]; ByteTransformer knows 256"):
        rg.heads.probe(model, among=range(250, 270), length=20)


def test_a_text_that_is_not_encoded_is_refused(model: ByteTransformer) -> None:
    with pytest.raises(TypeError, match=r"the text is a str; expected bytes: text\.encode\(\)"):
        read(model, "hello")  # pyright: ignore[reportArgumentType]


def test_positions_that_a_model_does_not_have_are_named() -> None:
    class Placed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = torch.nn.Embedding(11, 8), torch.nn.Embedding(4, 8)
            self.attention = rg.nn.MultiHeadAttention(8, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.attention(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))

    assert len(rg.look(Placed(), [1, 5, 10, 2]).layers) == 1
    with pytest.raises(ValueError, match=r"places of Placed has 4 rows, and is asked for row 4\. Shorten the text"):
        rg.look(Placed(), [1, 5, 10, 2, 3])


def test_a_text_of_one_byte_is_refused(model: ByteTransformer) -> None:
    with pytest.raises(ValueError, match="the text has 1 byte; expected 2 or more"):
        read(model, b"a")


def test_every_byte_has_a_text_of_its_own() -> None:
    assert len({character(byte) for byte in range(256)}) == 256


def test_weights_survive_saving(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = ByteTransformer(Shape(width=16, layers=1, heads=2))
    save(model, str(tmp_path / "w.safetensors"))
    for name, t in load_file(tmp_path / "w.safetensors").items():
        torch.testing.assert_close(t, model.state_dict()[name].half())


@pytest.mark.full
def test_training_learns_and_repeats_itself(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    script = Path(__file__).parents[2] / "examples" / "train_bytes.py"
    small = ("--steps", "8", "--batch", "8", "--length", "65")
    runs = [
        subprocess.run(
            [sys.executable, str(script), *small, "--out", str(tmp_path / f"{n}.safetensors")],
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
