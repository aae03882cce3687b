"""The most memory that transformers' generate takes with each cache, and how much of it are keys and values.

    python examples/cache_memory.py                             # a prompt of 4,096 tokens and 32 new ones
    python examples/cache_memory.py --dtype bfloat16 --batch 4 --tokens 1024

The model is a Llama of random weights. Memory is what a process grows by at most while it generates; each cache has its
own. glibc keeps freed memory that lies between what is still used, and a process grows by that too; with
MALLOC_MMAP_THRESHOLD_=65536 it gives tensors back at once. The second column is measured so. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regard.compat.transformers import FixedCache, GrowingCache, PagedCache

PAGE = 16

Make = Callable[[Any, int, int], dict[str, Any]]  # of the configuration, the batch, and tokens: arguments of generate

CACHES: dict[str, tuple[str, Make]] = {  # by name: the implementation of attention, and the cache
    "sdpa, DynamicCache": ("sdpa", lambda config, batch, n: {}),
    "sdpa, StaticCache": ("sdpa", lambda config, batch, n: {"cache_implementation": "static"}),
    "DynamicCache": ("regard", lambda config, batch, n: {}),
    "GrowingCache": ("regard", lambda config, batch, n: {"past_key_values": GrowingCache(config)}),
    "FixedCache": ("regard", lambda config, batch, n: {"past_key_values": FixedCache(config, n)}),
    "PagedCache": ("regard", lambda config, batch, n: {"past_key_values": PagedCache(config, pages(batch, n), PAGE)}),
    "GrowingCache, int8": ("regard", lambda config, batch, n: {"past_key_values": GrowingCache(config, torch.int8)}),
    "FixedCache, int8": ("regard", lambda config, batch, n: {"past_key_values": FixedCache(config, n, torch.int8)}),
    "PagedCache, int8": (
        "regard",
        lambda config, batch, n: {"past_key_values": PagedCache(config, pages(batch, n), PAGE, torch.int8)},
    ),
}


def pages(batch: int, tokens: int) -> int:
    return batch * -(-tokens // PAGE)


def model(implementation: str, layers: int, key_heads: int, dtype: torch.dtype) -> Any:
    """A decoder of 8 heads of 64 features."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=key_heads,
        max_position_embeddings=1 << 17,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def grown(name: str, options: argparse.Namespace) -> int:
    """Bytes by which this process is larger at most while the model generates."""
    torch.set_num_threads(options.threads)
    implementation, make = CACHES[name]
    decoder = model(implementation, options.layers, options.key_heads, getattr(torch, options.dtype))
    ask = {"do_sample": False, "pad_token_id": 0}

    def generate(count: int, new: int) -> None:
        prompt = torch.randint(1, 1024, (options.batch, count))
        whole = torch.ones_like(prompt)
        cache = make(decoder.config, options.batch, count + new)
        decoder.generate(prompt, attention_mask=whole, min_new_tokens=new, max_new_tokens=new, **ask, **cache)

    generate(8, 2)  # what is loaded and made at the first call
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    generate(options.tokens, options.new)
    return 1024 * max(0, kilobytes("VmHWM") - before)


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens added to it")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", choices=list(CACHES), help="only this one, in this process")
    options = parser.parse_args()
    if options.cache is not None:
        print(grown(options.cache, options))
        return
    size = torch.finfo(getattr(torch, options.dtype)).bits // 8
    keys = 2 * options.batch * options.layers * options.key_heads * (options.tokens + options.new) * 64
    print(f"keys and values: {size * keys / 1e6:.0f} MB, as int8 {(keys + keys // 16) / 1e6:.0f} MB")  # 4 bytes a row
    print(f"{'':<20}as it comes   given back")
    for name in CACHES:
        settings = os.environ, {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        cells = [measured(name, environment) for environment in settings]
        print(f"{name:<20}{cells[0]:>11}{cells[1]:>13}", flush=True)


def measured(name: str, environment: Mapping[str, str]) -> str:
    """The growth of a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--cache", name]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE)
    return f"{int(found.stdout) / 1e6:.0f} MB" if found.returncode == 0 else "failed"


if __name__ == "__main__":
    main()
