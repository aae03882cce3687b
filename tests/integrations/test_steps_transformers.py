"""A report on `generate`: a layer each, the same as if the model had read what it wrote at once; stacks named apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard as rg
from regard.inspect.report.layer import Layer
from regard.inspect.tape import Tape
from tiny_models import DECODERS, ENCODER_DECODERS, VOCABULARY

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

import regard.compat.transformers

NEW = 6
STACKS = ["encoder L0", "encoder L1", "decoder L0", "decoder L1", "decoder cross L0", "decoder cross L1"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32 weights of two orders of summation


def layers(tape: Tape, element: int = 0, **form: Any) -> tuple[Layer, ...]:
    return rg.Report.of(tape.calls, title="a model", model="Tiny", element=element, **form).layers


def recorded(run: Any, *args: Any, **options: Any) -> tuple[Any, Tape]:
    """What a call of a model, which is part of `run`, gives, and its tape."""
    with rg.record(getattr(run, "__self__", run), rg.Report.FACTS) as tape, torch.no_grad():
        return run(*args, **options), tape


def assert_alike(found: tuple[Layer, ...], expected: tuple[Layer, ...]) -> None:
    assert [layer.place for layer in found] == [layer.place for layer in expected]
    for one, other in zip(found, expected, strict=True):
        for name in ("entropy", "max_score", "top_weights", "received", "maps"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), **CLOSE)
        for name in ("counts", "readers", "earliest", "own", "cells", "row_edges", "col_edges"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert torch.equal(one.queries.positions, other.queries.positions)
        assert torch.equal(one.keys.positions, other.keys.positions)


@pytest.mark.parametrize("implementation", ["eager", "regard"])
@pytest.mark.parametrize(
    ("name", "cache"), [("GPT-2", None), ("Llama", None), ("Llama", "static"), ("Mistral", None), ("Gemma2", None)]
)
def test_steps_of_a_decoder_are_one_layer_each(name: str, cache: str | None, implementation: str) -> None:
    model = DECODERS[name].build(implementation)
    ids = torch.tensor([[0, 0, 7, 8, 9, 10, 11], [3, 4, 7, 8, 9, 10, 12]])
    given = {"attention_mask": (ids != 0).long(), "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    written, tape = recorded(model.generate, ids, cache_implementation=cache, **given)
    read = written[:, :-1]  # the last one is not read
    mask = torch.cat([given["attention_mask"], torch.ones(2, NEW - 1, dtype=torch.int64)], 1)
    _, whole = recorded(model, read, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    for element in (0, 1):
        assert_alike(layers(tape, element), layers(whole, element))
    texts = [f"t{n}" for n in range(read.shape[1])]
    for element, padding in ((0, 2), (1, 0)):
        for layer in layers(tape, element, tokens=texts):
            assert layer.queries.tokens == layer.keys.tokens == tuple(texts[padding:])


@pytest.mark.parametrize("implementation", ["eager", "regard"])
@pytest.mark.parametrize("name", ["T5", "BART"])
def test_steps_of_a_decoder_that_reads_an_encoder(name: str, implementation: str) -> None:
    model, ids = ENCODER_DECODERS[name].build(implementation), torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    written, tape = recorded(model.generate, ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    _, whole = recorded(model, ids, decoder_input_ids=written[:, :-1])
    names = {"tokens": [f"w{n}" for n in range(NEW)], "key_tokens": [f"r{n}" for n in range(7)]}
    found = layers(tape, **names)
    assert_alike(found, layers(whole, **names))
    assert [layer.place for layer in found] == STACKS
    assert found[0].keys.tokens == found[4].keys.tokens == tuple(names["key_tokens"])
    assert found[2].keys.tokens == found[4].queries.tokens == tuple(names["tokens"])


def test_whisper_listens() -> None:
    model, sound = ENCODER_DECODERS["Whisper"].build("sdpa"), torch.randn(1, 8, 40)
    model.generation_config.max_length = None  # it has one of its own, which would be warned of
    _, tape = recorded(model.generate, sound, max_new_tokens=NEW, do_sample=False)
    found = layers(tape)
    assert [layer.place for layer in found] == STACKS
    assert [(len(layer.queries), len(layer.keys)) for layer in found[2:]] == [(NEW, NEW)] * 2 + [(NEW, 20)] * 2
    assert tape.places["model.decoder.layers.1.encoder_attn"] == "decoder cross L1"


def test_look_names_stacks_apart() -> None:
    ids = torch.randint(3, VOCABULARY, (12,), generator=torch.Generator().manual_seed(0))
    report = rg.look(ENCODER_DECODERS["BART"].build("sdpa"), ids)
    assert [layer.place for layer in report.layers] == STACKS
    text = str(report)
    assert "decoder cross L1 " in text and "encoder L0 " in text and "nL1 " not in text
    assert {head.name.rsplit("H", 1)[0] for finding in report.findings for head in finding.heads} <= set(STACKS)
    shown, why = report.shown(report.find("decoder cross L1H2"))
    assert (shown.layer, shown.head) == (5, 2) and why.startswith("decoder cross L1H2: model.decoder.layers.1.enc")
