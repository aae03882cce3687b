"""python -m tests.fuzz: many calls, or one."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from concurrent.futures.process import BrokenProcessPool

from .check import Outcome, run
from .draw import draw
from .process import new_process, start_process
from .surroundings import draw_surroundings
from .tensors import Source


def main() -> int:
    """Prints each finding with its seed, then a line of counts; how many calls have findings, at most 1."""
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--minutes", type=float, default=10.0)
    read.add_argument("--calls", type=int, default=10**9, help="at most so many")
    read.add_argument("--first", type=int, default=0, help="the first seed")
    read.add_argument("--seed", type=int, help="one call alone, in words")
    read.add_argument("--threads", type=int, default=1)
    read.add_argument(
        "--kept",
        nargs="+",
        choices=KEPT,
        default=(),
        help="ask only about calls whose keys and values are kept so, and about these only in their surroundings",
    )
    given = read.parse_args()
    if given.seed is not None:
        start_process(given.threads)
        print(in_words(given.seed), flush=True)
        outcome = run(given.seed)
        print("\n".join(outcome.findings or [f"refused: {outcome.refused}" if outcome.refused else "no finding"]))
        return bool(outcome.findings)
    counts, start, seed = Counter[str](), time.monotonic(), given.first
    process = new_process(given.threads)
    while time.monotonic() - start < 60 * given.minutes and counts["calls"] < given.calls:
        if given.kept and kept_as(seed) not in given.kept:
            seed += 1
            continue
        try:
            outcome = process.submit(run, seed, plain=not given.kept).result()
        except BrokenProcessPool:
            outcome, process = Outcome(findings=["it ended the process"]), new_process(given.threads)
        counts["calls"] += 1
        counts["refused"] += outcome.refused is not None
        how = kept_as(seed) if outcome.refused is None else ""
        if how:
            counts[how] += 1
        if outcome.findings:
            counts["findings"] += 1
            print(f"\nseed {seed}\n{in_words(seed)}\n" + "\n".join(f"  ! {f}" for f in outcome.findings), flush=True)
        seed += 1
    spent = time.monotonic() - start
    print(f"\nseeds {given.first} to {seed - 1} in {spent:.0f} s: {dict(counts)}")
    return bool(counts["findings"])


KEPT = "int8", "pages", "int8 in pages"


def kept_as(seed: int) -> str:
    """How the keys and values of a seed's call in its surroundings are kept; empty: as plain tensors."""
    kept = draw_surroundings(Source.of(seed + 4), draw(seed))[0].kept
    if kept is None:
        return ""
    return " in ".join(name for name, there in (("int8", kept.int8), ("pages", kept.page_size is not None)) if there)


def in_words(seed: int) -> str:
    """The call of a seed, and what it becomes in its surroundings."""
    call = draw(seed)
    around, varied = draw_surroundings(Source.of(seed + 4), call)
    return f"{call}\nsurrounded by {around}, as\n{varied}"


if __name__ == "__main__":
    raise SystemExit(main())
