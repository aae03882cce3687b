"""Decoding: as many calls as a case has queries, one after the other, each with one key more than the last."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.candidates import Way
from benchmarks.inputs import Inputs, draw

Step = Callable[[int], Tensor]  # of its number: the output of one query, (batch, heads, 1, dv)
Begin = Callable[[], object]  # brings the cache back to the keys before the first step
RUNS = 9  # whose median is the overhead


def steps(name: str, x: Inputs, make: Callable[[Inputs], tuple[Begin, Step]], forget: Begin = tuple) -> Way:
    """All steps of the case. make: a way to begin, and a step. forget: what the library keeps of lengths it has seen.

    A run must not gain from the lengths of the run before, which a user who generates never meets again: `forget` is
    called before it. One untimed step then brings back what serves every length.
    """
    begin, step = make(x)

    def before() -> None:
        begin()
        forget()
        step(0)
        begin()

    def run() -> list[Tensor]:
        return [step(s) for s in range(x.case.steps)]

    def parts() -> dict[str, float]:
        small = steps(name, draw(x.case.tiny), make, forget)
        return {"overhead": _seconds(small)}

    return Way(name, run, lambda outs: [torch.cat(outs, dim=-2)], x.case.steps, before, parts)


def _seconds(way: Way) -> float:
    """Of a call."""
    turns: list[float] = []
    for _ in range(RUNS):
        way.before()
        start = time.perf_counter()
        way.run()
        turns.append((time.perf_counter() - start) / way.calls)
    return statistics.median(turns)


def keys(x: Inputs, step: int) -> int:
    """How many keys a step sees, its own included."""
    return x.case.past + step + 1


def query(x: Inputs, step: int) -> Tensor:
    """(batch, heads, 1, d)."""
    return x.q[:, :, step : step + 1]
