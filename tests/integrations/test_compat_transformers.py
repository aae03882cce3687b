"""transformers' architectures on regard: outputs, gradients and generated tokens against their own eager attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import (
    CHANGING,
    CLIP,
    CLOSED,
    CLOSED_OTHERS,
    COMPUTING,
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    PICTURES,
    SILENT,
    SILENT_OTHERS,
    SOUNDS,
    VOCABULARY,
    Tiny,
    padded,
    tokens,
)

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from regard.call.hooks import AttentionCall, observing
from regard.compat import transformers as compat
from regard.compat.transformers import warnings as said_once
from regard.compat.transformers.models import APPENDING_KEYS

CLOSE = 1e-5  # of the largest number, in float32


def both(tiny: Tiny) -> tuple[Any, Any]:
    return tiny.build("eager"), tiny.build(compat.NAME)


def apart(a: Tensor, b: Tensor, real: Tensor | None = None) -> float:
    """The largest difference, as a share of the largest number; of real tokens alone where they are told."""
    difference = (a - b).abs()
    if real is not None:
        difference = difference[real.bool()]
    return float(difference.detach().max() / b.detach().abs().max())


def heard(model: Any, **feed: Any) -> tuple[Any, list[AttentionCall]]:
    seen: list[AttentionCall] = []
    with observing(seen.append):
        out = model(**feed)
    return out, seen


def gradients_apart(a: Any, b: Any) -> float:
    pairs = [(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True) if q.grad is not None]
    assert pairs and all(g is not None for g, _ in pairs)
    largest = max(float(g.abs().max()) for _, g in pairs)
    return max(float((g - h).abs().max()) for g, h in pairs) / largest


@pytest.mark.parametrize("name", DECODERS | ENCODERS)
def test_logits_and_gradients(name: str) -> None:
    eager, ours = both((DECODERS | ENCODERS)[name])
    for side in ("none", "right", "left"):
        real = None if side == "none" else padded(side)
        expected = eager(input_ids=tokens(), attention_mask=real).logits
        out, seen = heard(ours, input_ids=tokens(), attention_mask=real)
        assert len(seen) == 2
        assert apart(out.logits, expected, real) < CLOSE, side
        for model, logits in ((eager, expected), (ours, out.logits)):
            model.zero_grad()
            weights = torch.cos(torch.arange(logits.numel())).view_as(logits)
            (logits * weights * (1 if real is None else real[..., None])).sum().backward()
        assert gradients_apart(ours, eager) < CLOSE, side


def feed_of(name: str) -> dict[str, Any]:
    target = tokens(7)
    if name == "Whisper":
        return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": target}
    return {"input_ids": tokens(), "attention_mask": padded("right"), "decoder_input_ids": target}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoders_and_decoders(name: str) -> None:
    eager, ours = both(ENCODER_DECODERS[name])
    feed = feed_of(name)
    out, seen = heard(ours, **feed)
    expected = eager(**feed)
    assert len(seen) == 6
    assert apart(out.logits, expected.logits) < CLOSE
    out.logits.square().sum().backward()
    expected.logits.square().sum().backward()
    assert gradients_apart(ours, eager) < CLOSE


@pytest.mark.parametrize("name", PICTURES | SOUNDS)
def test_pictures_and_sounds(name: str) -> None:
    eager, ours = both((PICTURES | SOUNDS)[name])
    if name in PICTURES:
        size = ours.config.image_size
        feed = {"pixel_values": torch.randn(2, 3, size, size)}
    else:
        feed = {"input_values": torch.randn(2, 400)}
    out, seen = heard(ours, **feed)
    expected = eager(**feed)
    assert len(seen) == (3 if name == "Swin" else 2)
    assert apart(out.last_hidden_state, expected.last_hidden_state) < CLOSE
    out.last_hidden_state.square().sum().backward()
    expected.last_hidden_state.square().sum().backward()
    assert gradients_apart(ours, eager) < CLOSE


def test_pictures_with_words() -> None:
    eager, ours = both(CLIP)
    feed = {"input_ids": tokens(), "attention_mask": padded("right"), "pixel_values": torch.randn(2, 3, 12, 12)}
    out, seen = heard(ours, **feed)
    assert len(seen) == 4
    assert apart(out.logits_per_text, eager(**feed).logits_per_text) < CLOSE


def test_a_t5_table_has_its_gradient() -> None:
    _, ours = both(ENCODER_DECODERS["T5"])
    ours(**feed_of("T5")).logits.square().sum().backward()
    table = ours.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert float(table.grad.abs().max()) > 0


GENERATORS = ("Llama", "Mistral", "Gemma2", "Gemma3", "GPT-2", "GPT-NeoX", "GPT-OSS", "Llama4", "Phi3", "Qwen3")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_tokens(name: str, cache: str) -> None:
    """Greedy and beams, past the window and the chunk, of a batch that is padded on the left."""
    eager, ours = both(DECODERS[name])
    for beams in (1, 3):
        found = [
            model.generate(
                tokens(),
                attention_mask=padded("left"),
                max_new_tokens=7,
                min_new_tokens=7,
                do_sample=False,
                num_beams=beams,
                cache_implementation=cache,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            for model in (eager, ours)
        ]
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert apart(torch.stack(found[1].logits), torch.stack(found[0].logits)) < CLOSE


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_the_same_tokens_from_an_encoder(name: str) -> None:
    eager, ours = both(ENCODER_DECODERS[name])
    for beams in (1, 3):
        found = [
            model.generate(
                tokens(), attention_mask=padded("right"), max_new_tokens=7, min_new_tokens=7, num_beams=beams
            )
            for model in (eager, ours)
        ]
        assert torch.equal(*found)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CHANGING | COMPUTING)
def test_architectures_that_compute_with_the_mask(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the mask in full, and one warning."""
    monkeypatch.setattr(said_once, "_SAID", set())
    eager, ours = both((CHANGING | COMPUTING)[name])
    feed = {"input_ids": tokens(), "attention_mask": padded(side)}
    with pytest.warns(
        UserWarning, match=r"writes the mask out, \(2, 1, |no call of attention came to regard"
    ) as warned:
        out, seen = heard(ours, **feed)
    assert ["writes the mask out" in str(each.message) for each in warned] == (
        [True] if name in CHANGING else [True, False]
    )
    assert len(seen) == (2 if name in CHANGING else 0)
    assert apart(out[0], eager(**feed)[0], padded(side)) < CLOSE
    ours(**feed)  # a second warning would be an error


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "DeepSeek-V4"])
def test_tokens_of_an_architecture_that_chooses_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V3.2 chooses 5 keys for each query: among 13 tokens that hides more than its mask does. V4 appends keys."""
    monkeypatch.setattr(said_once, "_SAID", {"attention mask of DeepseekV32Model", "attention mask of DeepseekV4Model"})
    eager, ours = both(CHANGING[name])
    asked = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    found = [model.generate(tokens(), attention_mask=padded("left"), **asked) for model in (eager, ours)]
    assert torch.equal(*found)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 13, 29])
def test_keys_that_layers_append(n: int, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek V4's layers append one key for each 2 or 4 tokens, and to the mask who sees it: logits and gradients."""
    monkeypatch.setattr(said_once, "_SAID", {"attention mask of DeepseekV4Model"})
    ids = torch.randint(3, VOCABULARY, (2, n), generator=torch.Generator().manual_seed(n))
    real = torch.ones_like(ids)
    if n > 2 and side != "none":
        real[0, slice(0, 2) if side == "left" else slice(n - 2, n)] = 0
    eager, ours = both(CHANGING["DeepSeek-V4"])
    expected, found = (model(input_ids=ids, attention_mask=real).logits for model in (eager, ours))
    assert apart(found, expected, real) < CLOSE
    for logits in (expected, found):
        logits[real.bool()].sin().sum().backward()
    assert gradients_apart(ours, eager) < CLOSE


def test_every_architecture_that_appends_to_a_mask_of_a_tensor() -> None:
    """Those whose modules ask whether the mask is a torch.Tensor: what stands for one is none."""
    import transformers

    modules = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    texts = {file.parent.name: file.read_text() for file in modules}
    both_of = "isinstance(attention_mask, torch.Tensor)", "attention_mask = torch.cat("
    assert {name for name, text in texts.items() if all(each in text for each in both_of)} == APPENDING_KEYS


@pytest.mark.parametrize("name", SILENT | SILENT_OTHERS)
def test_architectures_that_never_ask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes the name for them and says nothing; the first forward tells, the second is silent."""
    monkeypatch.setattr(said_once, "_SAID", set())
    tiny = (SILENT | SILENT_OTHERS)[name]
    model, feed = tiny.build(compat.NAME), silent_feed(name)
    with pytest.warns(UserWarning, match=r"no call of attention came to regard in its first forward") as warned:
        _, seen = heard(model, **feed)
    said = [str(each.message) for each in warned]
    assert seen == [] and not any("sdpa" in sentence for sentence in said)
    # of an encoder and a decoder, which are models of their own, each is told of
    assert (
        len({sentence.split()[0] for sentence in said})
        == len(said)
        == (2 if name in ("ProphetNet", "Table Transformer") else 1)
    )
    model(**feed)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def silent_feed(name: str) -> dict[str, Tensor]:
    if name == "WavLM":
        return {"input_values": torch.randn(2, 400)}
    if name == "Table Transformer":
        return {"pixel_values": torch.randn(2, 3, 40, 40)}
    feed = {"input_ids": tokens(), "attention_mask": padded("right")}
    return {**feed, "decoder_input_ids": tokens(7)} if name == "ProphetNet" else feed


def test_a_first_forward_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said_once, "_SAID", set())
    model = SILENT["DeBERTa"].build(compat.NAME)
    with pytest.raises(IndexError):
        model(input_ids=tokens() + 1000)
    with pytest.warns(UserWarning, match="DebertaV2Model took"):
        copy.deepcopy(model)(input_ids=tokens())


def test_who_has_no_attention_is_not_told_of() -> None:
    tiny = Tiny("MambaModel", "MambaConfig", {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1})
    tiny.build(compat.NAME)(input_ids=tokens())


@pytest.mark.parametrize("name", CLOSED | CLOSED_OTHERS)
def test_architectures_with_a_table_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run with the class that they have, and say which and what to do."""
    monkeypatch.setattr(said_once, "_SAID", set())
    tiny = (CLOSED | CLOSED_OTHERS)[name]
    with pytest.warns(UserWarning, match=rf"{tiny.model} takes its attention from a table of its own \(") as warned:
        model = tiny.build(compat.NAME)
    own = "sdpa" if model._supports_sdpa else "eager"
    assert model.config._attn_implementation == own
    assert [f'attn_implementation="{own}"' in str(each.message) for each in warned] == [True]
    expected = tiny.build("eager")
    if "pixel_values" in expected.main_input_name:
        real, feed = None, {"pixel_values": torch.randn(2, 3, 12, 12)}
    else:
        real = padded("right")
        feed = {"input_ids": tokens(), "attention_mask": real}
    out, seen = heard(model, **feed)
    assert seen == []
    assert apart(out[0], expected(**feed)[0], real) < CLOSE
    # a model that is built keeps its class
    expected.set_attn_implementation(compat.NAME)
    assert expected.config._attn_implementation == "eager"
