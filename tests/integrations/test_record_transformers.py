"""record over transformers' models: eager, sdpa and regard, against the weights that the models themselves return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from recorded_models import FACTS, weights
from regard.inspect.tape import Tape
from tiny_models import COMPUTING, DECODERS, ENCODER_DECODERS, ENCODERS, PICTURES, Tiny, padded, tokens

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

import regard.compat.transformers  # noqa: E402

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # weights in float32, of scores that two orders of summation round


def forward(model: Any, feed: dict[str, Any], **options: Any) -> Any:
    with torch.no_grad():
        return model(**feed, **options)


def supports(tiny: Tiny, implementation: str) -> bool:
    """Whether transformers has that implementation for the model."""
    return implementation != "sdpa" or getattr(getattr(transformers, tiny.model), "_supports_sdpa", False)


def pictures() -> Tensor:
    return torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(2))


def check_weights(tape: Tape, expected: list[Tensor], real: Tensor | None) -> None:
    """Every call, its real queries, against the weights that the model returned, in the order of the calls."""
    assert len(tape) == len(expected)
    for call, p in zip(tape, expected, strict=True):
        p = p[..., : call.k_shape[-2]]  # a learned sink is no key
        if real is not None:
            p = p.masked_fill(real[:, None, :, None] == 0, 0)
        torch.testing.assert_close(weights(call), p, **CLOSE)
        torch.testing.assert_close(call[rg.facts.Received()], p.sum(-2), **CLOSE)


@pytest.mark.parametrize("name", DECODERS | ENCODERS)
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_what_eager_returns_is_what_is_recorded(name: str, side: str) -> None:
    real = None if side == "none" else padded(side)
    model, feed = (DECODERS | ENCODERS)[name].build("eager"), {"input_ids": tokens(), "attention_mask": real}
    with rg.record(model, FACTS) as tape:
        returned = forward(model, feed, output_attentions=True).attentions
    check_weights(tape, list(returned), real)


WAYS = [
    (name, implementation)
    for implementation in ("eager", "sdpa", "regard")
    for name, tiny in (DECODERS | ENCODERS).items()
    if supports(tiny, implementation)
]


@pytest.mark.parametrize(("name", "implementation"), WAYS)
def test_outputs_keep_their_bits_and_every_way_is_recorded_alike(name: str, implementation: str) -> None:
    tiny = (DECODERS | ENCODERS)[name]
    model, feed = tiny.build(implementation), {"input_ids": tokens(), "attention_mask": padded("right")}
    plain = forward(model, feed).logits
    with rg.record(model, FACTS) as tape:
        seen = forward(model, feed).logits
    assert torch.equal(plain, seen)
    assert model.config._attn_implementation == implementation
    eager = tiny.build("eager")
    with rg.record(eager, FACTS) as other:
        forward(eager, feed)
    assert [(call.name, call.number, call.k_shape) for call in tape] == [
        (call.name, call.number, call.k_shape) for call in other
    ]
    for one, two in zip(tape, other, strict=True):
        torch.testing.assert_close(weights(one), weights(two), **CLOSE)


@pytest.mark.parametrize("name", ["T5", "BART"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "regard"])
@pytest.mark.parametrize(("length", "read"), [(7, None), (13, None), (13, 1)])
def test_encoders_and_decoders(name: str, implementation: str, length: int, read: int | None) -> None:
    """Also where the decoder is as long as the encoder: the padding of that one is none of its own queries. read: the
    real tokens of each text, whose mask may be that of a causal decoder with as many.
    """
    tiny, real = ENCODER_DECODERS[name], padded("right")
    if read is not None:
        real = (torch.arange(13) < read).long().expand(2, 13)
    feed = {"input_ids": tokens(), "attention_mask": real, "decoder_input_ids": tokens(length)}
    model, eager = tiny.build(implementation), tiny.build("eager")
    with rg.record(model, FACTS) as tape:
        forward(model, feed)
    out = forward(eager, feed, output_attentions=True)
    expected = [p.masked_fill(real[:, None, :, None] == 0, 0) for p in out.encoder_attentions]
    for own, cross in zip(out.decoder_attentions, out.cross_attentions, strict=True):
        expected += [own, cross]
    check_weights(tape, expected, None)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "regard"])
def test_pictures(implementation: str) -> None:
    model, eager = (PICTURES["ViT"].build(one) for one in (implementation, "eager"))
    with rg.record(model, FACTS) as tape:
        forward(model, {"pixel_values": pictures()})
    returned = forward(eager, {"pixel_values": pictures()}, output_attentions=True).attentions
    check_weights(tape, list(returned), None)
    assert tape.names == tuple(call.name for call in tape) and tape.calls[0].layer == "ViTAttention"


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "regard"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_is_recorded_step_by_step(implementation: str, cache: str) -> None:
    """Grouped keys, a cache that grows and one that does not, the first sequence padded."""
    model = DECODERS["Llama"].build(implementation)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    plain = model.generate(tokens(), attention_mask=padded("left"), **options)
    with rg.record(model, FACTS) as tape:
        made = model.generate(tokens(), attention_mask=padded("left"), **options)
    assert torch.equal(plain, made)
    assert [call.q_shape[-2] for call in tape] == [13] * 2 + [1] * 6
    assert all(call.k_shape[1] == 2 for call in tape)
    real = torch.cat([padded("left"), torch.ones(2, 3, dtype=torch.int64)], -1)
    eager = DECODERS["Llama"].build("eager")
    whole = forward(eager, {"input_ids": made[:, :-1], "attention_mask": real}, output_attentions=True).attentions
    for step, layer in ((step, layer) for step in range(3) for layer in range(2)):
        p, at = weights(tape.calls[2 + 2 * step + layer]), 13 + step
        torch.testing.assert_close(p[..., 0, : at + 1], whole[layer][..., at, : at + 1], **CLOSE)
        assert not p[..., at + 1 :].any()
        assert tape.calls[2 + 2 * step + layer].view.frame.positions.q.flatten().tolist()[-1] == at


def test_an_implementation_of_ones_own_is_recorded_by_its_masks() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register("ours", lambda *args, **options: sdpa_attention_forward(*args, **options))
    AttentionMaskInterface.register("ours", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    tiny, feed = ENCODERS["BERT"], {"input_ids": tokens(), "attention_mask": padded("right")}
    model = tiny.build("ours")
    with rg.record(model, FACTS) as tape:
        forward(model, feed)
    check_weights(tape, list(forward(tiny.build("eager"), feed, output_attentions=True).attentions), padded("right"))
    picture = PICTURES["ViT"].build("ours")
    said = r'what a mask \(None\) means to attn_implementation="ours"'
    with pytest.raises(rg.Unsupported, match=said), rg.record(picture):
        forward(picture, {"pixel_values": pictures()})


@pytest.mark.parametrize("name", COMPUTING)
def test_models_that_compute_by_themselves_are_an_error(name: str) -> None:
    model = COMPUTING[name].build("eager")
    said = rf"{type(model).__name__} ran, but made no .*transformers models that go"
    with pytest.raises(LookupError, match=said), rg.record(model):
        forward(model, {"input_ids": tokens()})


def test_the_interface_is_restored() -> None:
    from transformers.modeling_utils import AttentionInterface

    before, model = AttentionInterface.get_interface, ENCODERS["BERT"].build("eager")
    with rg.record(model):
        assert AttentionInterface.get_interface is not before
        forward(model, {"input_ids": tokens()})
    assert AttentionInterface.get_interface is before
    with pytest.raises(ZeroDivisionError), rg.record(model):
        raise ZeroDivisionError
    assert AttentionInterface.get_interface is before


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # its name in 5.0
@pytest.mark.parametrize("implementation", ["eager", "regard"])
def test_checkpoints_of_transformers_are_not_counted_twice(implementation: str) -> None:
    model = DECODERS["Llama"].build(implementation).train()
    model.gradient_checkpointing_enable()
    with rg.record(model) as tape:
        model(input_ids=tokens(), use_cache=False).logits.sum().backward()
    assert [(call.name, call.number) for call in tape] == [(f"model.layers.{n}.self_attn", 0) for n in (0, 1)]
