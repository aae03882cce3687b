"""Reference: the definition of correct. Dense and obvious; memory grows with nq × nk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from regard.backends.base import Backend, Result
from regard.problem import Problem
from regard.shapes import repeat_heads
from regard.state import State, weigh


@dataclass(frozen=True)
class Reference(Backend):
    """softmax(masked scores) V, written out: the dense definition that every other backend is compared with.

    Runs everything, on any device, at the cost of nq × nk memory (for Additive nq × nk × h).

    >>> import regard as rg
    >>> x = torch.ones(2, 3)
    >>> rg.attention(x, x, x, backend=Reference()).shape
    torch.Size([2, 3])
    """

    recorded: ClassVar[bool] = True

    def forward(self, problem: Problem) -> Result:
        at = problem.frame.region()
        tile = problem.region_tile(at)
        s, v = tile.masked, repeat_heads(problem.v.to(problem.accumulate), problem.frame.heads)
        empty = (s == -torch.inf).all(-1)  # by a mask, or by a bias of -inf
        s = s.masked_fill(empty[..., None], 0)
        lse = torch.logsumexp(s, -1) if s.shape[-1] else s.sum(-1)
        p, keep = torch.exp(s - lse[..., None]).masked_fill(empty[..., None], 0), problem.keep(at)
        out = weigh(p if keep is None else p * keep, v, tile.visible)
        out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
        return (out, lse) if problem.sink is None else problem.joined(State.of_lse(out, lse)).finish()

    def differentiable(self, problem: Problem) -> Result:
        return self.forward(problem)

    def plan(self, problem: Problem) -> dict[str, str]:
        frame, size = problem.frame, problem.accumulate.itemsize
        return {"memory": f"{frame.nq * frame.nk * problem.lanes * size:,} bytes for the dense scores"}
