"""Answers many requests at once with transformers' continuous batching: attention on torch, on regard, with int8 pages.

    python examples/serve.py                                  # 64 prompts of 50 to 1,000 tokens, one thread
    python examples/serve.py --requests 8 --heads 8 --key-heads 2 --window 256

The model is a small Llama, or with --window a Mistral, of random weights. All prompts begin with the same system
prompt, whose pages the requests share. Each way of serving answers them greedily, in turns; the least processor time of
each counts. regard's tokens must be those of sdpa, and with int8 pages those of a loop of `generate` with an int8
cache.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from regard.compat.transformers import NAME, BatchingConfig, GrowingCache

VOCABULARY = 4096


@dataclass(frozen=True)
class Way:
    """A way to answer requests: an implementation of attention, and the dtype of what the cache holds.

    together  whether by continuous batching, or one request after another by `generate`
    peer      the way that must give the same tokens
    """

    implementation: str
    dtype: torch.dtype | None = None
    together: bool = True
    peer: str = ""


PEER = "generate, int8 cache, one by one"
WAYS = {
    "sdpa": Way("sdpa"),
    "regard": Way(NAME, peer="sdpa"),
    "regard, int8 pages": Way(NAME, torch.int8, peer=PEER),
    PEER: Way(NAME, torch.int8, together=False),
}


def model(heads: int, key_heads: int, layers: int, window: int | None) -> Any:
    """A decoder of heads of 64 features, with the same weights for the same sizes."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64 * heads,
        "intermediate_size": 176 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": 4096,
        "eos_token_id": None,  # each answer has as many tokens as were asked for
    }
    built = LlamaForCausalLM(LlamaConfig(**sizes))
    if window is not None:
        built = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    with torch.no_grad():
        for weights in built.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.05)
    return built.eval()


def prompts(count: int, shortest: int, longest: int, system: int) -> list[list[int]]:
    """Prompts of various lengths, each behind the same `system` tokens."""
    generator = torch.Generator().manual_seed(7)
    first: list[int] = torch.randint(3, VOCABULARY, (system,), generator=generator).tolist()
    lengths: list[int] = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [first + torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def answered(served: Any, way: Way, texts: list[list[int]], new: int, batch: int, page: int) -> list[list[int]]:
    """The tokens that the model adds to each prompt."""
    if not way.together:
        return [one_by_one(served, text, new, way.dtype) for text in texts]
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    room = sum(-(-(len(text) + new) // page) for text in texts)  # pages
    pages = {"dtype": way.dtype, "num_blocks": room, "page_size": page}
    config = BatchingConfig(**pages, max_batch_tokens=batch, auto_switch_to_flash=False)
    found = served.generate_batch(texts, generation_config=greedy, continuous_batching_config=config)
    failed = [answer.error for answer in found.values() if answer.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(texts)} requests failed: {failed[0]}")
    return [answer.generated_tokens for answer in found.values()]


def one_by_one(served: Any, text: list[int], new: int, dtype: torch.dtype | None) -> list[int]:
    ids, cache = torch.tensor([text]), GrowingCache(served.config, dtype)
    greedy = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return served.generate(ids, past_key_values=cache, **greedy)[0, len(text) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=50, help="tokens of a prompt, besides the system prompt")
    parser.add_argument("--longest", type=int, default=1000)
    parser.add_argument("--system", type=int, default=256, help="tokens that all prompts begin with")
    parser.add_argument("--new", type=int, default=32, help="tokens added to each")
    parser.add_argument("--batch", type=int, default=512, help="most tokens of a forward")
    parser.add_argument("--page", type=int, default=32, help="tokens of a page; requests share whole pages")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--window", type=int, help="keys that a token sees, its own included")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    served = model(options.heads, options.key_heads, options.layers, options.window)
    texts = prompts(options.requests, options.shortest, options.longest, options.system)
    seconds: dict[str, float] = {}
    tokens: dict[str, list[list[int]]] = {}
    for name in [*WAYS] * options.repeats:
        served.set_attn_implementation(WAYS[name].implementation)
        began = time.process_time()
        tokens[name] = answered(served, WAYS[name], texts, options.new, options.batch, options.page)
        taken = time.process_time() - began
        seconds[name] = min(taken, seconds.get(name, taken))
    for name, way in WAYS.items():
        said = f"{name}: {seconds[name]:.2f} s, {options.requests / seconds[name]:.2f} requests a second"
        if way.peer:
            equal = sum(a == b for a, b in zip(tokens[name], tokens[way.peer], strict=True))
            said += f", {seconds['sdpa'] / seconds[name]:.2f}x; {equal} of {options.requests} answers as by {way.peer}"
        print(said)


if __name__ == "__main__":
    main()
