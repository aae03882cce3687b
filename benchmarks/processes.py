"""Attention over one, two and four gloo processes of one machine: seconds, memory of each, bytes sent, what is hidden.

    python -m benchmarks.processes [--large]

Each case runs in processes of its own, started anew, one thread each. Memory is the growth of the largest process's
peak (VmHWM) from before its tensors are made. "waiting" is the share of a call that a rank spends in Messages.wait,
with nothing to compute. A rank's answer for each fiftieth of its rows is compared with attention over all keys, where
these are few enough to hold. --large adds a million tokens with a window, and 65,536 causal ones with gradients. On two
cores four processes take turns: their seconds say little, their memory and bytes do. Linux alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

import regard as rg
from regard.parallel import Shards, ring_attention
from regard.parallel.peers import Message, Messages, Peers

CHECKED = 1 << 17  # tokens up to which the answer is compared


@dataclass(frozen=True)
class Case:
    """One call: tokens, heads, layout and mask, and whether its gradients are found too."""

    n: int
    heads: int
    layout: str
    window: int | None = None
    backward: bool = False

    @property
    def mask(self) -> rg.Mask:
        return rg.Causal() if self.window is None else rg.Causal() & rg.Window(before=self.window - 1, after=0)

    def __str__(self) -> str:
        seen = "causal" if self.window is None else f"window of {self.window:,}"
        return f"{self.n:,} tokens, {self.heads} x 64, {seen}, {self.layout}{', both' if self.backward else ''}"


CASES = tuple(Case(16384, 4, layout, backward=both) for layout in ("contiguous", "zigzag") for both in (False, True))
LARGE = (Case(1 << 20, 1, "contiguous", window=4096), Case(1 << 16, 2, "zigzag", backward=True))


def peak() -> int:
    """Bytes of memory that this process has held at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(rank: int, ranks: int, store: str, case: Case, answers: Any) -> None:
    """What one rank measures, put into `answers`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    small = torch.randn(1, 1, 8, 64, requires_grad=True)
    ring_attention(small, small, small, mask=rg.Causal()).sum().backward()  # what is loaded at the first call
    before = peak()
    shards: Shards = getattr(Shards, case.layout)(case.n, ranks)
    mine = shards.lengths[rank]
    random = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(1, case.heads, mine, 64, generator=random).requires_grad_(case.backward) for _ in range(3))
    sent, waited, post, wait = [0], [0.0], Peers.post, Messages.wait

    def counted_post(self: Peers, sends: Sequence[Message], receives: Sequence[Message]) -> Messages:
        sent[0] += sum(t.numel() * t.element_size() for t, _ in sends)
        return post(self, sends, receives)

    def timed_wait(self: Messages) -> None:
        start = time.perf_counter()
        wait(self)
        waited[0] += time.perf_counter() - start

    Peers.post, Messages.wait = counted_post, timed_wait
    dist.barrier()
    start = time.perf_counter()
    out = ring_attention(q, k, v, shards=shards, mask=case.mask)
    if case.backward:
        out.sum().backward()
    seconds = time.perf_counter() - start
    taken = peak() - before
    error = _error(case, shards, rank, ranks, q, out) if case.n <= CHECKED else float("nan")
    answers.put((rank, seconds, waited[0], sent[0], taken, error))
    dist.barrier()
    dist.destroy_process_group()


def _error(case: Case, shards: Shards, rank: int, ranks: int, q: torch.Tensor, out: torch.Tensor) -> float:
    """The largest error of each fiftieth row, against all keys in one process, drawn as their ranks drew them."""
    k, v = (torch.empty(1, case.heads, case.n, 64) for _ in range(2))
    for other in range(ranks):
        random = torch.Generator().manual_seed(other)
        _, own_k, own_v = (torch.randn(1, case.heads, shards.lengths[other], 64, generator=random) for _ in range(3))
        k[..., shards.indices[other], :], v[..., shards.indices[other], :] = own_k, own_v
    rows = torch.arange(0, shards.lengths[rank], 50)
    at = rg.Positions(shards.indices[rank][rows], torch.arange(case.n))
    wanted = rg.attention(q.detach()[..., rows, :], k, v, mask=case.mask, positions=at)
    return float((out.detach()[..., rows, :] - wanted).abs().max())


def run(case: Case, ranks: int) -> str:
    """A line of the table."""
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (ranks, str(Path(folder) / "store"), case, answers), nprocs=ranks)
    found = sorted(answers.get() for _ in range(ranks))
    seconds, share = max(one[1] for one in found), max(one[2] / one[1] for one in found)
    sent, taken, error = (max(one[i] for one in found) for i in (3, 4, 5))
    return f"| {case} | {ranks} | {seconds:.2f} | {share:.0%} | {sent / 1e6:,.1f} | {taken / 1e6:,.0f} | {error:.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="the two long cases too, on two processes")
    large = parser.parse_args().large
    print("| call, float32 | processes | seconds | waiting | MB sent by a rank | MB of a rank | error |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES:
        for ranks in (1, 2, 4):
            print(run(case, ranks), flush=True)
    for case in LARGE if large else ():
        print(run(case, 2), flush=True)


if __name__ == "__main__":
    main()
