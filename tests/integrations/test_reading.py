"""look on a model: a text is read once, and reported on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.compat.folder import MINILM
from regard.inspect.reading import positions

transformers = pytest.importorskip("transformers", reason="models come from transformers (regard[hf])")

TEXT = "the cat sat on the mat and the cat sat on the rug"


class Words:
    """A tokenizer of words: 3 is the first of them."""

    def __init__(self) -> None:
        self.known: list[str] = ["[pad]", "[start]", "[end]"]

    def __call__(self, text: str) -> dict[str, list[int]]:
        self.known += [word for word in dict.fromkeys(text.split()) if word not in self.known]
        return {"input_ids": [self.known.index(word) for word in text.split()]}

    def convert_ids_to_tokens(self, ids: list[int]) -> Sequence[str]:
        return [f"▁{self.known[one]}" if one > 2 else self.known[one] for one in ids]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.known[one] for one in token_ids)


def bert(**form: int) -> torch.nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8}
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=20, **sizes, **form))


def test_a_model_is_reported_on_and_left_as_it_was() -> None:
    model = bert().train()
    model.pooler.eval()
    report = rg.look(model, TEXT, tokenizer=Words())
    assert (report.model, report.title) == ("BertModel", "BertModel")
    assert [layer.name for layer in report.layers] == [f"encoder.layer.{n}.attention.self" for n in range(2)]
    assert report.layers[0].keys.tokens[:2] == (" the", " cat")
    assert model.training and not model.pooler.training and all(p.grad is None for p in model.parameters())
    assert "next-token" in str(report) and report.seconds > 0


def test_its_numbers_are_those_of_the_eager_weights() -> None:
    model, tokenizer = bert().eval(), Words()
    report = rg.look(model, TEXT, tokenizer=tokenizer)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=torch.tensor([tokenizer(TEXT)["input_ids"]]), output_attentions=True).attentions
    for layer, p in zip(report.layers, weights, strict=True):
        torch.testing.assert_close(layer.received, p[0].sum(-2), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.maps, p[0], rtol=1e-4, atol=1e-5)


def test_a_decoder_that_reads_an_encoder_has_both_texts() -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 1}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=50, **sizes))
    report = rg.look(model, TEXT, tokenizer=Words())
    shapes = [(len(layer.queries), len(layer.keys), layer.looks_at_itself) for layer in report.layers]
    assert shapes == [(13, 13, True), (14, 14, True), (14, 13, False)]
    cross = report.layers[2]
    assert cross.queries.tokens[:2] == ("[start]", " the") and cross.keys.tokens[0] == " the"
    assert "13–14 tokens" in str(report)


def test_progress_is_told() -> None:
    told: list[int] = []
    rg.look(bert(), TEXT, tokenizer=Words(), progress=told.append)
    assert told == [1, 2]


def test_a_text_longer_than_the_model() -> None:
    with pytest.raises(ValueError, match=r"the text has 26 tokens; BertModel has positions for 20\. Shorten"):
        rg.look(bert(), f"{TEXT} {TEXT}", tokenizer=Words())
    for blank in ("", " \n\t"):
        with pytest.raises(ValueError, match="the text is blank; expected something to read"):
            rg.look(bert(), blank, tokenizer=Words())


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model, words = bert(), Words()
    model.set_input_embeddings(torch.nn.Embedding(7, 16))
    with pytest.raises(ValueError, match=r"has given token 9; BertModel knows 7\. Pass the tokenizer that belongs"):
        rg.look(model, TEXT, tokenizer=words)


def test_a_model_that_reads_no_text_is_refused() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **sizes))
    with pytest.raises(ValueError, match="ViTModel reads pixel_values, not text; run it under"):
        rg.look(model, TEXT, tokenizer=Words())


def test_positions_behind_the_padding_do_not_count() -> None:
    config = transformers.RobertaConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=34
    )
    assert positions(transformers.RobertaModel(config)) == 32
    assert positions(torch.nn.Linear(2, 2)) is None


def test_a_model_without_attention_says_so() -> None:
    class Plain(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(LookupError, match="Plain ran, but made no attention call"):
        rg.look(Plain(), TEXT, tokenizer=Words())


def test_what_belongs_to_tensors_is_refused_for_models() -> None:
    with pytest.raises(TypeError, match="mask"):
        rg.look(bert(), TEXT, tokenizer=Words(), mask=rg.Causal())  # type: ignore[call-overload]
    assert rg.look(torch.zeros(3, 4), torch.zeros(3, 4))[rg.facts.Entropy()].shape == (3,)


def test_a_model_without_a_text_or_a_tokenizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"look has a Linear and a Tensor.*seen by record"):
        rg.look(torch.nn.Linear(4, 4), torch.zeros(3, 4))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"look has no tokenizer; pass the one of BertModel"):
        rg.look(bert(), TEXT)  # type: ignore[call-overload]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_a_layer_is_looked_at_on_its_input(batch: tuple[int, ...]) -> None:
    layer = rg.nn.MultiHeadAttention(16, heads=4, key_heads=2, rotary=rg.nn.Rotary(4), sink=0.5)
    single, x, context = rg.nn.Attention(16, d_k=5, d_v=6), torch.randn(*batch, 7, 16), torch.randn(*batch, 9, 16)
    entropy, received = rg.facts.Entropy(), rg.facts.Received()
    for made, read in ((layer, None), (layer, context), (single, context)):
        at = rg.tail(7, 7 if read is None else 9)
        seen = rg.look(made, x, read, facts=(entropy, received), mask=rg.Causal(), positions=at)
        p = made.weights(x, read, mask=rg.Causal(), positions=at).detach()
        torch.testing.assert_close(seen[entropy], torch.special.entr(p).sum(-1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen[received], p.sum(-2), rtol=1e-4, atol=1e-5)
    assert rg.look(layer, x).grouped(entropy).shape == (*batch, 2, 7)
    assert not rg.look(layer, x).lse.requires_grad


def test_the_odd_heads_of_a_real_model_are_found() -> None:
    folder = Path(pytest.importorskip(MINILM, reason="MiniLM is not installed").__file__).parent / "model"
    model, tokenizer = (
        kind.from_pretrained(folder, local_files_only=True)
        for kind in (transformers.AutoModel, transformers.AutoTokenizer)
    )
    text = (files("regard.demo") / "text.txt").read_text()[:1500]
    said = [found.said for found in rg.look(model, text, tokenizer=tokenizer).findings]
    before, after, _, received, peak = said
    assert re.match(r"previous-token heads: L0H2 \(\d\d%\), .*L2H11 \(\d\d%\)", before)
    assert re.match(r"next-token heads: L1H8 \(\d\d%\)", after)
    assert re.match(r"‘\[CLS\]’ \(key 0\) receives (9|1\d)(\.\d)?% of all mass, most from L\dH\d+ ", received)
    score, nearest = re.match(r"max score ([\d.]+) at L0H2 \(next head ([\d.]+)\)", peak).groups()
    assert float(score) > 3 * float(nearest)
