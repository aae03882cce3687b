"""The sweep: every visible tile of a problem once, with the row statistics known, shown to each fact's accumulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.backends.streaming.tiling import Size, strips
from regard.call.problem import Problem
from regard.core.errors import ShapeError
from regard.core.region import Index, Region
from regard.core.shapes import blocks
from regard.core.state import RowStats
from regard.core.tracing import finite
from regard.inspect.facts.algebra import Accumulator, Fact, ScoreTile
from regard.inspect.results import FactResults


@torch.no_grad()
def sweep(problem: Problem, stats: RowStats, facts: tuple[Fact[Any], ...]) -> FactResults:
    """The facts of a problem whose row statistics, a sink included, are known; memory: theirs and one tile.

    Those that need all pairs share one pass; one that needs some rows or columns has its own, over these alone.
    Raises ShapeError or IndexError for facts that do not fit the problem.
    """
    fit(problem, facts)
    parts = parts_of(facts)
    regions = {fact: fact.region(problem.frame) for fact in parts}
    accumulators = {fact: fact.accumulator(problem, stats) for fact in parts}
    look = _Look(problem, stats)
    whole = [accumulator for fact, accumulator in accumulators.items() if _is_whole(regions[fact])]
    if whole:
        _show(whole, look.everywhere())
    for fact, accumulator in accumulators.items():
        if not _is_whole(regions[fact]):
            _show([accumulator], look.within(regions[fact]))
    answers = {fact: accumulator.finish() for fact, accumulator in accumulators.items()}
    return FactResults(stats.lse, join(facts, answers), problem.key_heads)


def fit(problem: Problem, facts: tuple[Fact[Any], ...]) -> None:
    """Raises ShapeError for a fact that does not fit a problem."""
    for fact in facts:
        complaint = fact.shape_error(problem.frame)
        if complaint:
            raise ShapeError(complaint)


def parts_of(facts: tuple[Fact[Any], ...]) -> tuple[Fact[Any], ...]:
    """What must be found for these facts, each once."""
    return tuple(dict.fromkeys(part for fact in facts for part in fact.parts()))


def join(facts: tuple[Fact[Any], ...], answers: dict[Fact[Any], Any]) -> dict[Fact[Any], Any]:
    """The answers to facts from those to their parts."""
    return {fact: fact.join(*(answers[part] for part in fact.parts())) for fact in facts}


def _show(accumulators: list[Accumulator[Any]], tiles: Iterator[ScoreTile]) -> None:
    for tile in tiles:
        for accumulator in accumulators:
            accumulator.add(tile)


def _is_whole(at: Region) -> bool:
    return all(isinstance(index, slice) and index == slice(None) for index in (at.rows, at.cols))


class _Look:
    """The tiles of one problem, as tiles."""

    def __init__(self, problem: Problem, stats: RowStats) -> None:
        self.problem, self.stats = problem, stats
        self.clean = finite(stats.l)

    def everywhere(self) -> Iterator[ScoreTile]:
        """Each tile with a visible pair once."""
        for strip in strips(self.problem, Size()):
            for cols, everything in strip.tiles:
                yield self._patch(self.problem.frame.region(strip.rows, cols), strip.rows, cols, everything)

    def within(self, at: Region) -> Iterator[ScoreTile]:
        """Each tile of a region once; rows and cols of the tiles count from the region's own corner."""
        frame = self.problem.frame
        rows, cols = _each(at.rows, frame.nq, frame.device), _each(at.cols, frame.nk, frame.device)
        r, c = Size().settled(self.problem)
        for row in blocks(len(rows), r):
            for col in blocks(len(cols), c):
                yield self._patch(frame.region(rows[row], cols[col]), row, col, False)

    def _patch(self, at: Region, rows: slice, cols: slice, everything: bool) -> ScoreTile:
        scores = self.problem.quick_tile(at, everything).masked
        stats = self.stats.rows(at.rows)
        return ScoreTile(at, rows, cols, scores, stats.log_weights(scores), stats.weights(scores), self.clean)


def _each(index: Index, n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device, dtype=torch.int64)[index]
