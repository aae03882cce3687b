"""Answers many requests at once with transformers' continuous batching: attention on torch, on regard, with int8 pages.

    python examples/serve.py                                  # 64 prompts of 50 to 1,000 tokens, one thread
    python examples/serve.py --requests 8 --heads 8 --key-heads 2 --window 256 --arrival steady bursts

The model is a small Llama, or with --window a Mistral, of random weights. All prompts begin with the same system
prompt, whose pages the requests share. Each way of serving answers them greedily, in turns; the least processor time of
each counts. The answers must be those of a loop of `generate`, with int8 pages those of one with an int8 cache; where
one is not, it says how far apart the logits of the two tokens are. Other prompts in a forward change the last digits of
a sum, which decides between tokens that are as good as equal.

The requests come all at once (together), one before every second forward (steady), or eight before every sixteenth
(bursts): by numbers of forwards, not by the clock, so that every way has the same requests in the same forwards.
"""

from __future__ import annotations

import argparse
import queue
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
# The number of forwards before each request comes, the first of which is request 0.
ARRIVALS = {"together": lambda n: 0, "steady": lambda n: 2 * n, "bursts": lambda n: n // 8 * 16}


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


LOOP, LOOP_OF_INT8 = "generate", "generate, int8 cache"
WAYS = {
    "sdpa": Way("sdpa", peer=LOOP),
    "regard": Way(NAME, peer=LOOP),
    "regard, int8 pages": Way(NAME, torch.int8, peer=LOOP_OF_INT8),
    LOOP: Way("sdpa", together=False),
    LOOP_OF_INT8: Way(NAME, torch.int8, together=False),
}


class Arriving(queue.Queue[Any]):
    """The queue of a server, from which each request can be taken only after so many forwards.

    The server empties it before each forward. None can be taken before all have been put in.
    """

    def __init__(self, forwards: list[int]) -> None:
        super().__init__()
        self.forwards, self.passed, self.taken = forwards, 0, 0

    def empty(self) -> bool:
        if self.taken + self.qsize() < len(self.forwards):
            return True
        if self.taken < len(self.forwards) and self.forwards[self.taken] <= self.passed:
            return False
        self.passed += 1
        return True

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        found = super().get(block, timeout)
        self.taken += 1
        return found


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


def answered(served: Any, way: Way, texts: list[list[int]], forwards: list[int], options: Any) -> list[list[int]]:
    """The tokens that the model adds to each prompt; forwards: after how many each of them comes."""
    new, page = options.new, options.page
    if not way.together:
        return [one_by_one(served, text, new, way.dtype) for text in texts]
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    room = sum(-(-(len(text) + new) // page) for text in texts)  # pages
    pages = {"dtype": way.dtype, "num_blocks": room, "page_size": page}
    config = BatchingConfig(**pages, max_batch_tokens=options.batch, auto_switch_to_flash=False)
    server = served.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    server.input_queue = Arriving(forwards)
    server.start()
    try:
        names = server.add_requests(texts)
        found: dict[str, Any] = {}
        while len(found) < len(names) and (server.is_running() or not server.output_router.output_queue.empty()):
            answer = server.get_result(timeout=1)
            if answer is not None and answer.is_finished():
                found[answer.request_id] = answer
    finally:
        server.stop(block=True)
        server.destroy()
    errors = [found[name].error if name in found else "the server ended before" for name in names]
    failed = [error for error in errors if error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(texts)} requests failed: {failed[0]}")
    return [found[name].generated_tokens for name in names]


def one_by_one(served: Any, text: list[int], new: int, dtype: torch.dtype | None) -> list[int]:
    ids = torch.tensor([text])
    greedy = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    cache = {} if dtype is None else {"past_key_values": GrowingCache(served.config, dtype)}
    return served.generate(ids, **cache, **greedy)[0, len(text) :].tolist()


def tie(served: Any, text: list[int], one: list[int], other: list[int], dtype: torch.dtype | None) -> float:
    """How far apart the logits are of the first two tokens in which two answers differ."""
    at = next(n for n, tokens in enumerate(zip(one, other, strict=True)) if tokens[0] != tokens[1])
    cache = {} if dtype is None else {"past_key_values": GrowingCache(served.config, dtype)}
    with torch.no_grad():
        logits = served(torch.tensor([text + one[:at]]), **cache).logits[0, -1]
    return float((logits[one[at]] - logits[other[at]]).abs())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=50, help="tokens of a prompt, besides the system prompt")
    parser.add_argument("--longest", type=int, default=1000)
    parser.add_argument("--system", type=int, default=256, help="tokens that all prompts begin with")
    parser.add_argument("--new", type=int, default=32, help="tokens added to each")
    parser.add_argument("--arrival", nargs="+", choices=ARRIVALS, default=list(ARRIVALS), help="when requests come")
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
    cases = [(name, arrival) for arrival in options.arrival for name, way in WAYS.items() if way.together]
    cases += [(name, "one by one") for name, way in WAYS.items() if not way.together]
    seconds: dict[tuple[str, str], float] = {}
    tokens: dict[tuple[str, str], list[list[int]]] = {}
    for case in cases * options.repeats:
        name, arrival = case
        forwards = [ARRIVALS[arrival](n) for n in range(options.requests)] if WAYS[name].together else []
        served.set_attn_implementation(WAYS[name].implementation)
        began = time.process_time()
        tokens[case] = answered(served, WAYS[name], texts, forwards, options)
        taken = time.process_time() - began
        seconds[case] = min(taken, seconds.get(case, taken))
    print(f"{'requests':<12}{'answered by':<24}{'seconds':>9}{'a second':>10}{'of sdpa':>9}   equal answers")
    for case in cases:
        name, arrival = case
        row = f"{arrival:<12}{name:<24}{seconds[case]:>9.2f}{options.requests / seconds[case]:>10.2f}"
        if WAYS[name].together:
            peer = WAYS[WAYS[name].peer]
            served.set_attn_implementation(peer.implementation)
            both = zip(texts, tokens[case], tokens[WAYS[name].peer, "one by one"], strict=True)
            ties = [tie(served, *answers, peer.dtype) for answers in both if answers[1] != answers[2]]
            row += f"{seconds['sdpa', arrival] / seconds[case]:>8.2f}x"
            row += f"   {options.requests - len(ties)} of {options.requests} as by {WAYS[name].peer}"
            row += f"; logits {max(ties):.1e} apart where not" if ties else ""
        print(row)


if __name__ == "__main__":
    main()
