"""What a cache of int8 changes: the error of attention over rounded keys and values, for each layer of several models.

    python examples/int8_errors.py                               # two trained models, ten of random weights
    python examples/int8_errors.py --model FOLDER --text FILE    # yours: a folder of transformers, and a text

Each layer's attention is computed twice, over its float32 keys and values and over those that rg.nn.GrowingCache keeps
with dtype=torch.int8. The error is ‖rounded - exact‖ / ‖exact‖ of the layer's output, before its projection: the mean
of all layers, and the largest. Beside it stand keys alone, values alone, and a cache of bfloat16.

Random weights say how the rounding passes through an architecture. Trained keys have features that are larger than the
others, which random ones have not: measure your own model before you decide.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import regard as rg
import regard.compat.transformers  # registers "regard"
from regard.call.hooks import AttentionCall, observing
from regard.compat.folder import folder_of, reader
from regard.demo.model import load

Run = Callable[[], object]
VOCABULARY = 997
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 256, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
OPT = SIZES | {"ffn_dim": 512, "word_embed_proj_dim": 256}
WHISPER = {
    "vocab_size": VOCABULARY,
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_source_positions": 200,
    **{name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    "decoder_start_token_id": 1,
}
RANDOM: dict[str, tuple[str, str, dict[str, Any]]] = {  # the classes of the model and of its configuration, its sizes
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 64}),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 64}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | {"head_dim": 64, "sliding_window": 64}),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "Phi": ("PhiForCausalLM", "PhiConfig", SIZES),
    "OPT": ("OPTForCausalLM", "OPTConfig", OPT),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "BERT, as a decoder": ("BertLMHeadModel", "BertConfig", SIZES | {"is_decoder": True}),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}


def rounded(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return rg.nn.GrowingCache(dtype=torch.int8).append(k, v)


def in_bfloat16(t: Tensor) -> Tensor:
    return t.bfloat16().to(t.dtype)


FORMS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "int8": rounded,
    "keys alone": lambda k, v: (rounded(k, v)[0].to(k.dtype), v),
    "values alone": lambda k, v: (k, rounded(k, v)[1].to(v.dtype)),
    "bfloat16": lambda k, v: (in_bfloat16(k), in_bfloat16(v)),
}


def attend(call: AttentionCall, k: Tensor, v: Tensor) -> Tensor:
    return rg.attention(call.q, k, v, score=call.score, mask=call.mask, positions=call.positions, sink=call.sink)


@torch.no_grad()
def errors(run: Run) -> dict[str, list[float]]:
    """The relative error of each attention call of a model, by form of the cache."""
    found: dict[str, list[float]] = {name: [] for name in FORMS}

    def see(call: AttentionCall) -> None:
        assert call.v is not None
        exact = attend(call, call.k, call.v)
        for name, form in FORMS.items():
            found[name].append(float((attend(call, *form(call.k, call.v)) - exact).norm() / exact.norm()))

    with observing(see):
        run()
    return found


def random_model(name: str, tokens: int) -> Run:
    """A model with weights so large that attention is not even, and random tokens."""
    kind, config, sizes = RANDOM[name]
    torch.manual_seed(0)
    built = getattr(transformers, kind)(getattr(transformers, config)(**sizes, attn_implementation="regard")).eval()
    with torch.no_grad():
        for weights in built.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 1.5 * weights.shape[-1] ** -0.5)
    feed = {"input_ids": torch.randint(3, VOCABULARY, (1, tokens))}
    if name == "Whisper":
        feed = {"input_features": torch.randn(1, 80, 400), "decoder_input_ids": feed["input_ids"]}
    return lambda: built(**feed)


def byte_model(text: str, tokens: int) -> Run:
    built, ids = load(), torch.tensor([list(text.encode())[:tokens]])
    return lambda: built(ids)


def folder_model(folder: Path, text: str, tokens: int) -> Run:
    built, tokenizer = reader(folder)
    built.float().set_attn_implementation("regard")
    feed = tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)
    return lambda: built(**feed)


def row(name: str, weights: str, found: dict[str, list[float]]) -> str:
    each = found["int8"]
    assert each, f"{name} made no call of attention on regard"
    means = "".join(f"{sum(of) / len(of):>14.3%}" for of in found.values())
    return f"{name:20}{weights:10}{len(each):>5}{means}{max(each):>14.3%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", help="this one alone: a folder of transformers, or minilm")
    parser.add_argument("--text", type=Path, help="a file that trained models read (default: this one)")
    parser.add_argument("--tokens", type=int, default=256, help="of a text, at most")
    options = parser.parse_args()
    text = (options.text or Path(__file__)).read_text("utf-8")
    heads = "".join(f"{name:>14}" for name in (*FORMS, "worst of int8"))
    print(f"{'model':20}{'weights':10}{'calls':>5}{heads}")
    if options.model is not None:
        folder = folder_of(options.model)
        print(row(folder.name, "trained", errors(folder_model(folder, text, options.tokens))))
        return
    print(row("byte model", "trained", errors(byte_model(text, options.tokens))))
    try:
        print(row("MiniLM", "trained", errors(folder_model(folder_of("minilm"), text, options.tokens))))
    except ValueError as missing:
        print(f"MiniLM: {missing}")
    for name in RANDOM:
        print(row(name, "random", errors(random_model(name, options.tokens))))


if __name__ == "__main__":
    main()
