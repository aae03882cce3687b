"""A report on models that read another sequence: which layers do, and which text is whose, at any two lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import regard as rg
from regard.inspect.report.layer import Layer
from regard.inspect.tape import Tape
from tiny_models import ENCODER_DECODERS

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

import regard.compat.transformers  # noqa: E402

KINDS = ["encoder", "encoder", "self", "cross", "self", "cross"]  # in the order of the calls
WAYS = ["eager", "sdpa", "regard"]


def ids(n: int) -> torch.Tensor:
    return torch.randint(3, 60, (1, n), generator=torch.Generator().manual_seed(n))


def recorded(model: nn.Module, run: Any, **given: Any) -> Tape:
    with torch.no_grad(), rg.record(model, rg.Report.FACTS) as tape:
        run(**given)
    return tape


def axes(layer: Layer) -> tuple[str, str, bool]:
    return "".join(layer.queries.tokens), "".join(layer.keys.tokens), layer.looks_at_itself


def texts(tape: Tape, written: str, read: str) -> list[tuple[str, str, bool]]:
    report = rg.Report.of(tape.calls, title="", model="", tokens=list(written), key_tokens=list(read))
    return [axes(layer) for layer in report.layers]


def expected(written: str, read: str) -> list[tuple[str, str, bool]]:
    return [(read, read, True)] * 2 + [(written, written, True)] * 2 + [(written, read, False)] * 2


@pytest.mark.parametrize("name", ["T5", "BART"])
@pytest.mark.parametrize("implementation", WAYS)
@pytest.mark.parametrize("n", [5, 7, 9])
def test_a_forward(name: str, implementation: str, n: int) -> None:
    model = ENCODER_DECODERS[name].build(implementation)
    tape = recorded(model, model, input_ids=ids(7), decoder_input_ids=ids(n))
    assert [call.kind for call in tape] == KINDS
    written, read = "ABCDEFGHI"[:n], "tuvwxyz"
    assert texts(tape, written, read) == expected(written, read)


@pytest.mark.parametrize("name", ["T5", "BART"])
@pytest.mark.parametrize("implementation", WAYS)
@pytest.mark.parametrize("new", [5, 7])
@pytest.mark.parametrize("said", [True, False])
def test_the_steps_of_generate(name: str, implementation: str, new: int, said: bool) -> None:
    model = ENCODER_DECODERS[name].build(implementation)
    given = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    tape = recorded(model, model.generate, input_ids=ids(7), **given)
    assert {call.kind for call in tape.calls[:2]} == {"encoder"} and "unknown" not in {call.kind for call in tape}
    written, read = ("ABCDEFG"[:new], "tuvwxyz") if said else ("", "")
    assert texts(tape, written, read) == expected(written, read)
    own, cross = rg.Report.of(tape.calls, title="", model="").layers[2::2]
    assert own.queries.positions.tolist() == cross.queries.positions.tolist() == list(range(new))


@pytest.mark.parametrize("implementation", WAYS)
def test_whisper(implementation: str) -> None:
    model, sound = ENCODER_DECODERS["Whisper"].build(implementation), torch.randn(1, 8, 40)
    for n in (5, 20):
        tape = recorded(model, model, input_features=sound, decoder_input_ids=ids(n))
        assert [call.kind for call in tape] == KINDS
        written = "ABCDEFGHIJKLMNOPQRST"[:n]
        report = rg.Report.of(tape.calls, title="", model="", tokens=list(written))
        assert [axes(layer) for layer in report.layers] == [
            ("", "", True),
            ("", "", True),
            *[(written, written, True)] * 2,
            *[(written, "", False)] * 2,
        ]


def test_two_bert_models() -> None:
    plain = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = transformers.BertConfig(**plain, intermediate_size=16)
    decoder = transformers.BertConfig(**plain, intermediate_size=16, is_decoder=True, add_cross_attention=True)
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.EncoderDecoderModel(both).eval()
    tape = recorded(model, model, input_ids=ids(4), decoder_input_ids=ids(4) + 1)
    assert [call.kind for call in tape if call.kind != "unknown"] == ["encoder", "cross"]
    assert texts(tape, "ABCD", "wxyz") == [("wxyz", "wxyz", True), ("ABCD", "ABCD", True), ("ABCD", "wxyz", False)]


def test_look_gives_each_side_its_text() -> None:
    """Also where the caller gives the decoder as many tokens as the encoder."""
    model = ENCODER_DECODERS["BART"].build("sdpa")
    given = {"input_ids": ids(4)[0].tolist(), "decoder_input_ids": (ids(4) + 1)[0].tolist()}
    read, written = ("".join(map(str, given[name])) for name in ("input_ids", "decoder_input_ids"))
    assert [axes(layer) for layer in rg.look(model, given).layers] == expected(written, read)


def test_a_module_may_have_any_name() -> None:
    model = ENCODER_DECODERS["BART"].build("sdpa")
    for layer in model.model.decoder.layers:
        layer.encoder_attn, layer.self_attn = layer.self_attn, layer.encoder_attn
        layer.forward = swapped(layer)
    tape = recorded(model, model, input_ids=ids(4), decoder_input_ids=ids(4) + 1)
    names = [call.name.rsplit(".", 1)[-1] for call in tape if call.kind == "cross"]
    assert names == ["self_attn"] * 2 and [call.kind for call in tape] == KINDS


def swapped(layer: Any) -> Any:
    """The forward of a decoder's layer whose two attentions have changed names."""
    run = layer.forward

    def forward(*args: Any, **named: Any) -> Any:
        modules = layer._modules
        before = modules["self_attn"], modules["encoder_attn"]
        modules["self_attn"], modules["encoder_attn"] = reversed(before)
        try:
            return run(*args, **named)
        finally:
            modules["self_attn"], modules["encoder_attn"] = before

    return forward
