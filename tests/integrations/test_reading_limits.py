"""look at the ends of what a model reads: its last position, numbers that no embedding has, models of two kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard as rg
from regard.cli import doctor
from regard_command import main
from test_reading import TEXT, Words, bert
from tiny_models import CLIP

transformers = pytest.importorskip("transformers", reason="models come from transformers (regard[hf])")


def test_the_start_token_of_a_decoder_takes_a_position() -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 1}
    config = transformers.BartConfig(vocab_size=50, max_position_embeddings=13, **sizes, **heads)
    model = transformers.BartModel(config)
    assert len(rg.look(model, list(range(3, 15))).layers) == 3
    with pytest.raises(ValueError, match="the text has 13 tokens, 14 with the decoder's start token; BartModel has"):
        rg.look(model, TEXT, tokenizer=Words())


def test_token_types_that_a_model_does_not_have_are_named() -> None:
    given = {"input_ids": [3, 4, 5], "token_type_ids": [0, 1, 2]}
    with pytest.raises(ValueError, match=r"token_type_embeddings of BertModel has 2 rows, and is asked for row 2"):
        rg.look(bert(), given)


def test_a_model_of_images_and_texts_reads_a_text_with_its_part_for_texts() -> None:
    model = CLIP.build("eager")
    report = rg.look(model, TEXT, tokenizer=Words())
    assert len(report.layers) == 2 and report.layers[0].keys.tokens[:2] == (" the", " cat")
    assert len(rg.look(model, torch.randn(3, 12, 12)).layers) == 2
    with pytest.raises(rg.Unsupported, match="answers no logits"):
        rg.heads.contributions(model, [3, 4, 5], token=3)
    report.with_heads(rg.heads.carried(model, TEXT, tokenizer=Words()))  # the same layers


def test_the_doctor_gives_a_model_of_images_and_texts_both(tmp_path: Path) -> None:
    CLIP.build("eager").save_pretrained(tmp_path)
    found = doctor.examine(str(tmp_path))
    assert found.sound, str(found)
    assert found.calls == 4


def test_the_doctor_says_what_a_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bert().save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.BertModel, "forward", lambda self, **given: given["nothing"].shape)
    assert main(["doctor", str(tmp_path)]) == 1
    sentence = capsys.readouterr().err.splitlines()[-1]  # after transformers' progress bar
    assert sentence == "regard doctor: BertModel does not read input_ids, attention_mask alone: KeyError: 'nothing'."


def test_several_texts_are_measured_one_by_one() -> None:
    with pytest.raises(TypeError, match=r"heads are measured on one text, or its token ids \(n,\), not on a list of 2"):
        rg.heads.ablation(bert(), ["one", "two"], tokenizer=Words())


def test_what_is_no_query_and_no_label() -> None:
    report = rg.look(bert(), TEXT, tokenizer=Words())
    with pytest.raises(TypeError, match="query is a str; expected an integer"):
        report.row("L0H0", "3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="the label is a tuple; expected a str such as 'L3H1'"):
        report.find((0, 1))  # pyright: ignore[reportArgumentType]
