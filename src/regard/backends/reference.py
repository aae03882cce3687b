"""Reference: the definition of correct. Dense and obvious; memory grows with nq × nk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from regard.backends.base import Backend, Differentiable, Result
from regard.core.problem import Problem
from regard.core.shapes import repeat_heads
from regard.core.state import RowStats, weigh


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
        out, stats = self.differentiable(problem)
        return out, stats.lse

    def differentiable(self, problem: Problem) -> Differentiable:
        at, frame = problem.frame.region(), problem.frame
        tile = problem.region_tile(at)
        s, v = tile.masked, repeat_heads(problem.v.to(problem.accumulate), frame.heads)
        keyless = (s == -torch.inf).all(-1)  # by a mask, or by a bias of -inf
        if problem.sink is not None:  # one key more, without a value
            s = torch.cat([s, problem.sink[..., None, None].expand(*s.shape[:-1], 1)], -1)
        hidden = s == -torch.inf
        empty = hidden.all(-1)
        s = s.masked_fill(empty[..., None], 0)
        # a hidden pair has no weight, also in a row that sees a NaN
        p = torch.softmax(s, -1).masked_fill(hidden, 0)[..., : frame.nk]
        keep = problem.keep(at)
        out = weigh(p if keep is None else p * keep, v, tile.visible)
        m = s.detach().amax(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
        l = torch.exp(s - m[..., None]).sum(-1)
        out = out.masked_fill(keyless[..., None], 0)
        return out, RowStats(m.masked_fill(empty, -torch.inf), l.masked_fill(empty, 0))

    def details(self, problem: Problem) -> dict[str, str]:
        frame, size = problem.frame, problem.accumulate.itemsize
        return {"memory": f"{frame.nq * frame.nk * problem.lanes * size:,} bytes for the dense scores"}
