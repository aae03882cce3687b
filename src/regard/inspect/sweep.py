"""The sweep: every visible tile of a problem once, with the row statistics known, shown to each fact's tally."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.backends.tiling import Size, strips
from regard.errors import ShapeError
from regard.inspect.facts.algebra import Fact, Patch, Tally
from regard.inspect.seen import Seen
from regard.problem import Problem
from regard.region import Index, Region
from regard.shapes import blocks, finite
from regard.state import RowStats


@torch.no_grad()
def sweep(problem: Problem, stats: RowStats, facts: tuple[Fact[Any], ...]) -> Seen:
    """The facts of a problem whose row statistics, a sink included, are known; memory: theirs and one tile.

    Those that need all pairs share one pass; one that needs some rows or columns has its own, over these alone.
    Raises ShapeError or IndexError for facts that do not fit the problem.
    """
    fit(problem, facts)
    tallied = parts_of(facts)
    regions = {fact: fact.region(problem.frame) for fact in tallied}
    tallies = {fact: fact.tally(problem, stats) for fact in tallied}
    look = _Look(problem, stats)
    whole = [tally for fact, tally in tallies.items() if _is_whole(regions[fact])]
    if whole:
        _tell(whole, look.everywhere())
    for fact, tally in tallies.items():
        if not _is_whole(regions[fact]):
            _tell([tally], look.within(regions[fact]))
    answers = {fact: tally.finish() for fact, tally in tallies.items()}
    return Seen(stats.lse, join(facts, answers), problem.key_heads)


def fit(problem: Problem, facts: tuple[Fact[Any], ...]) -> None:
    """Raises ShapeError for a fact that does not fit a problem."""
    for fact in facts:
        complaint = fact.misfit(problem.frame)
        if complaint:
            raise ShapeError(complaint)


def parts_of(facts: tuple[Fact[Any], ...]) -> tuple[Fact[Any], ...]:
    """What must be found for these facts, each once."""
    return tuple(dict.fromkeys(part for fact in facts for part in fact.parts()))


def join(facts: tuple[Fact[Any], ...], answers: dict[Fact[Any], Any]) -> dict[Fact[Any], Any]:
    """The answers to facts from those to their parts."""
    return {fact: fact.join(*(answers[part] for part in fact.parts())) for fact in facts}


def _tell(tallies: list[Tally[Any]], patches: Iterator[Patch]) -> None:
    for patch in patches:
        for tally in tallies:
            tally.add(patch)


def _is_whole(at: Region) -> bool:
    return all(isinstance(index, slice) and index == slice(None) for index in (at.rows, at.cols))


class _Look:
    """The tiles of one problem, as patches."""

    def __init__(self, problem: Problem, stats: RowStats) -> None:
        self.problem, self.stats = problem, stats
        self.clean = finite(stats.l)

    def everywhere(self) -> Iterator[Patch]:
        """Each tile with a visible pair once."""
        for strip in strips(self.problem, Size()):
            for cols, everything in strip.tiles:
                yield self._patch(self.problem.frame.region(strip.rows, cols), strip.rows, cols, everything)

    def within(self, at: Region) -> Iterator[Patch]:
        """Each tile of a region once; rows and cols of the patches count from the region's own corner."""
        frame = self.problem.frame
        rows, cols = _each(at.rows, frame.nq, frame.device), _each(at.cols, frame.nk, frame.device)
        r, c = Size().settled(self.problem)
        for row in blocks(len(rows), r):
            for col in blocks(len(cols), c):
                yield self._patch(frame.region(rows[row], cols[col]), row, col, False)

    def _patch(self, at: Region, rows: slice, cols: slice, everything: bool) -> Patch:
        scores = self.problem.quick_tile(at, everything).masked
        stats = self.stats.rows(at.rows)
        return Patch(at, rows, cols, scores, stats.log_weights(scores), stats.weights(scores), self.clean)


def _each(index: Index, n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)[index]
