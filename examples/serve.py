"""Answers many requests at once with transformers' continuous batching: attention on regard, and on torch.

    python examples/serve.py                                  # 32 prompts of 50 to 1,000 tokens, one thread
    python examples/serve.py --requests 8 --heads 8 --key-heads 2 --window 256

The model is a small Llama, or with --window a Mistral, of random weights. Each implementation answers the same prompts
greedily, in turns; the tokens must be equal, and the least processor time of each counts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import regard.compat.transformers

VOCABULARY = 4096
IMPLEMENTATIONS = regard.compat.transformers.NAME, "sdpa"


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
    }
    built = LlamaForCausalLM(LlamaConfig(**sizes))
    if window is not None:
        built = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    with torch.no_grad():
        for weights in built.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.05)
    return built.eval()


def prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths: list[int] = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def answers(served: Any, texts: list[list[int]], new: int, batch: int) -> tuple[list[list[int]], float]:
    """The tokens that the model adds to each prompt, and the processor time in seconds."""
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    room = sum(-(-(len(text) + new) // 256) for text in texts)  # pages of 256 tokens
    config = ContinuousBatchingConfig(num_blocks=room, max_batch_tokens=batch, auto_switch_to_flash=False)
    began = time.process_time()
    found = served.generate_batch(texts, generation_config=greedy, continuous_batching_config=config)
    seconds = time.process_time() - began
    failed = [answer.error for answer in found.values() if answer.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(texts)} requests failed: {failed[0]}")
    return [answer.generated_tokens for answer in found.values()], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=50, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=1000)
    parser.add_argument("--new", type=int, default=32, help="tokens added to each")
    parser.add_argument("--batch", type=int, default=512, help="most tokens of a forward")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--window", type=int, help="keys that a token sees, its own included")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    served = model(options.heads, options.key_heads, options.layers, options.window)
    texts = prompts(options.requests, options.shortest, options.longest)
    seconds: dict[str, float] = {}
    tokens: dict[str, list[list[int]]] = {}
    for name in IMPLEMENTATIONS * options.repeats:
        served.set_attn_implementation(name)
        tokens[name], taken = answers(served, texts, options.new, options.batch)
        seconds[name] = min(taken, seconds.get(name, taken))
    for name in IMPLEMENTATIONS:
        print(f"{name}: {seconds[name]:.2f} s, {options.requests / seconds[name]:.2f} requests a second")
    ours, theirs = IMPLEMENTATIONS
    equal = sum(a == b for a, b in zip(tokens[ours], tokens[theirs], strict=True))
    print(f"{seconds[theirs] / seconds[ours]:.2f}x; {equal} of {options.requests} answers equal")


if __name__ == "__main__":
    main()
