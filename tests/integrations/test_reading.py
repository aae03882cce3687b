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
from regard.inspect.report.heads import mean_entropy

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
    with pytest.raises(ValueError, match=r"text 2 of 3: the text is blank; expected something to read"):
        rg.look(bert(), [TEXT, " ", TEXT], tokenizer=Words())


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model, words = bert(), Words()
    model.set_input_embeddings(torch.nn.Embedding(7, 16))
    with pytest.raises(ValueError, match=r"holds token 9; BertModel knows 7\. Pass the tokenizer that belongs"):
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
    with pytest.raises(TypeError, match=r"a Tensor of float32 came for Linear.*record sees any module"):
        rg.look(torch.nn.Linear(4, 4), torch.zeros(3, 4))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"a text for BertModel needs the model.s tokenizer: tokenizer="):
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
    assert re.match(r"previous-token heads: L0H2 \(\d\d%, \d\d to \d\d%\), .*L2H11 \(\d\d%, ", before)
    assert re.match(r"next-token heads: L1H8 \(\d\d%, ", after)
    assert re.match(r"‘\[CLS\]’ \(key 0\) receives (9|1\d)(\.\d)?% of all mass, most from L\dH\d+ ", received)
    score, nearest = re.match(r"max score ([\d.]+) at L0H2 \(next head ([\d.]+)\)", peak).groups()
    assert float(score) > 3 * float(nearest)


def test_token_ids_are_read_as_the_text_is() -> None:
    model, tokenizer = bert().eval(), Words()
    ids = tokenizer(TEXT)["input_ids"]
    by_text = rg.look(model, TEXT, tokenizer=tokenizer)
    for given in (ids, torch.tensor(ids), torch.tensor([ids])):
        report = rg.look(model, given)
        assert report.layers[0].keys.tokens == tuple(map(str, ids))
        assert torch.equal(report.layers[1].received, by_text.layers[1].received)
    assert rg.look(model, ids, tokenizer=tokenizer).layers[0].keys.tokens == by_text.layers[0].keys.tokens
    with pytest.raises(ValueError, match=r"the token ids hold -1; expected numbers from 0 on\."):
        rg.look(model, [3, -1])


def test_several_texts_give_means_over_texts() -> None:
    model, tokenizer = bert().eval(), Words()
    texts = [TEXT, "the cat sat", "a b c d e f g"]
    reports = rg.look(model, texts, tokenizer=tokenizer)
    alone = [rg.look(model, text, tokenizer=tokenizer) for text in texts]
    assert len(reports) == 3 and [str(one)[:40] for one in reports] == [str(one)[:40] for one in alone]
    mean = torch.stack([torch.stack([mean_entropy(layer) for layer in one.layers]) for one in alone]).mean(0)
    entropy = next(grid for grid in reports.grids if grid.title == "entropy")
    torch.testing.assert_close(torch.tensor(entropy.values), mean)
    assert str(reports).startswith("BertModel (BertModel)  mean over 3 texts\n") and "\n[2]  7 tokens" in str(reports)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    assert [one.layers[0].keys.tokens for one in rg.look(model, ids)] == [("3", "4", "5"), ("6", "7", "8")]


def vit() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8}
    return transformers.ViTModel(transformers.ViTConfig(image_size=12, patch_size=4, **sizes))


def test_features_that_were_taken_for_an_image() -> None:
    """(1, n, d) could be an image of one channel; the error says so, and what to write."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    with pytest.raises(ValueError, match=r"of shape \(1, 5, 16\) came for an image.* raised AssertionError.*record"):
        rg.look(model, torch.randn(1, 5, 16))


def test_an_image_reaches_the_model() -> None:
    model, pixels = vit().eval(), torch.randn(3, 12, 12)
    report = rg.look(model, pixels)
    assert [layer.name for layer in report.layers] == [name for name, m in model.named_modules() if is_attention(m)]
    assert report.layers[0].keys.tokens == ("[CLS]", *(f"{row},{column}" for row in range(3) for column in range(3)))
    assert "10 tokens" in str(report)
    assert report.picture is not None and report.picture.pixels.shape == (12, 12, 3)
    assert (report.picture.rows, report.picture.columns, report.picture.special) == (3, 3, 1)
    with rg.record(model, facts=rg.Report.FACTS) as tape, torch.no_grad():
        model(pixel_values=pixels[None])
    received = tape.calls[1][rg.facts.Received()][0]
    assert torch.equal(report.layers[1].received, received)
    with pytest.raises(ValueError, match=r"look has 2 images; expected one"):
        rg.look(model, torch.randn(2, 3, 12, 12))


def is_attention(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "ViTAttention"


def test_a_picture_needs_a_processor() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (12, 12))
    with pytest.raises(TypeError, match=r"look has an image, an Image, and no processor; pass the one of ViTModel"):
        rg.look(vit(), image)
    asked: list[object] = []

    def processor(images: object, return_tensors: str) -> dict[str, torch.Tensor]:
        asked.append(images)
        return {"pixel_values": torch.zeros(1, 3, 12, 12)}

    assert len(rg.look(vit(), image, processor=processor).layers) == 2 and asked == [image]


def test_a_pipeline_is_looked_at() -> None:
    model, tokenizer = bert().eval(), Words()

    class Pipeline:
        def __init__(self) -> None:
            self.model, self.tokenizer, self.image_processor = model, tokenizer, None

    Pipeline.__module__ = "transformers.pipelines.base"
    report = rg.look(Pipeline(), TEXT)
    assert report.layers[0].keys.tokens[:2] == (" the", " cat")


def test_a_sentence_transformer_brings_its_tokenizer() -> None:
    model, tokenizer = bert().eval(), Words()

    class SentenceTransformer(torch.nn.Sequential):
        pass

    sentence = SentenceTransformer(torch.nn.ModuleDict({"auto_model": model}))
    sentence.tokenizer = tokenizer
    report = rg.look(sentence, TEXT)
    assert report.model == "BertModel" and len(report.layers) == 2


def test_what_record_takes() -> None:
    with pytest.raises(TypeError, match=r"record has a str; expected the model, an nn\.Module"), rg.record("x"):  # pyright: ignore
        pass


def test_texts_of_another_length_are_refused() -> None:
    model = bert().eval()
    with rg.record(model, facts=rg.Report.FACTS) as tape, torch.no_grad():
        model(torch.tensor([[3, 4, 5, 6]]))
    with pytest.raises(ValueError, match=r"tokens has 3 texts; the calls are of 4 tokens\. Pass one text a token"):
        rg.Report.of(tape.calls, title="t", model="m", tokens=["a", "b", "c"])


def test_a_report_is_saved_with_the_head_of_a_label(tmp_path: Path) -> None:
    report = rg.look(bert().eval(), [3, 4, 5])
    report.save(tmp_path / "a.json", head="L1H2")
    report.save(tmp_path / "b.json", head=(1, 2))
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    with pytest.raises(ValueError, match=r"'second' is no head; expected a label such as L3H1 \(layer 3, head 1\)"):
        report.save(tmp_path / "a.json", head="second")


def test_facts_are_values_of_a_tuple() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(TypeError, match=r"facts is the class Entropy; expected a tuple of values: facts=\(Ent"):
        rg.look(x, x, facts=rg.facts.Entropy)  # pyright: ignore
    with pytest.raises(TypeError, match=r"facts holds the class Top, not one of its values; write Top\(\.\.\.\)\."):
        rg.look(x, x, facts=(rg.facts.Top,))  # pyright: ignore
