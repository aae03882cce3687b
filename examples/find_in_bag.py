"""Gated attention pooling over bags of 100,000 instances: a label a bag, and the weights find the few that decide.

    python examples/find_in_bag.py

A bag is positive if it holds a handful of instances of a rare kind; nobody says which. Pooling with learned weights
learns from the labels of bags alone, in memory linear in the bag, and its weights point at the instances, as a
pathologist's slide of 100,000 patches asks for. Under two minutes on two cores; deterministic by seed.
Source: Ilse, Tomczak and Welling 2018 (arXiv 1802.04712).
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import regard as rg

WIDTH, RARE = 32, 0.002  # of an instance; the share of a positive bag that decides


class Bags:
    """Instances are normal around 0; those that decide are moved along one hidden direction."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.random = size, torch.Generator().manual_seed(seed)
        hidden = torch.Generator().manual_seed(99)
        self.away = 4 * nn.functional.normalize(torch.randn(WIDTH, generator=hidden), dim=0)

    def draw(self, positive: bool) -> tuple[Tensor, Tensor]:
        """Instances (n, WIDTH), and which of them decide (n,)."""
        bag = torch.randn(self.size, WIDTH, generator=self.random)
        decides = torch.zeros(self.size, dtype=torch.bool)
        if positive:
            decides[torch.randperm(self.size, generator=self.random)[: max(1, round(RARE * self.size))]] = True
        return bag + decides[:, None] * self.away, decides


class Judge(nn.Module):
    """The bag's summary, and a line through it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.verdict = rg.nn.GatedAttentionPooling(WIDTH, hidden=64), nn.Linear(WIDTH, 1)

    def forward(self, bag: Tensor) -> Tensor:
        return self.verdict(self.pool(bag))[..., 0]


def train(size: int, steps: int, seed: int = 0) -> Judge:
    torch.manual_seed(seed)
    bags, model = Bags(size, seed), Judge()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    began = time.perf_counter()
    for step in range(steps):
        positive = step % 2 == 0
        loss = binary_cross_entropy_with_logits(model(bags.draw(positive)[0]), torch.tensor(float(positive)))
        loss.backward()
        if step % 4 == 3:  # four bags a step
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 99:
            print(f"bag {step + 1:4}  loss {loss.item():.4f}  {time.perf_counter() - began:.0f} s")
    return model.eval()


@torch.no_grad()
def judge(model: Judge, size: int, count: int = 20) -> tuple[float, float]:
    """The share of new bags that are judged rightly, and of the most weighted instances that do decide."""
    bags, right, found, asked = Bags(size, 7), 0, 0, 0
    for n in range(count):
        positive = n % 2 == 0
        bag, decides = bags.draw(positive)
        right += (model(bag) > 0).item() == positive
        if positive:
            top = model.pool.weights(bag).topk(int(decides.sum())).indices
            found, asked = found + int(decides[top].sum()), asked + len(top)
    return right / count, found / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=100_000, help="instances a bag (default %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="bags to learn from (default %(default)s)")
    given = parser.parse_args()
    model = train(given.size, given.steps)
    right, found = judge(model, given.size)
    print(f"right: {right:.0%} of 20 new bags of {given.size:,} instances")
    print(f"of the most weighted instances of positive bags, {found:.0%} are those that decide (by chance {RARE:.1%})")


if __name__ == "__main__":
    main()
