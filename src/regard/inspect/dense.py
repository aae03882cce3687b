"""The definition of every fact's answer: all scores and weights written out. What the sweep is measured by."""

from __future__ import annotations

from typing import Any

import torch

from regard.call.problem import Problem
from regard.core.state import State
from regard.inspect.facts.algebra import Fact
from regard.inspect.results import FactResults


@torch.no_grad()
def dense(problem: Problem, facts: tuple[Fact[Any], ...]) -> FactResults:
    """The same as `sweep`, by each fact's `dense`, in the accumulation dtype; memory grows with nq × nk.

    For the definition in float64, build_problem the problem on float64 tensors.

    >>> import regard as rg
    >>> from regard.testing import draw, frame
    >>> seen = dense(draw(frame(), mask=rg.Causal()).problem, (rg.facts.Received(),))
    >>> seen[rg.facts.Received()].shape
    torch.Size([5, 6, 17])
    """
    tile = problem.region_tile(problem.frame.region())
    scores, values = tile.masked, tile.scores.new_zeros((*tile.scores.shape[:-2], problem.frame.nk, problem.dv))
    stats = problem.joined(State.of(tile.scores, values, tile.visible)).stats
    p = stats.weights(scores)
    return FactResults(stats.lse, {fact: fact.dense(problem, scores, p) for fact in facts}, problem.key_heads)
