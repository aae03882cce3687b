"""regard's caches inside transformers' generate: the tokens of its DynamicCache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators", reason="needs transformers 5.23 or later"
)

from transformers import DynamicCache, EncoderDecoderCache

import regard.nn as nn
from regard.compat.transformers import NAME, FixedCache, GrowingCache, PagedCache
from regard.core.int8_rows import Int8Rows, rounded
from regard.core.paged import Paged
from served_models import SHAPE
from tiny_models import VOCABULARY, Tiny

NEW, PROMPT = 17, 7
GEMMA = {
    "head_dim": 10,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS = {
    "grouped": Tiny("LlamaForCausalLM", "LlamaConfig", SHAPE),
    "window": Tiny("MistralForCausalLM", "MistralConfig", SHAPE | {"sliding_window": 5}),
    "hybrid": Tiny("Gemma3ForCausalLM", "Gemma3TextConfig", SHAPE | GEMMA),
    "chunks": Tiny(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        SHAPE
        | {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 40, "head_dim": 8}
        | {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    ),
}
CACHES: dict[str, Callable[[Any], Any]] = {
    "growing": GrowingCache,
    "fixed": lambda config: FixedCache(config, capacity=400),
    "paged": lambda config: PagedCache(config, pages=200, page_size=4),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


def prompt(batch: int = 2) -> dict[str, Tensor]:
    """Of tokens that come back, so that prompt lookup finds some; the second is padded on the left."""
    ids = torch.randint(3, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(3))
    ids[:, -3:] = ids[:, :3]
    real = torch.ones_like(ids)
    real[1:, :2] = 0
    return {"input_ids": ids, "attention_mask": real}


def generated(model: Any, cache: Any, **options: Any) -> Tensor:
    plain = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    return model.generate(past_key_values=cache, **(plain | options))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens(name: str, way: str, cache: str) -> None:
    model = MODELS[name].build(NAME)
    feed = prompt(1 if way == "prompt lookup" else 2) | WAYS[way]
    expected = generated(model, DynamicCache(config=model.config), **feed)
    ours = CACHES[cache](model.config)
    assert generated(model, ours, **feed).equal(expected)
    assert ours.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["grouped", "hybrid"])
def test_a_small_model_that_proposes(name: str, cache: str) -> None:
    model, assistant = MODELS[name].build(NAME), MODELS[name].build(NAME)
    with torch.no_grad():  # often right, and often not
        for p in assistant.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    expected = generated(model, DynamicCache(config=model.config), **prompt(1))
    ours = CACHES[cache](model.config)
    assert generated(model, ours, **prompt(1), assistant_model=assistant).equal(expected)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_long_text_in_parts(name: str, cache: str) -> None:
    """300 tokens, so that windows drop tiles of 128 keys: the logits of one forward without a cache."""
    model, ids = MODELS[name].build(NAME), torch.randint(3, VOCABULARY, (2, 300))
    ours = CACHES[cache](model.config)
    with torch.no_grad():
        whole = model(ids).logits
        parts = [model(part, past_key_values=ours).logits for part in ids.split([1, 2, 140, 1, 1, 130, 25], 1)]
    assert float((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max()) < 1e-5


@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_that_is_read_once(cache: str) -> None:
    model, feed = MODELS["hybrid"].build(NAME), prompt(1)
    read = CACHES[cache](model.config)
    with torch.no_grad():
        model(feed["input_ids"], past_key_values=read)
    for token in (4, 9):
        ids = torch.cat([feed["input_ids"], torch.tensor([[token]])], 1)
        expected = generated(model, None, input_ids=ids)
        assert generated(model, copy.deepcopy(read), input_ids=ids).equal(expected)
    assert read.get_seq_length() == PROMPT


@pytest.mark.full
@pytest.mark.parametrize("cache", CACHES)
def test_removed_repeated_chosen_and_used_again(cache: str) -> None:
    model, ids = MODELS["hybrid"].build(NAME), torch.randint(3, VOCABULARY, (2, 200))
    ours = CACHES[cache](model.config)
    with torch.no_grad():
        whole = model(ids).logits
        ours.activate_past_recording()
        model(ids[:, :150], past_key_values=ours)
        ours.crop(0)
        for _ in range(150):  # more than a window's buffer holds
            model(ids[:, :1], past_key_values=ours)
        ours.crop(-150)
        assert ours.get_seq_length() == 150
        last = model(ids[:, 150:], past_key_values=ours).logits
        assert torch.allclose(last, whole[:, 150:], atol=1e-4)
        ours.crop(-1)
        ours.batch_repeat_interleave(2)
        repeated = model(ids[[0, 0, 1, 1], -1:], past_key_values=ours).logits
        assert torch.allclose(repeated, whole[[0, 0, 1, 1], -1:], atol=1e-4)
        ours.batch_select_indices(torch.tensor([True, False, False, True]))
        ours.reset()
        assert ours.get_seq_length() == 0
        assert torch.allclose(model(ids, past_key_values=ours).logits, whole, atol=1e-4)


WHISPER = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40},
    **{"max_source_positions": 10, "max_target_positions": 40, "pad_token_id": 0, "bos_token_id": 1},
    **{"eos_token_id": 2, "decoder_start_token_id": 1},
}


@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("cross", [None, *CACHES])
def test_an_encoder_decoder(cross: str | None, way: str) -> None:
    """Cross attention reads the layers of its cache, which beams reorder, without an update."""
    model = Tiny("WhisperForConditionalGeneration", "WhisperConfig", WHISPER).build(NAME)
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ours = GrowingCache(model.config), theirs[1] if cross is None else CACHES[cross](model.config)
    expected = generated(model, EncoderDecoderCache(*theirs), input_features=sound, **WAYS[way])
    theirs[1].reset()
    assert generated(model, EncoderDecoderCache(*ours), input_features=sound, **WAYS[way]).equal(expected)


T5 = Tiny(
    "T5ForConditionalGeneration",
    "T5Config",
    {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
)


@pytest.mark.parametrize("way", ["prompt lookup", "a small model"])
@pytest.mark.parametrize("cache", CACHES)
def test_an_encoder_decoder_whose_tokens_are_proposed(cache: str, way: str) -> None:
    """Where some are refused, transformers removes them from its EncoderDecoderCache of DynamicCaches alone."""
    model, ids = T5.build(NAME), prompt(1)["input_ids"]
    options = {"assistant_model": T5.build("sdpa")} if way == "a small model" else WAYS[way]
    ours = EncoderDecoderCache(CACHES[cache](model.config), DynamicCache(config=model.config))
    expected = generated(model, None, input_ids=ids)
    assert generated(model, ours, input_ids=ids, **options).equal(expected)
    ours.batch_repeat_interleave(2)
    ours.batch_select_indices(torch.tensor([1]))
    assert ours.self_attention_cache.layers[0].keys.shape[0] == 1


DECODERS = {
    "whisper": Tiny("WhisperForCausalLM", "WhisperConfig", WHISPER),
    "blip": Tiny(
        "BlipTextLMHeadModel",
        "BlipTextConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "max_position_embeddings": 64, "encoder_hidden_size": 32, "is_decoder": True},
    ),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_with_cross_attention_takes_a_plain_cache(name: str, cache: str) -> None:
    """It puts a cache for cross attention beside it, or the keys of both would go into one layer."""
    model, ids = DECODERS[name].build("eager"), prompt(1)["input_ids"]
    read = torch.randn(1, 10, 32, generator=torch.Generator().manual_seed(0))
    reading = {"encoder_outputs": (read,)} if name == "whisper" else {"encoder_hidden_states": read}
    with torch.no_grad():
        expected = model(ids, **reading)[0]
        first = model(ids[:, :4], **reading, past_key_values=CACHES[cache](model.config), use_cache=True)
        rest = model(ids[:, 4:], **reading, past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first[0], rest[0]], 1), expected, rtol=1e-4, atol=1e-5)


def test_pages_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_out(self: Paged) -> Tensor:
        raise AssertionError("pages were copied")

    monkeypatch.setattr(Paged, "_write_out", write_out)
    model = MODELS["hybrid"].build(NAME)
    generated(model, CACHES["paged"](model.config), **prompt(), num_beams=2)


INT8: dict[str, Callable[[Any], Any]] = {
    "growing": partial(GrowingCache, dtype=torch.int8),
    "fixed": partial(FixedCache, capacity=400, dtype=torch.int8),
    "paged": partial(PagedCache, pages=200, page_size=4, dtype=torch.int8),
}


class Rounding(DynamicCache):
    """transformers' cache, of the numbers that an int8 cache would hold."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        kv = (Int8Rows(*rounded(t), t.dtype).written_out() for t in (key_states, value_states))
        return super().update(*kv, *args, **kwargs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["grouped", "window", "hybrid"])
@pytest.mark.parametrize("cache", INT8)
def test_a_cache_of_int8_gives_the_tokens_of_the_rounded_numbers(cache: str, model: str, way: str) -> None:
    built = MODELS[model].build(NAME)
    given = prompt(1 if way == "prompt lookup" else 2) | WAYS[way]
    expected = generated(built, Rounding(config=built.config), **given)
    assert torch.equal(generated(built, INT8[cache](built.config), **given), expected)


@pytest.mark.parametrize("name", ["grouped", "window", "hybrid"])
@pytest.mark.parametrize("cache", INT8)
def test_steps_of_generate_read_int8(cache: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widened, widen = list[int](), Int8Rows.widened

    def noted(self: Int8Rows, dtype: torch.dtype) -> Tensor:
        widened.append(self.shape[-2])
        return widen(self, dtype)

    monkeypatch.setattr(Int8Rows, "widened", noted)
    model = MODELS[name].build(NAME)
    generated(model, INT8[cache](model.config), **prompt())
    assert set(widened) <= {PROMPT}  # the prompt alone may have many queries


@pytest.mark.parametrize("cache", INT8)
def test_what_a_reader_writes_out_is_not_kept(cache: str) -> None:
    """Else an implementation that computes with floats would leave a copy of all keys in each layer."""
    layer = INT8[cache](MODELS["grouped"].build(NAME).config).layers[0]
    k = torch.randn(2, 1, 5, 8)
    keys, values = layer.update(k, k)
    assert torch.equal(keys + 0, layer.keys + 0) and torch.equal(values + 0, keys + 0)
    assert layer.update(k, k)[0]._written is None and layer.keys is not keys
    keys, values = layer.update(k, k)
    assert (keys + values).shape[-2] == 15
    assert layer.keys._written is None and layer.values._written is None


@pytest.mark.parametrize("kept", [CACHES, INT8], ids=["as given", "int8"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_layer_shows_what_it_holds(
    cache: str, kept: dict[str, Callable[[Any], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reorder, a crop and in a copy, for which nothing is written out."""
    config = MODELS["hybrid"].build(NAME).config
    made, theirs = kept[cache](config), DynamicCache(config=config)
    k, v = torch.randn(2, 2, 1, 9, 10).unbind()
    for held in (made, theirs):
        held.activate_past_recording()
        for n in range(3):  # layers with a window, and one without
            held.update(k, v, n)
        held.reorder_cache(torch.tensor([1, 0, 1]))
        held.crop(-1)
    with monkeypatch.context() as patch:
        for kind in (Paged, Int8Rows):
            patch.setattr(kind, "written_out", None)
        twin = copy.deepcopy(made)
    for layer, other in zip((*made.layers, *twin.layers), (*theirs.layers, *theirs.layers), strict=True):
        assert layer.get_mask_sizes(3) == other.get_mask_sizes(3)
        for found, t in ((layer.keys, other.keys), (layer.values, other.values)):
            torch.testing.assert_close(found + 0, t, rtol=0, atol=float(t.abs().max()) / 127)
    assert made.is_initialized
    made.reset()
    assert all(layer.keys is None and layer.values is None for layer in made.layers)
    assert not made.is_initialized  # models with a prefix ask whether a forward is the first


def test_a_cache_of_another_dtype_is_refused() -> None:
    config = MODELS["grouped"].build(NAME).config
    with pytest.raises(ValueError, match=r"GrowingCache\(dtype=torch\.float16\): expected None, .* or torch\.int8"):
        GrowingCache(config, torch.float16)


@pytest.mark.parametrize(
    ("cache", "full"), [("growing", nn.GrowingCache), ("fixed", nn.FixedCache), ("paged", nn.PagedCache)]
)
def test_a_layer_with_a_window_holds_no_more(cache: str, full: type[nn.KVCache]) -> None:
    model = MODELS["hybrid"].build(NAME)
    ours = CACHES[cache](model.config)
    with torch.no_grad():
        model(prompt()["input_ids"], past_key_values=ours)
    assert [type(layer.cache) for layer in ours.layers] == [nn.RollingCache, full, nn.RollingCache]
    assert ours.is_sliding == [True, False, True]
    assert not ours.is_compileable and ours.is_croppable


def test_layers_without_keys_are_those_of_transformers() -> None:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    ours, theirs = GrowingCache(config), DynamicCache(config=config)
    assert type(ours.layers[0]) is type(theirs.layers[0])
    assert ours.is_linear == theirs.is_linear == [True, False]


def test_keys_that_transformers_own_layers_hold() -> None:
    """Nobody asks for int8, or for a capacity, that some layers would not have."""
    from transformers import FalconH1Config

    config = FalconH1Config(num_hidden_layers=2)
    assert [type(layer) for layer in GrowingCache(config).layers] == [
        type(layer) for layer in DynamicCache(config=config).layers
    ]
    asked: list[Callable[[], object]] = [
        lambda: GrowingCache(config, torch.int8),
        lambda: FixedCache(config, capacity=8),
        lambda: PagedCache(config, pages=3, page_size=4),
    ]
    for make in asked:
        with pytest.raises(ValueError, match=r"layer 0 of FalconH1Config is of type 'hybrid'"):
            make()


@pytest.mark.parametrize("cache", ["fixed", "paged"])
def test_a_forward_without_room_changes_no_layer(cache: str) -> None:
    """A layer with a window, which has room, comes before the full one that refuses."""
    model, ids = MODELS["hybrid"].build(NAME), torch.randint(3, VOCABULARY, (1, 9))
    own = FixedCache(model.config, capacity=8) if cache == "fixed" else PagedCache(model.config, pages=2, page_size=4)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=own)
        with pytest.raises(ValueError, match=r"do not fit|pages are needed"):
            model(ids[:, 8:], past_key_values=own)
        assert [layer.get_seq_length() for layer in own.layers] == [8] * 3
        own.crop(-4)
        found = model(ids[:, 4:5], past_key_values=own).logits
        expected = model(ids[:, :5]).logits[:, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_is_refused() -> None:
    model = MODELS["grouped"].build(NAME)
    wrong: Any = model
    with pytest.raises(TypeError, match=r"GrowingCache: config is a LlamaForCausalLM.*; .*model\.config"):
        GrowingCache(wrong)
    with pytest.raises(ValueError, match=r"FixedCache\(capacity=0\)"):
        FixedCache(model.config, capacity=0)
    with pytest.raises(ValueError, match=r"PagedCache\(page_size=0\)"):
        PagedCache(model.config, pages=3, page_size=0)
    with pytest.raises(ValueError, match="do not fit"):
        generated(model, FixedCache(model.config, capacity=PROMPT + 3), **prompt())
    with pytest.raises(ValueError, match="pages are needed"):
        generated(model, PagedCache(model.config, pages=5, page_size=4), **prompt())
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        model(prompt()["input_ids"], past_key_values=GrowingCache(model.config))
    with pytest.raises(ValueError, match=r"crop\(3\)"):
        GrowingCache(model.config).crop(3)


@pytest.mark.parametrize("call", ["generate", "forward"])
@pytest.mark.parametrize("kind", ["grouped", "window"])
def test_the_cache_of_one_layer_is_refused_with_the_one_to_pass(kind: str, call: str) -> None:
    model, cache = MODELS[kind].build(NAME), nn.PagedCache(2, heads=2, pages=16, page_size=4, dk=8, dv=8)
    ways = {"generate": partial(model.generate, max_new_tokens=2), "forward": model}
    said = (
        r"a PagedCache is the cache of one layer of regard\.nn, layer\(x, cache=cache\).* "
        r"pass past_key_values=GrowingCache\(model\.config\), or FixedCache or PagedCache, of regard\.compat\."
    )
    with pytest.raises(AttributeError, match=said):
        ways[call](**prompt(), past_key_values=cache)
    assert cache.length == 0
    kept = PagedCache(model.config, pages=16, page_size=4)
    assert model.generate(**prompt(), past_key_values=kept, max_new_tokens=2).shape == (2, PROMPT + 2)
