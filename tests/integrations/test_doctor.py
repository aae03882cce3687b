"""The doctor: what it says of this machine, of models that regard serves, and of those that it does not reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.backends.native.ffi import chosen
from regard.cli import doctor
from regard.compat import folder
from regard_command import main
from selection import few
from tiny_models import CLOSED, COMPUTING, DECODERS, ENCODER_DECODERS, ENCODERS, PICTURES, SILENT, SOUNDS, Tiny

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

import transformers

from needed import needs_kernels
from regard.compat import transformers as guest


@pytest.fixture(autouse=True)
def quiet() -> Any:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def saved(tiny: Tiny, folder: Path) -> str:
    """A folder with that model."""
    tiny.build("eager").save_pretrained(folder)
    return str(folder)


def test_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"].startswith(torch.__version__)
    assert rows["transformers"] == transformers.__version__
    assert rows["backends"].startswith("Native(), Sdpa()")


@needs_kernels
def test_the_kernels_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"{chosen()}, the best that runs here" in doctor.here()
    monkeypatch.setenv("REGARD_ISA", "base")
    assert "base, as REGARD_ISA=base says" in doctor.here()


def test_without_kernels_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "built", dict)
    monkeypatch.setattr(doctor, "OPTIONAL", {"a-package-of-nobody": "plot"})
    assert "everything runs on Tiled()" in doctor.here()
    assert "not installed: pip install 'regard[plot]'" in doctor.here()


SERVED = {
    **{name: DECODERS[name] for name in ("Llama", "Gemma2", "GPT-OSS", "Llama4")},
    **{name: ENCODERS[name] for name in ("BERT", "ModernBERT")},
    **{name: ENCODER_DECODERS[name] for name in ("T5", "BART", "Whisper")},
    "ViT": PICTURES["ViT"],
    "Wav2Vec2": SOUNDS["Wav2Vec2"],
}


@pytest.mark.parametrize("name", few(SERVED, "Llama", "T5", "ViT"))
def test_models_that_are_served(name: str, tmp_path: Path) -> None:
    found = doctor.examine(saved(SERVED[name], tmp_path))
    assert found.sound, str(found)
    assert found.missed == {}
    assert found.calls == len(found.modules) == (6 if name in ENCODER_DECODERS else 2)
    assert found.difference < 1e-5
    assert found.generated == (doctor.NEW if name in DECODERS or name in ("T5", "BART") else None)
    assert sum(count for _, count in found.explanations) == found.calls


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "BART", "OPT"])
def test_models_with_few_positions_read_fewer_tokens(name: str, tmp_path: Path) -> None:
    tiny = (DECODERS | ENCODERS | ENCODER_DECODERS)[name]
    few = {"n_positions": 20} if name == "GPT-2" else {"max_position_embeddings": 20}
    found = doctor.examine(saved(replace(tiny, options={**tiny.options, **few}), tmp_path))
    assert found.sound, str(found)
    assert found.tokens == (20 - doctor.NEW if name in DECODERS else 20)
    assert f"{found.tokens} tokens, float32" in str(found)


def test_a_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    few = replace(DECODERS["GPT-2"], options={**DECODERS["GPT-2"].options, "n_positions": 12})
    with pytest.raises(ValueError, match="GPT2LMHeadModel has positions for 12 tokens; the doctor needs 14 or more"):
        doctor.examine(saved(few, tmp_path))


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", saved(SERVED["Llama"], tmp_path)]) == 0
    out = capsys.readouterr().out
    for line in (
        "model        LlamaForCausalLM",
        "attention    2 calls of 2 × LlamaAttention: model.layers.0.self_attn, model.layers.1.self_attn",
        "not reached  none",
        f"generated    {doctor.NEW} of {doctor.NEW} tokens as eager's",
        "verdict      regard serves this model",
    ):
        assert line in out
    assert "for 2 calls; ScaledDot(" in out and "Causal() & Lengths(" in out


@pytest.mark.parametrize("name", COMPUTING | SILENT | CLOSED)
def test_models_that_are_not_reached(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = (COMPUTING | SILENT | CLOSED)[name]
    assert main(["doctor", saved(tiny, tmp_path)]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"regard doctor: {tiny.model} does not route its attention")


def test_a_wrong_mask_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the mask lost on the way, the difference and the exit status would say so."""
    from transformers import AttentionInterface

    def maskless(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        return guest.attention_forward(module, q, k, v, None, **{**options, "is_causal": False})

    AttentionInterface.register(guest.NAME, maskless)
    try:
        found = doctor.examine(saved(SERVED["Llama"], tmp_path))
    finally:
        AttentionInterface.register(guest.NAME, guest.attention_forward)
    assert not found.sound and found.difference > doctor.FAR
    assert "do not use regard here" in str(found)


def test_one_layer_that_is_not_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, load = saved(SERVED["BERT"], tmp_path), folder.own_model

    class LonelyAttention(nn.Module):
        def forward(self, *args: Any, **options: Any) -> tuple[Tensor, None]:
            return args[0], None

    def changed(path: Path) -> Any:
        model = load(path)
        model.bert.encoder.layer[1].attention.self = LonelyAttention()
        return model

    monkeypatch.setattr(doctor, "own_model", changed)
    found = doctor.examine(place)
    assert found.missed == {"bert.encoder.layer.1.attention.self": "LonelyAttention"}
    assert found.calls == 1 and not found.sound


def test_no_model_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "nothing")]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "is no model of transformers: expected a folder with config.json" in sentence


def test_minilm_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MINILM", "a_package_of_nobody")
    with pytest.raises(ValueError, match="minilm is not installed"):
        folder.folder_of("minilm")
