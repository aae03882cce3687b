"""regard look --contributions and --ablate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard_command import main

WORDS = "Sally sells seashells. Sally sells seash"


def test_the_parts_of_a_logit_and_the_loss_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "-t", WORDS, "--contributions", "e", "--ablate"]) == 0
    printed = capsys.readouterr().out
    for said in (
        "norm of what a head adds, mean of 40 tokens",
        "part in the logit of ‘e’, at position 39",
        "loss without a head, more than",
        "the loss grows most without L",
        "largest part in a logit: L",
    ):
        assert said in printed
    assert printed.count("entropy, nats") == 1


def test_without_a_token_the_likeliest_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "-t", WORDS, "--contributions"]) == 0
    printed = capsys.readouterr().out
    assert "part in the logit of ‘e’" in printed and "loss without" not in printed  # seashe


def test_a_token_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "-t", WORDS, "--contributions", "ee"]) == 1
    assert capsys.readouterr().err == (
        "regard look: --contributions 'ee': that is 2 tokens of the model; expected one.\n"
    )


def test_a_folder_of_transformers_brings_its_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = dict.fromkeys(WORDS.replace(".", "").split())
    model = tokenizers.models.WordLevel({"[UNK]": 0, **{word: n + 1 for n, word in enumerate(words)}}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=8, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert main(["look", "-t", WORDS, "--model", str(tmp_path), "--contributions", "sells", "--ablate"]) == 0
    printed = capsys.readouterr().out
    assert "part in the logit of ‘sells’, at position 5" in printed and "loss without a head" in printed


def test_the_probe_is_printed_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "--probe"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("64 random tokens, twice") and "induction heads on random tokens: L3H1 (" in printed
    assert "entropy" not in printed
    assert main(["look", "--probe", "--ablate", "--contributions"]) == 0
    printed = capsys.readouterr().out
    assert "part in the logit" in printed and "loss without a head, more than 2." in printed
    assert " on the first 128 tokens\n" in printed
    assert main(["look", "--probe", "-o", str(tmp_path / "probe.json")]) == 0
    assert "128 bytes" in capsys.readouterr().out
    assert json.loads((tmp_path / "probe.json").read_text())["heads"]["probe"]["length"] == 64


def test_all_of_it_is_in_the_file_that_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "a.html"
    assert main(["look", "-t", WORDS, "--contributions", "e", "--carried", "--ablate", "--probe", "-o", str(page)]) == 0
    html, printed = page.read_text(encoding="utf-8"), capsys.readouterr().out
    shown = ("norm of what a head adds", "norm carried", "part in the logit of", "loss without a head")
    for said in (*shown, "on random tokens"):
        assert f"<caption>{said}" in html or f"<caption>induction {said}" in html
        assert said in printed
    assert "40 bytes" in printed
