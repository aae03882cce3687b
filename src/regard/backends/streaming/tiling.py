"""The stream over tiles that backends share: which tiles, of what size, and their States merged row block by row block.

Made of operations that autograd, forward mode and torch.func can all see; memory is linear when nothing records them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from regard.backends.streaming.softmax import softmax_rows
from regard.call.problem import Problem
from regard.core.region import Region
from regard.core.shapes import repeat_heads
from regard.core.state import RowStats, State
from regard.core.tracing import data_unavailable, fixed, symbolic
from regard.masks.algebra import Cover, Everything

# Pairs × heads × batch × footprint held at once: 4 MB in float32, which stays in the last cache and hides Python's own
# time. A GPU needs 64 MB to hide it: each operation takes Python as long as the GPU takes for some 20 MB.
BUDGET, BUDGET_OF_GPU = 1 << 20, 1 << 24
LEAST, MOST, MOST_OF_GPU = 16, 1024, 1 << 13


@dataclass(frozen=True)
class Size:
    """A tile's rows and keys; None chooses by the budget."""

    rows: int | None = None
    keys: int | None = None

    def settled(self, problem: Problem) -> tuple[int, int]:
        lanes = max(problem.lanes, 1)
        if symbolic(lanes):  # a dynamic batch: no number is known
            lanes = 1
        lanes = fixed(lanes)
        on_gpu = problem.frame.device.type == "cuda"
        budget, most = (BUDGET_OF_GPU, MOST_OF_GPU) if on_gpu else (BUDGET, MOST)
        side = max(LEAST, min(most, math.isqrt(budget // lanes)))
        r = self.rows or max(1, min(side, problem.frame.nq))
        # few rows (decoding) leave room for long strips of keys
        return r, self.keys or max(side, min(most * 8, budget // (lanes * r)))


@dataclass(frozen=True)
class Strip:
    """A block of rows with its visible blocks of keys, and whether the mask hides nothing there."""

    rows: slice
    tiles: tuple[tuple[slice, bool], ...]


def strips(problem: Problem, size: Size) -> Iterator[Strip]:
    """Every block of rows; tiles that no row of any batch element or head may see are left out.

    Where the lengths are symbolic (a graph for all of them) there is one tile, since a graph has no loop over tiles.
    """
    nq, nk = problem.frame.nq, problem.frame.nk
    if symbolic(nq, nk):
        yield Strip(slice(None), ((slice(None), type(problem.mask) is Everything),))
        return
    tiling = problem.frame.tiling(*size.settled(problem))
    for rows, covers in zip(tiling.row_blocks, _covers(problem, *size.settled(problem)), strict=True):
        seen = zip(tiling.col_blocks, covers, strict=True)
        yield Strip(rows, tuple((cols, cover == Cover.ALL) for cols, cover in seen if cover != Cover.NONE))


def tiles(problem: Problem, size: Size) -> Iterator[tuple[Region, bool]]:
    """Every tile that some row may see, and whether the mask hides nothing there."""
    for strip in strips(problem, size):
        for cols, everything in strip.tiles:
            yield problem.frame.region(strip.rows, cols), everything


def stream(problem: Problem, size: Size, quick: bool = False) -> tuple[torch.Tensor, RowStats]:
    """out and the row statistics of a problem. `quick`: by cheaper ways, where there are some, that record nothing."""
    done = [_strip(problem, strip, quick) for strip in strips(problem, size)] or [_finished(_empty(problem, 0))]
    out = torch.cat([out for out, _ in done], -2)
    m, l = (torch.cat(parts, -1) for parts in ([stats.m for _, stats in done], [stats.l for _, stats in done]))
    return out, RowStats(m, l)


def _strip(problem: Problem, strip: Strip, quick: bool) -> tuple[torch.Tensor, RowStats]:
    if len(strip.tiles) == 1 and not quick:
        ((cols, everything),) = strip.tiles
        return softmax_rows(problem, problem.frame.region(strip.rows, cols), everything)
    return _finished(problem.joined(_merged(problem, strip, quick)))


def _finished(state: State) -> tuple[torch.Tensor, RowStats]:
    return state.finish()[0], RowStats(state.m, state.l)


def _merged(problem: Problem, strip: Strip, quick: bool) -> State:
    state = _empty(problem, problem.q[..., strip.rows, :].shape[-2])
    for cols, everything in strip.tiles:
        at = problem.frame.region(strip.rows, cols)
        q, k, v = problem.q[..., strip.rows, :], problem.k[..., cols, :], problem.v[..., cols, :]
        local = problem.score.local(at)
        found = problem.quick(at, q, k, local) if quick else None
        tile = problem.tile(at, q, k, local, everything, None if found is None else found[0])
        v = repeat_heads(v.to(problem.accumulate), problem.frame.heads)
        state = state | State.of(tile.scores, v, tile.visible, problem.keep(at))
    return state


def _empty(problem: Problem, rows: int) -> State:
    shape = (*problem.q.shape[:-2], rows)
    return State.empty(shape, problem.dv, dtype=problem.accumulate, device=problem.v.device)


def _covers(problem: Problem, r: int, c: int) -> list[list[int]]:
    """A Cover for each tile, of all batch elements and heads together."""
    tiling = problem.frame.tiling(r, c)
    unlooked = Cover.ALL if type(problem.mask) is Everything else Cover.SOME
    if unlooked == Cover.ALL or data_unavailable(*problem.tensors()) or 0 in tiling.shape:
        return [[unlooked] * tiling.shape[1] for _ in range(tiling.shape[0])]
    cover = problem.mask.cover(tiling)
    cover = cover.expand(*cover.shape[:-2], *tiling.shape).reshape(-1, *tiling.shape)
    if cover.shape[0] == 0:
        return [[Cover.NONE] * tiling.shape[1] for _ in range(tiling.shape[0])]
    least, most = cover.amin(0), cover.amax(0)
    return torch.where(least == most, least, Cover.SOME).tolist()
