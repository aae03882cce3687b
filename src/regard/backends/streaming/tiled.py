"""Tiled: streaming PyTorch. Any score, any mask, any device, in memory linear in the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard.backends.base import Backend, ForwardResult, Result
from regard.backends.streaming.tiling import Size, stream, strips
from regard.call.of_pairs import check_of_pairs
from regard.call.problem import Problem
from regard.core.shapes import blocks


@dataclass(frozen=True)
class Tiled(Backend):
    """One tile of scores at a time, merged by State; backward recomputes each tile from the log-sum-exp.

    rows, keys: the size of a tile; None chooses one by a memory budget. The result is exact for every size. In a graph
    for every length (torch.export with dynamic shapes) there is one tile with all scores.
    Source: Dao et al. 2022 (arXiv 2205.14135).

    >>> import regard as rg
    >>> x = torch.ones(5, 3)
    >>> rg.attention(x, x, x, backend=Tiled(rows=2, keys=2)).shape
    torch.Size([5, 3])
    """

    rows: int | None = None
    keys: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("rows", self.rows), ("keys", self.keys)):
            if size is not None and size < 1:
                raise ValueError(f"Tiled({name}={size}): expected a tile of 1 or more, or None.")

    @property
    def size(self) -> Size:
        return Size(self.rows, self.keys)

    def forward(self, problem: Problem) -> Result:
        check_of_pairs(problem, *self.size.settled(problem))
        with torch.no_grad():
            out, stats = stream(problem, self.size, quick=True)
            return out, stats.lse

    def forward_for_backward(self, problem: Problem) -> ForwardResult:
        check_of_pairs(problem, *self.size.settled(problem))
        with torch.no_grad():
            out, stats = stream(problem, self.size, quick=True)
            return ForwardResult(out, (stats.m, stats.l))

    def details(self, problem: Problem) -> dict[str, str]:
        r, c = self.size.settled(problem)
        check_of_pairs(problem, r, c)
        total = len(blocks(problem.frame.nq, r)) * len(blocks(problem.frame.nk, c))
        tiles = sum(len(strip.tiles) for strip in strips(problem, self.size))
        tile = min(r, problem.frame.nq) * min(c, problem.frame.nk) * problem.lanes * problem.accumulate.itemsize
        return {
            "tiles": f"{tiles} of {total} tiles of {r} × {c} computed, {total - tiles} skipped",
            "memory": f"about {tile:,} bytes of scores at a time",
        }
