"""python -m tests.fuzz: many calls, or one."""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter

import torch

from .check import run
from .draw import draw


def main() -> int:
    """Prints each finding with its seed, then a line of counts; how many calls have findings, at most 1."""
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--minutes", type=float, default=10.0)
    read.add_argument("--calls", type=int, default=10**9, help="at most so many")
    read.add_argument("--first", type=int, default=0, help="the first seed")
    read.add_argument("--seed", type=int, help="one call alone, in words")
    read.add_argument("--threads", type=int, default=1)
    given = read.parse_args()
    torch.set_num_threads(given.threads)
    # memory that nobody wrote is NaN, as in the tests
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")
    if given.seed is not None:
        print(draw(given.seed))
        outcome = run(given.seed)
        print("\n".join(outcome.findings or [f"refused: {outcome.refused}" if outcome.refused else "no finding"]))
        return bool(outcome.findings)
    counts, start, seed = Counter[str](), time.monotonic(), given.first
    while time.monotonic() - start < 60 * given.minutes and seed < given.first + given.calls:
        outcome = run(seed)
        counts["calls"] += 1
        counts["refused"] += outcome.refused is not None
        if outcome.findings:
            counts["findings"] += 1
            print(f"\nseed {seed}\n{draw(seed)}\n" + "\n".join(f"  ! {f}" for f in outcome.findings), flush=True)
        seed += 1
    spent = time.monotonic() - start
    print(f"\nseeds {given.first} to {seed - 1} in {spent:.0f} s: {dict(counts)}")
    return bool(counts["findings"])


if __name__ == "__main__":
    raise SystemExit(main())
