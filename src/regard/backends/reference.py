"""Reference: the definition of correct. Dense and obvious; memory grows with nq × nk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from regard.backends.base import Backend, Differentiable, Result
from regard.backends.streaming.softmax import softmax_rows
from regard.call.problem import Problem


@dataclass(frozen=True)
class Reference(Backend):
    """softmax(masked scores) V, written out: the dense definition that every other backend is compared with.

    Runs every call on any device, with nq × nk memory (for Additive nq × nk × h).

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
        return softmax_rows(problem, problem.frame.region())

    def details(self, problem: Problem) -> dict[str, str]:
        frame, size = problem.frame, problem.accumulate.itemsize
        return {"memory": f"{frame.nq * frame.nk * problem.lanes * size:,} bytes for the dense scores"}
