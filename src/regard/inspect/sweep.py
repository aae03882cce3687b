"""The sweep: every visible tile of a problem once, with the log-sum-exp known, shown to each fact's tally."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.backends.tiling import Size, strips
from regard.inspect.facts import Fact, Patch
from regard.problem import Problem

T = TypeVar("T")


class Seen:
    """The answers of one look: `seen[Entropy()]` is the entropy; `seen.lse` the log-sum-exp (*batch, h, nq)."""

    def __init__(self, lse: Tensor, answers: dict[Fact[Any], Any]) -> None:
        self.lse, self._answers = lse, answers

    def __getitem__(self, fact: Fact[T]) -> T:
        if fact not in self._answers:
            raise KeyError(f"{fact!r} was not asked for; this look has {', '.join(map(repr, self._answers))}.")
        return self._answers[fact]

    def headless(self, axis: int) -> Seen:
        """The same without the head axis, which the caller does not have."""
        answers = {
            fact: answer.squeeze(axis)
            if isinstance(answer, Tensor)
            else type(answer)(*(t.squeeze(axis) for t in answer))
            for fact, answer in self._answers.items()
        }
        return Seen(self.lse.squeeze(axis), answers)

    def __repr__(self) -> str:
        return f"Seen({', '.join(map(repr, self._answers))})"


@torch.no_grad()
def sweep(problem: Problem, lse: Tensor, facts: tuple[Fact[Any], ...]) -> Seen:
    """The facts of a problem whose lse (*batch, h, nq), a sink included, is known; memory: theirs and one tile."""
    tallies = {fact: fact.tally(problem) for fact in facts}
    shift = lse.masked_fill(lse == -torch.inf, 0)
    for strip in strips(problem, Size()):
        for cols, _ in strip.tiles:
            at = problem.frame.region(strip.rows, cols)
            scores = problem.region_tile(at).masked
            log_p = scores - shift[..., strip.rows, None]
            patch = Patch(strip.rows, cols, scores, log_p, log_p.exp())
            for tally in tallies.values():
                tally.add(patch)
    return Seen(lse, {fact: tally.finish() for fact, tally in tallies.items()})
