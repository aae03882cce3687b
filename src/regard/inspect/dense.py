"""The definition of every fact's answer: all scores and weights written out. What the sweep is measured by."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from regard.inspect.facts.algebra import Fact
from regard.inspect.seen import Seen
from regard.problem import Problem


@torch.no_grad()
def dense(problem: Problem, facts: tuple[Fact[Any], ...]) -> Seen:
    """The same as `sweep`, by each fact's `dense`, in the accumulation dtype; memory grows with nq × nk.

    For the definition in float64, pose the problem on float64 tensors.

    >>> import regard as rg
    >>> from regard.testing import draw, frame
    >>> seen = dense(draw(frame(), mask=rg.Causal()).problem, (rg.facts.Received(),))
    >>> seen[rg.facts.Received()].shape
    torch.Size([5, 6, 17])
    """
    scores = problem.region_tile(problem.frame.region()).masked
    lse = torch.logsumexp(pad(scores, (1, 0), value=-torch.inf), -1)  # a hidden key more, where there are none
    lse = lse if problem.sink is None else torch.logaddexp(lse, problem.sink[..., None])
    p = torch.exp(scores - lse[..., None]).masked_fill(scores == -torch.inf, 0)
    return Seen(lse, {fact: fact.dense(problem, scores, p) for fact in facts}, problem.key_heads)
