"""Trains the byte model on one long text that several processes share, and looks at what it attends to.

    torchrun --nproc-per-node 2 examples/long_context.py --memory 1600
    torchrun --nproc-per-node 1 examples/long_context.py                 # the same losses, in twice the memory

Each process holds every layer's weights and its own part of the text; attention goes over all of it
(regard.parallel.ring_attention). --memory forbids each process more than so many megabytes besides what it starts with,
so that one alone cannot hold the text. The text is sources of Python's standard library.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

import regard as rg
from regard.demo.model import ByteTransformer, Shape
from regard.parallel import SequenceParallel, Shards

ENTROPY = rg.facts.Entropy()


def text(length: int) -> Tensor:
    """The first `length` bytes of the standard library."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found.append(path.read_bytes())
        size += len(found[-1])
        if size >= length:
            return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8)[:length].long()
    raise ValueError(f"the standard library has {size} bytes; expected --length to be at most that less one.")


def summed(x: Tensor) -> Tensor:
    """The sum over the processes."""
    dist.all_reduce(x)
    return x


def train(model: ByteTransformer, tokens: Tensor, targets: Tensor, count: int, steps: int, rate: float) -> list[float]:
    """The loss of each step over the whole text, in nats a byte: each process's share of it, and of its gradient."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=rate), []
    for _ in range(steps):
        share = cross_entropy(model(tokens[None])[0], targets, reduction="sum") / count
        optimizer.zero_grad()
        share.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            summed(parameter.grad)
        optimizer.step()
        losses.append(float(summed(share.detach())))
    return losses


def look(model: ByteTransformer, tokens: Tensor, count: int) -> list[float]:
    """For each layer, the mean entropy of its rows, in nats: rows are of this process's bytes, keys of all."""
    with torch.no_grad(), rg.record(model, facts=(ENTROPY,)) as tape:
        model(tokens[None])
    return [float(summed(call[ENTROPY].sum((0, 2)).mean())) / count for call in tape]


def allow(megabytes: int) -> None:
    """Makes what goes beyond so much more memory than now a RuntimeError of torch, or a MemoryError."""
    now = int(re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (now + (megabytes << 20), resource.RLIM_INFINITY))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1 << 15, help="bytes of the text")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--memory", type=int, help="megabytes that a process may take besides what it starts with")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights everywhere
    model = ByteTransformer(Shape(args.width, args.layers))
    shards = Shards.contiguous(args.length, ranks)
    for block in model.blocks:
        block.attention.parallel = SequenceParallel(shards)
    whole, mine = text(args.length + 1), shards.indices[rank]
    tokens, targets = whole[:-1][mine], whole[1:][mine]
    if args.memory is not None:
        allow(args.memory)
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    losses = train(model, tokens, targets, args.length, args.steps, args.rate)
    entropies = look(model, tokens, args.length)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines: list[str | None] = [None] * ranks
    dist.all_gather_object(lines, f"rank {rank}: {len(mine):,} bytes of text, {(peak - started) >> 10} MB at the peak")
    if rank == 0:
        print("loss", *(f"{loss:.6f}" for loss in losses), "nats a byte")
        print("entropy", *(f"{entropy:.6f}" for entropy in entropies), "nats, by layer")
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
