"""look on a model: pairs of texts with their token types, and what a tokenizer of transformers returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard as rg
from test_reading import TEXT, Words, bert

transformers = pytest.importorskip("transformers", reason="models come from transformers (regard[hf])")

A, B = "the cat sat", "on the rug it sat"


class Pairs(Words):
    """A tokenizer of words that reads pairs as BERT's do: [start] a [end] b [end]."""

    def __call__(self, text: str, pair: str | None = None) -> dict[str, list[int]]:  # type: ignore[override]
        first = super().__call__(text)["input_ids"]
        if pair is None:
            return {"input_ids": first}
        second = super().__call__(pair)["input_ids"]
        ids = [1, *first, 2, *second, 2]
        return {"input_ids": ids, "token_type_ids": [0] * (len(first) + 2) + [1] * (len(second) + 1)}


def typed() -> torch.nn.Module:
    """A model whose token types matter."""
    torch.manual_seed(0)
    model = bert().eval()
    with torch.no_grad():
        model.embeddings.token_type_embeddings.weight[1] = 3.0
    return model


def assert_read(report: Any, model: torch.nn.Module, inputs: dict[str, list[int]]) -> None:
    """The report's numbers are those of the eager weights on these inputs."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        tensors = {name: torch.tensor([row]) for name, row in inputs.items()}
        weights = model(**tensors, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    for layer, p in zip(report.layers, weights, strict=True):
        torch.testing.assert_close(layer.received, p[0].sum(-2), rtol=1e-4, atol=1e-5)


def test_a_pair_of_texts_is_read_with_its_token_types() -> None:
    model, tokenizer = typed(), Pairs()
    report = rg.look(model, A, B, tokenizer=tokenizer)
    assert_read(report, model, tokenizer(A, B))
    tokens = report.layers[0].keys.tokens
    assert tokens[0] == "[start]" and tokens.count("[end]") == 2 and len(tokens) == 3 + 3 + 5
    plain = rg.look(model, tokenizer(A, B)["input_ids"], tokenizer=tokenizer)
    assert not torch.equal(plain.layers[0].received, report.layers[0].received)


@pytest.mark.parametrize("kind", ["BatchEncoding", "tensors", "dict", "with a mask"])
def test_what_a_tokenizer_returned_is_read_as_it_is(kind: str) -> None:
    model, tokenizer = typed(), Pairs()
    inputs = tokenizer(A, B)
    given: Any = transformers.BatchEncoding(inputs)
    if kind == "tensors":
        given = transformers.BatchEncoding({name: torch.tensor([row]) for name, row in inputs.items()})
    elif kind == "dict":
        given = {name: [row] for name, row in inputs.items()}
    elif kind == "with a mask":
        given = inputs = {**inputs, "attention_mask": [1] * len(inputs["input_ids"])}
    report = rg.look(model, given, tokenizer=tokenizer)
    assert_read(report, model, inputs)
    assert report.layers[0].keys.tokens[0] == "[start]"


def test_a_pair_goes_to_both_sides_of_an_encoder_and_a_decoder() -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 1}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=50, **sizes))
    encoder, decoder, _ = rg.look(model, A, B, tokenizer=Pairs()).layers  # it knows no token types
    assert (len(encoder.keys), len(decoder.keys)) == (11, 12)
    given = {"input_ids": [3, 4, 5], "decoder_input_ids": [1, 6]}
    encoder, decoder, _ = rg.look(model, given).layers
    assert (encoder.keys.tokens, decoder.keys.tokens) == (("3", "4", "5"), ("1", "6"))


def test_the_report_knows_where_the_second_text_begins() -> None:
    model, tokenizer = typed(), Pairs()
    pair = tokenizer(A, B)
    second = 2 + len(A.split())
    assert rg.look(model, A, B, tokenizer=tokenizer).second_text == second
    assert rg.look(model, pair, tokenizer=tokenizer).second_text == second
    assert rg.look(model, A, tokenizer=tokenizer).second_text == 0
    assert rg.look(model, {**pair, "token_type_ids": [1, 0, *pair["token_type_ids"][2:]]}).second_text == 0

    class Numbered(dict[str, list[int]]):
        """What a fast tokenizer returns: token types may be missing, the numbers of the texts are there."""

        def sequence_ids(self, index: int = 0) -> list[int | None]:
            assert index == 0
            return [None, *[0] * len(A.split()), None, *[1] * len(B.split()), None]

    assert rg.look(model, Numbered(input_ids=pair["input_ids"])).second_text == second


def test_several_pairs_are_reports_of_each() -> None:
    model, tokenizer = typed(), Pairs()
    reports = rg.look(model, [tokenizer(A, B), tokenizer(B, A)], tokenizer=tokenizer)
    assert len(reports) == 2
    assert_read(reports[1], model, tokenizer(B, A))


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ((["a"], "b"), TypeError, "look has a list and a second text; expected two texts: look(model, 'a', 'b', token"),
        (("a", 3), TypeError, "look has a second text that is an int; expected a string"),
        (({"ids": [3]},), ValueError, "look has a mapping without input_ids; it has ids"),
        (({"input_ids": [[3], [4]]},), ValueError, "input_ids has 2 rows; expected those of one text"),
        (({"input_ids": [3, 4], "token_type_ids": [0]},), ValueError, "token_type_ids has 1 number, input_ids 2"),
    ],
)
def test_what_cannot_be_read(given: tuple[Any, ...], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as raised:
        rg.look(bert(), *given, tokenizer=Pairs())
    assert said in str(raised.value)


def test_a_tokenizer_of_single_texts_is_named() -> None:
    with pytest.raises(TypeError, match=r"Words reads one text at a time.* pass the ids, or a mapping with input_ids"):
        rg.look(bert(), A, B, tokenizer=Words())


def test_a_model_that_takes_ids_alone() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(64, 16)
            self.attention = rg.nn.MultiHeadAttention(16, heads=4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.attention(self.embedding(ids))

    assert len(rg.look(Model(), TEXT, TEXT, tokenizer=Pairs()).layers[0].keys) == 3 + 2 * len(TEXT.split())
    with pytest.raises(TypeError, match="Model takes no token_type_ids; leave it out"):
        rg.look(Model(), Pairs()(A, B), tokenizer=Pairs())
