"""Architectures of transformers as small models of random weights: a forward, a step of generate, a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.candidates import Way
from benchmarks.cases import Case
from benchmarks.inputs import VOCABULARY, Inputs

WIDTH, LAYERS, PAGE = 512, 4, 16
SHARE = 4  # of an encoder with a decoder: tokens that the encoder reads for each that the decoder reads
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
_HEADS = {"intermediate_size": 1408, "head_dim": 64, "max_position_embeddings": 4096}
_OF_PAIR = {"d_model": WIDTH, "vocab_size": VOCABULARY, "decoder_start_token_id": 3, "pad_token_id": 0}
_WHISPER = {"num_mel_bins": 80, "max_source_positions": 1500, "bos_token_id": 1, "eos_token_id": 2}
for _side in ("encoder", "decoder"):
    _WHISPER |= {f"{_side}_layers": LAYERS, f"{_side}_attention_heads": 8, f"{_side}_ffn_dim": 4 * WIDTH}


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, its configuration's class and numbers, and what its models are.

    generates: whether it has a cache and a head for tokens. reads: the argument that its numbers are, or its tokens.
    """

    model: str
    config: str
    sizes: dict[str, Any]
    generates: bool = True
    reads: str = "input_ids"
    pair: bool = False


def _decoder(name: str, heads: int, key_heads: int, width: int = WIDTH, config: str = "", **more: Any) -> Architecture:
    grouped = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    return Architecture(f"{name}ForCausalLM", config or f"{name}Config", {**_COMMON, **_HEADS, **grouped, **more})


_GEMMA = {"sliding_window": 512, "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]}
_GPT = {"n_embd": WIDTH, "n_head": 8, "n_layer": LAYERS, "n_positions": 4096, "vocab_size": VOCABULARY}
_BERT = {**_COMMON, "num_attention_heads": 8, "intermediate_size": 4 * WIDTH, "max_position_embeddings": 4096}
_T5 = {"d_kv": 64, "num_heads": 8, "d_ff": 2 * WIDTH, "num_layers": LAYERS, "num_decoder_layers": LAYERS}
_VIT = {"hidden_size": 384, "num_hidden_layers": LAYERS, "num_attention_heads": 6, "intermediate_size": 1536}
ARCHITECTURES = {
    "Llama 8:8": _decoder("Llama", 8, 8),
    "Llama 32:8": _decoder("Llama", 32, 8, 2 * WIDTH),
    "Qwen3 16:8": _decoder("Qwen3", 16, 8),
    "Gemma 3 8:4": _decoder("Gemma3", 8, 4, config="Gemma3TextConfig", **_GEMMA),
    "GPT-2": Architecture("GPT2LMHeadModel", "GPT2Config", _GPT),
    "BERT": Architecture("BertModel", "BertConfig", _BERT, generates=False),
    "ModernBERT": Architecture("ModernBertModel", "ModernBertConfig", {**_BERT, "pad_token_id": 0}, generates=False),
    "T5": Architecture("T5ForConditionalGeneration", "T5Config", {**_OF_PAIR, **_T5}, pair=True),
    "Whisper": Architecture(
        *("WhisperForConditionalGeneration", "WhisperConfig", {**_OF_PAIR, **_WHISPER}),
        reads="input_features",
        pair=True,
    ),
    "ViT": Architecture("ViTModel", "ViTConfig", _VIT, generates=False, reads="pixel_values"),
}


def model_of(case: Case, implementation: str, dtype: torch.dtype | None = None) -> Any:
    """The model of a case, with numbers from a fixed seed and nothing dropped."""
    import transformers

    import regard.compat.transformers  # noqa: F401 - registers the name

    kind = ARCHITECTURES[case.what]
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    config = getattr(transformers, kind.config)(**kind.sizes)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model: Any = getattr(transformers, kind.model)(config).to(dtype or getattr(torch, case.dtype))
    for p in model.parameters():
        if p.dim() > 1:  # large: those of a fresh model give logits that hardly differ, and heads that see all alike
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    torch.random.set_rng_state(state)
    model.set_attn_implementation(implementation)
    return model.train(case.passes != "forward")


def _given(x: Inputs, model: Any, answered: Tensor | None = None) -> dict[str, Any]:
    """The arguments of a forward. answered: the tokens of a pair's decoder, or else some that are given."""
    kind, q = ARCHITECTURES[x.case.what], x.q
    given = {kind.reads: q.to(model.dtype) if q.is_floating_point() else q}
    if kind.pair:
        n = model.config.max_source_positions if kind.reads != "input_ids" else q.shape[-1]
        text = torch.arange(len(q) * (n // SHARE)).reshape(len(q), -1) * 7 % (VOCABULARY - 3) + 3
        given["decoder_input_ids"] = text if answered is None else answered
    return given | ({"use_cache": False} if kind.generates else {})


def results(x: Inputs, model: Any) -> list[Tensor]:
    """The output; of a model in training also the gradients of all parameters, as one vector."""
    with torch.set_grad_enabled(model.training):
        found = model(**_given(x, model))
        out = found.logits if "logits" in found else found.last_hidden_state
        if not model.training:
            return [out]
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = out.float().square().mean() if model.dtype != torch.float64 else out.square().mean()
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return [out.detach(), torch.cat([g.reshape(-1) for g in gradients])]


def ways(x: Inputs, implementation: str) -> list[Way]:
    """The model of the case with this implementation; where it generates, with each cache."""
    model = model_of(x.case, implementation)
    if not x.case.size:
        return [Way(implementation, lambda: results(x, model), lambda out: out)]
    return [_generating(x, model, name, make) for name, make in _caches(x, model, implementation).items()]


def _caches(x: Inputs, model: Any, implementation: str) -> dict[str, Callable[[], Any]]:
    """By name, functions that make the cache of a text and its continuation."""
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    from regard.compat.transformers import FixedCache, GrowingCache, PagedCache

    kind, config, room = ARCHITECTURES[x.case.what], model.config.get_text_config(decoder=True), x.case.size + 2
    if not kind.pair:
        room += x.case.shape[1]
    pages = len(x.q) * -(-room // PAGE)
    own: dict[str, Callable[[], Any]] = {"DynamicCache": lambda: DynamicCache(config=config)}
    own["StaticCache"] = lambda: StaticCache(config=config, max_cache_len=room)
    if implementation == "regard":
        own["GrowingCache"] = lambda: GrowingCache(config)
        own["FixedCache"] = lambda: FixedCache(config, room)
        own["PagedCache"] = lambda: PagedCache(config, pages, PAGE)
    if not kind.pair:
        return own

    def beside(make: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: EncoderDecoderCache(make(), DynamicCache(config=config))

    return {name: beside(make) for name, make in own.items() if name != "StaticCache"}


def _generating(x: Inputs, model: Any, name: str, make: Callable[[], Any]) -> Way:
    """Steps of generate: what stands before them is read beforehand, untimed."""
    from transformers import GenerationMixin

    kind, count, prepared = ARCHITECTURES[x.case.what], x.case.size, dict[str, Any]()
    asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    asked |= {"eos_token_id": None, "disable_compile": True}

    def before() -> None:
        cache = make()
        if kind.pair:
            read = model.get_encoder()(x.q.to(model.dtype) if x.q.is_floating_point() else x.q)
            prepared.update(encoder_outputs=read, past_key_values=cache)
            return
        model(x.q[:, :-1], past_key_values=cache, use_cache=True)
        prepared.update(input_ids=x.q, attention_mask=torch.ones_like(x.q), past_key_values=cache)

    def run() -> Tensor:
        return GenerationMixin.generate(model, **prepared, **asked)[:, -count:]

    return Way(name, run, lambda out: [out], calls=count, before=before)


@dataclass
class Exact:
    """What a model must give: its own results in float64, by torch, and of tokens those of the largest logit.

    The error of tokens is how far a logit is below the largest, over the spread of logits. The limit is the error of
    the model in the case's dtype, by torch, `worse` times.
    """

    x: Inputs
    worse: float

    def error(self, found: list[Tensor]) -> float:
        if self.x.case.size:
            return self._below(found[0])
        return max(float((t - r).norm() / r.norm()) for t, r in zip(found, self._right, strict=True))

    def _below(self, tokens: Tensor) -> float:
        if tokens.shape != (len(self.x.q), self.x.case.size):
            return float("inf")
        logits = self._logits(self._double, tokens)
        below = logits.amax(-1) - logits.gather(-1, tokens[..., None]).squeeze(-1)
        return float(below.max() / logits.std())

    @cached_property
    def limit(self) -> float:
        plain = model_of(self.x.case, "sdpa")
        if not self.x.case.size:
            return self.worse * self.error([t.double() for t in results(self.x, plain)])
        some = self.x.q.new_full((len(self.x.q), 8), 5, dtype=torch.int64)
        exact, rough = (self._logits(model, some) for model in (self._double, plain))
        return self.worse * float((rough - exact).std() / exact.std())

    def _logits(self, model: Any, tokens: Tensor) -> Tensor:
        """Of the tokens that follow what was read."""
        if ARCHITECTURES[self.x.case.what].pair:
            start = tokens.new_full((len(tokens), 1), model.config.decoder_start_token_id)
            given = _given(self.x, model, torch.cat([start, tokens[:, :-1]], 1))
        else:
            given = {"input_ids": torch.cat([self.x.q, tokens[:, :-1]], 1), "use_cache": False}
        with torch.no_grad():
            return model(**given).logits[:, -tokens.shape[1] :].double()

    @cached_property
    def _right(self) -> list[Tensor]:
        return results(self.x, self._double)

    @cached_property
    def _double(self) -> Any:
        # its weights are those of the case's dtype
        return model_of(self.x.case, "sdpa").double()
