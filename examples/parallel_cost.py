"""What attention costs over several ranks: ring, Ulysses, both on a mesh (USP), and decoding over a cache in parts.

    python examples/parallel_cost.py                      # tables for the clusters of the papers
    python examples/parallel_cost.py --ranks 2 --bandwidth 1.2e9 --flops 40e9 --size 4 --tokens 16384

Ring is simulated step by step, with the blocks that the mask lets a rank skip, two buffers a rank and one link from
each rank to the next. The rest are formulas. Bytes are those that a rank sends, seconds those of one attention call.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MATMULS = {"forward": 2, "backward": 5}  # of width d, for each pair that is seen; 2 flops a term
STATE = 4  # bytes of a number of a state, and of a gradient that travels


@dataclass(frozen=True)
class Cluster:
    """Ranks with `flops` a second each, `bandwidth` bytes a second out of each, `latency` seconds a message.

    inside: bandwidth between the 8 ranks of a host, where that is another. memory: bytes a rank.
    """

    name: str
    ranks: int
    flops: float
    bandwidth: float
    latency: float = 10e-6
    inside: float | None = None
    memory: float = 80e9


@dataclass(frozen=True)
class Call:
    """n tokens that attend to each other: all to all, or causal, to the last `window` keys (None: to all before)."""

    n: int
    heads: int = 32
    key_heads: int = 32
    width: int = 128
    batch: int = 1
    size: int = 2  # bytes of a number
    causal: bool = True
    window: int | None = None

    def flops(self, pairs: Tensor | float, direction: str) -> Tensor | float:
        return 2 * MATMULS[direction] * self.batch * self.heads * self.width * pairs

    def bytes(self, heads: float, tokens: float) -> float:
        """Of a tensor with so many heads and tokens."""
        return self.batch * heads * tokens * self.width * self.size

    @property
    def bounds(self) -> tuple[float, float]:
        """A query at i sees the keys at j with least <= i - j <= most."""
        most = self.n if self.window is None else self.window - 1
        return (0, most) if self.causal else (-self.n, self.n)


@dataclass(frozen=True)
class Cost:
    """seconds: of the whole; compute: of the rank that computes longest; sent, held: bytes of a rank, the most."""

    name: str
    seconds: float
    compute: float
    communication: float
    sent: float
    held: float

    @property
    def hidden(self) -> float:
        """The share of the communication that computing hides."""
        exposed = max(self.seconds - self.compute, 0.0)
        return 1 - min(exposed / self.communication, 1.0) if self.communication else 1.0


def within(count: float, least: Tensor, most: Tensor) -> Tensor:
    """How many (a, b) of 0..count - 1 each have least <= a - b <= most."""

    def up_to(m: Tensor) -> Tensor:
        below, above = (count + m).clamp(0, count), (count - 1 - m).clamp(0, count)
        return torch.where(m < 0, below * (below + 1) / 2, count**2 - above * (above + 1) / 2)

    return (up_to(most) - up_to(least - 1)).clamp(min=0)


def visible_pairs(call: Call, ranks: int, layout: str) -> Tensor:
    """Pairs that queries of rank i see among keys of rank j, (ranks, ranks), each rank with n / ranks tokens.

    contiguous  rank i has i c, i c + 1, ...                       c = n / ranks
    zigzag      halves of that size: i and 2 ranks - 1 - i         (Llama 3, and zhuzilin's ring-flash-attention)
    striped     i, i + ranks, i + 2 ranks, ...                     (Striped Attention, arXiv 2311.09431)
    """
    rank, c = torch.arange(ranks, dtype=torch.float64), call.n / ranks
    first, step, count = {
        "contiguous": ([rank * c], 1, c),
        "zigzag": ([rank * c / 2, (2 * ranks - 1 - rank) * c / 2], 1, c / 2),
        "striped": ([rank], ranks, c),
    }[layout]
    least, most = call.bounds
    pairs = torch.zeros(ranks, ranks, dtype=torch.float64)
    for i in first:
        for j in first:
            ahead = j[None, :] - i[:, None]
            pairs += within(count, ((least + ahead) / step).ceil(), ((most + ahead) / step).floor())
    return pairs


def ring(cluster: Cluster, call: Call, direction: str = "forward", layout: str = "zigzag") -> Cost:
    """Keys and values visit every rank; backward, their gradients follow them from rank to rank, and then go home.

    At step s rank i has the block of rank i - s. It receives the next one while it computes, into the second of two
    buffers, which is free once the block before is computed. A block stops where no later rank sees any of it.
    Source: Liu et al. 2023 (arXiv 2310.01889).
    """
    ranks, c = cluster.ranks, call.n / cluster.ranks
    block = 2 * call.bytes(call.key_heads, c)
    gradient = block / call.size * STATE if direction == "backward" else 0.0
    flight, flight_back = (cluster.latency + x / cluster.bandwidth for x in (block, gradient))
    seconds = call.flops(visible_pairs(call, ranks, layout), direction) / cluster.flops
    rank, zero = torch.arange(ranks), torch.zeros(ranks, dtype=torch.float64)
    steps = [seconds[rank, (rank - s) % ranks] for s in range(ranks)]
    arrived = added = done = link = sent = zero  # times, and bytes
    held, home = torch.ones(ranks, dtype=torch.bool), 0.0
    for s, (compute, goes) in enumerate(zip(steps, goes_on(steps), strict=True)):
        before, done = done, torch.where(held, torch.maximum(done, arrived) + compute, done)
        start = torch.stack([arrived, link, before.roll(-1)]).amax(0)  # the block, the link, the receiver's buffer
        link, sent = torch.where(goes, start + flight, link), sent + goes * block
        arrived = link.roll(1)
        if gradient:
            back = held & (s > 0)  # to the next rank, or home, where this rank's own part stays
            link = torch.where(back, torch.stack([done, added, link]).amax(0) + flight_back, link)
            added, sent = link.roll(1), sent + back * gradient
            home = max(home, float((link * back).max()))
        held = goes.roll(1)
    communication = float(sent.max()) / cluster.bandwidth + (ranks - 1) * cluster.latency
    memory = call.bytes(2 * call.heads + 2 * call.key_heads, c) + 2 * (block + gradient)
    end = max(float(done.max()), home)
    return Cost(f"ring {layout}", end, float(seconds.sum(1).max()), communication, float(sent.max()), memory)


def goes_on(steps: list[Tensor]) -> list[Tensor]:
    """For each step, whether a rank that comes later computes with the block that rank i has then."""
    goes = [torch.zeros_like(steps[0], dtype=torch.bool)]
    for seconds in reversed(steps[1:]):
        goes.append(((seconds > 0) | goes[-1]).roll(-1))
    return goes[::-1]


def ulysses(cluster: Cluster, call: Call, direction: str = "forward") -> Cost | None:
    """All tokens of some heads: q, k, v before and the output behind (backward: the same the other way), not hidden.

    Source: Jacobs et al. 2023 (arXiv 2309.14509). None where there are fewer heads than ranks.
    """
    ranks = cluster.ranks
    if call.heads < ranks:
        return None
    key_heads = max(call.key_heads, ranks)  # a key head that several ranks read is sent to each
    sent = call.bytes(2 * call.heads + 2 * key_heads, call.n / ranks) * (ranks - 1) / ranks
    pairs = float(visible_pairs(call, ranks, "contiguous").sum())
    compute = call.flops(pairs, direction) / ranks / cluster.flops * uneven(call.heads, ranks)
    communication = sent / cluster.bandwidth + 2 * (ranks - 1) * cluster.latency
    held = 2 * call.bytes(2 * call.heads + 2 * key_heads, call.n / ranks)
    return Cost("ulysses", compute + communication, compute, communication, sent, held)


def uneven(heads: int, ranks: int) -> float:
    """The largest share of the heads over an equal one."""
    return -(heads // -ranks) * ranks / heads


def usp(cluster: Cluster, call: Call, direction: str = "forward") -> Cost | None:
    """Ulysses over the ranks of each host, ring over the hosts. Source: Fang and Zhao 2024 (arXiv 2405.07719)."""
    across = 8
    if cluster.ranks % across or cluster.ranks == across or call.heads % across:
        return None
    rings, bandwidth = cluster.ranks // across, cluster.bandwidth if cluster.inside is None else cluster.inside
    host = replace(cluster, ranks=across, bandwidth=bandwidth)
    inner = ulysses(host, replace(call, n=call.n // rings), direction)
    key_heads = max(call.key_heads, across) // across
    some = replace(call, heads=call.heads // across, key_heads=key_heads)
    outer = ring(replace(cluster, ranks=rings), some, direction)
    assert inner is not None
    exchange = inner.communication
    return Cost(
        f"usp {across} x {rings}",
        outer.seconds + exchange,
        outer.compute,
        outer.communication + exchange,
        outer.sent + inner.sent,
        outer.held + inner.held / 2,
    )


def tree_decode(cluster: Cluster, call: Call, gathered: bool) -> Cost:
    """One query over a cache of n keys in parts: states (m, l, o) are gathered by each rank, or reduced along a tree.

    Source: Shyam et al. 2024 (arXiv 2408.04093), which reduces.
    """
    ranks, state = cluster.ranks, call.batch * call.heads * (call.width + 2) * STATE
    compute = call.flops(call.n / ranks, "forward") / cluster.flops
    rounds = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    sent = (ranks - 1) * state if gathered else 2 * state * (ranks - 1) / ranks
    communication = sent / cluster.bandwidth + (rounds if gathered else 4 * rounds) * cluster.latency
    held = 2 * call.bytes(call.key_heads, call.n / ranks) + state * (ranks if gathered else 2)
    name = "states gathered" if gathered else "states reduced"
    return Cost(name, compute + communication, compute, communication, sent, held)


# What the papers say of their machines: flops and bytes a second, half precision.
CLUSTERS = (
    Cluster("A100, NVLink", 8, 312e12, 300e9),
    Cluster("A100, InfiniBand", 64, 312e12, 12.5e9, inside=300e9),
    Cluster("TPU v4", 1024, 275e12, 268e9, memory=32e9),
)


def smallest_block(cluster: Cluster, call: Call) -> float:
    """Tokens a rank from which a full ring is hidden: computing a block, 4 h d c^2 flops, lasts as long as its flight.

    F / B in half precision with as many key heads as heads, as in section 3 of the paper; grouped heads need fewer.
    """
    per_token_sent = 2 * call.bytes(call.key_heads, 1)
    flops_per_pair = float(call.flops(1.0, "forward"))
    return per_token_sent / cluster.bandwidth / (flops_per_pair / cluster.flops)


def fastest(cluster: Cluster, call: Call, direction: str = "forward") -> str:
    """The way that takes the fewest seconds, by name."""
    ways = (ring(cluster, call, direction), ulysses(cluster, call, direction), usp(cluster, call, direction))
    return min((cost for cost in ways if cost is not None), key=lambda cost: cost.seconds).name


def table(cluster: Cluster, call: Call) -> None:
    print(f"\n{cluster.name}: {cluster.ranks} ranks, {call}")
    print(f"{'':24}{'':10}{'seconds':>10}{'compute':>10}{'hidden':>8}{'sent, GB':>10}{'held, GB':>10}")
    for direction in MATMULS:
        costs = [ring(cluster, call, direction, layout) for layout in ("contiguous", "zigzag", "striped")]
        costs += [cost for way in (ulysses, usp) if (cost := way(cluster, call, direction)) is not None]
        for cost in costs:
            numbers = f"{cost.seconds:10.4g}{cost.compute:10.4g}{cost.hidden:8.0%}{cost.sent / 1e9:10.4g}"
            room = "" if cost.held <= cluster.memory else "  more than a rank has"
            print(f"{cost.name:24}{direction:10}{numbers}{cost.held / 1e9:10.4g}{room}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="one cluster of your own, with --bandwidth and --flops")
    parser.add_argument("--bandwidth", type=float, help="bytes a second that a rank sends")
    parser.add_argument("--latency", type=float, default=10e-6, help="seconds a message")
    parser.add_argument("--flops", type=float, help="a second and rank, as measured on attention")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 17, 1 << 20, 10**8])
    for name in ("heads", "key_heads", "width", "batch", "size", "window"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Call, name))
    args = parser.parse_args()
    own = args.ranks is not None
    clusters = (Cluster("yours", args.ranks, args.flops, args.bandwidth, args.latency),) if own else CLUSTERS
    for cluster in clusters:
        for n in args.tokens:
            call = Call(n, args.heads, args.key_heads, args.width, args.batch, args.size, window=args.window)
            table(cluster, call)
        print(
            f"\na full ring is hidden from {smallest_block(cluster, call):,.0f} tokens a rank on; the fastest forward:"
        )
        for n in (1 << power for power in range(12, 28, 3)):
            print(f"{n:12,} tokens  {fastest(cluster, replace(call, n=n))}")
        for cost in (tree_decode(cluster, call, gathered) for gathered in (True, False)):
            print(
                f"a query over {call.n:,} keys, {cost.name}: {cost.seconds * 1e6:,.0f} us, sent {cost.sent:,.0f} bytes"
            )


if __name__ == "__main__":
    main()
