"""python -m benchmarks.looking: what it costs to look inside, of one call and of a whole model.

One call: regard.attention alone, torch's SDPA alone, and attention with each fact; answers are checked against their
dense float64 definitions first, the times interleaved, medians. A model: a random Llama of transformers on a long
sequence with padding in it, each way in a process of its own, in turns. Memory is the growth of the process at most
(VmHWM, Linux) while it runs once more. Writes benchmarks/results/looking.md, or what --output names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard as rg
from benchmarks.memory import Memory
from regard import facts as f
from regard.backends.native.ffi import chosen
from regard.cli.machine import peak, processor
from regard.inspect.dense import dense
from regard.runtime.binding import BoundCall

SHAPE = (1, 12, 4096, 64)
TURNS = 9
PROCESSES = 3  # of each way of a model
WRONG = 1e-5  # relative, root mean square: several times the rounding of float32
ALL = (f.MaxScore(), f.Entropy(), f.Top(8), f.Received(), f.Map(64, 64))
FACTS: dict[str, tuple[f.Fact[Any], ...]] = {
    "log-sum-exp": (),
    "max score": ALL[:1],
    "entropy": ALL[1:2],
    "top 8": ALL[2:3],
    "received": ALL[3:4],
    "map 64 × 64": ALL[4:],
    "all of these": ALL,
}
LENGTHS = (4096, 16384)
WAYS = {
    "eager": "eager, weights returned",
    "sdpa": "sdpa, nothing seen",
    "regard": "regard, nothing seen",
    "record": "regard, all facts",
}
EAGER_MOST = 4096  # tokens: beyond, its weights are tens of gigabytes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.looking", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "looking.md")
    parser.add_argument("--shape", type=int, nargs=4, default=SHAPE, help="of q, k and v")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="of the model's sequences")
    parser.add_argument("--way", nargs=2, metavar=("WAY", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.way:
        print(json.dumps(_run_model(options.way[0], int(options.way[1]))))
        return 0
    parts: list[str] = []
    for part in (_head, partial(_calls, tuple(options.shape)), *(partial(_models, n) for n in options.lengths)):
        parts.append(part())
        print(parts[-1], end="\n\n", flush=True)
    options.output.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return 0


def _head() -> str:
    threads = torch.get_num_threads()
    return (
        f"# Looking: what facts about the weights cost\n\n{processor()}, {threads} threads, regard's kernels "
        f"{chosen()}, torch {torch.__version__}; {peak(threads) / 1e9:.0f} Gflop/s of float32 multiply-adds measured "
        f"in the run. Medians of {TURNS} turns, interleaved; memory is the growth of the process at most. "
        "`python -m benchmarks.looking`"
    )


def _calls(shape: tuple[int, ...]) -> str:
    """The table of one call."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=random) for _ in range(3))
    check(q[:, :2, :512], k[:, :2, :512])
    runs: dict[str, Callable[[], Any]] = {"attention": lambda: rg.attention(q, k, v), "SDPA": lambda: sdpa(q, k, v)}
    for name, facts in FACTS.items():
        runs[name] = lambda facts=facts: (rg.attention(q, k, v), rg.look(q, k, facts=facts))
    seconds = _medians(runs)
    lines = [
        f"## One call, q, k and v {shape}, float32",
        f"`attention` alone takes {seconds['attention'] * 1e3:.0f} ms, torch's SDPA, which tells nothing, "
        f"{seconds['SDPA'] * 1e3:.0f} ms. Attention, and a look besides:",
        "| facts | time | against attention alone | against SDPA alone | memory beyond output and answers |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        + "\n".join(
            f"| {name} | {seconds[name] * 1e3:.0f} ms | {seconds[name] / seconds['attention']:.2f} | "
            f"{seconds[name] / seconds['SDPA']:.2f} | {_beyond(runs[name])} |"
            for name in FACTS
        ),
    ]
    return "\n\n".join(lines)


def check(q: Tensor, k: Tensor) -> None:
    """Raises ValueError where an answer is not its definition in float64."""
    nothing = k.new_zeros(*k.shape[:-1], 0, dtype=torch.float64)
    exact = dense(
        BoundCall(q.double(), k.double(), nothing, rg.ScaledDot(), rg.Everything(), None, None, None).problem, ALL
    )
    seen = rg.look(q, k, facts=ALL)
    for fact in ALL:
        for got, right in zip(_tensors(seen[fact]), _tensors(exact[fact]), strict=True):
            if not got.is_floating_point():  # keys, of equal weights any
                continue
            off = (got - right).square().mean().sqrt() / right.square().mean().sqrt()
            if not off <= WRONG:
                raise ValueError(f"{fact!r} is {off:.0e} from its definition; nothing was measured.")


def _tensors(answer: Any) -> list[Tensor]:
    return [answer] if isinstance(answer, Tensor) else list(answer)


def _medians(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    turns: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(TURNS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:  # the first brings threads, caches and code
                turns[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in turns.items()}


def _beyond(run: Callable[[], Any]) -> str:
    memory = Memory()
    out, seen = run()
    grown = memory.grown()
    held = [out, seen.lse, *(t for fact in seen.facts for t in _tensors(seen[fact]))]
    if grown is None:
        return "–"
    return f"{max(0, grown - sum(t.nbytes for t in held)) / 1e6:.1f} MB"


def _models(length: int) -> str:
    """The table of a model, each way in turns with the others, each turn a process of its own."""
    ways = [way for way in WAYS if way != "eager" or length <= EAGER_MOST]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(PROCESSES):
        for way in ways:
            command = [sys.executable, "-m", "benchmarks.looking", "--way", way, str(length)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"## A model, {length:,} tokens\n\nNot measured: {done.stderr.strip().splitlines()[-1]}"
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    rows = {
        way: {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        for way, turns in found.items()
    }
    furthest = max(row["off"] for row in rows.values())
    return (
        f"## A model: a random Llama (4 layers, 8 heads, 4 of keys, d = 64), {length:,} tokens, a padded row\n\n"
        f"Outputs of real tokens differ by {furthest:.0e} at most from sdpa's.\n\n"
        "| way | time | against sdpa | memory |\n| --- | ---: | ---: | ---: |\n"
        + "\n".join(
            f"| {WAYS[way]} | {row['seconds']:.2f} s | {row['seconds'] / rows['sdpa']['seconds']:.2f} | "
            f"{row['grown'] / 1e6:,.0f} MB |"
            for way, row in rows.items()
        )
    )


def _run_model(way: str, length: int) -> dict[str, float]:
    """One forward of the model, after a short one: seconds, growth of the process, and how far from sdpa's output."""
    from transformers import LlamaConfig, LlamaModel

    import regard.compat.transformers  # noqa: F401 - registers the name

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 256}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": length}
    model = LlamaModel(LlamaConfig(**sizes, **heads)).eval()
    ids, real = torch.randint(256, (1, length)), torch.ones(1, length, dtype=torch.long)
    real[:, : length // 16] = 0  # padding on the left

    def run(ids: Tensor, real: Tensor) -> tuple[Tensor, Any]:
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": real, "use_cache": False}
        with torch.no_grad():
            if way == "record":
                with rg.record(model, ALL) as tape:
                    return model(**given).last_hidden_state, tape
            out = model(**given, output_attentions=way == "eager")
            return out.last_hidden_state, out

    model.set_attn_implementation("regard" if way == "record" else way)
    run(ids[:, :64], real[:, -64:])
    memory, start = Memory(), time.perf_counter()
    out, held = run(ids, real)
    seconds, grown = time.perf_counter() - start, memory.grown()
    del held
    model.set_attn_implementation("sdpa")
    way = "sdpa"
    off = float((run(ids, real)[0] - out)[real.bool()].abs().max())
    return {"seconds": seconds, "grown": float("nan") if grown is None else grown, "off": off}


if __name__ == "__main__":
    raise SystemExit(main())
