"""Weights and scores written out, one number a pair, for all queries or some: computed a strip of rows at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.backends.streaming.backward import ScoreGradients
from regard.call.of_pairs import check_of_pairs
from regard.call.problem import Problem, Tile
from regard.core.cotangents import has_tangent, linear_in
from regard.core.dtypes import exact
from regard.core.positions import Positions
from regard.core.shapes import blocks
from regard.core.state import RowStats, State
from regard.core.tracing import data_unavailable, finite
from regard.masks.algebra import Mask
from regard.runtime.autograd import differentiable_gradients
from regard.runtime.binding import BoundCall
from regard.scores.algebra import Score

BUDGET = 1 << 20  # numbers of a strip, with what a wide similarity (Additive) holds for each pair


class PairValue(ABC):
    """One number for each pair of a query and a key, from the scores of the query's row, and its derivative."""

    @abstractmethod
    def dtype(self, problem: Problem) -> torch.dtype:
        """The dtype of the answer."""

    @abstractmethod
    def values(self, problem: Problem, tile: Tile) -> Tensor:
        """The numbers (*batch, h, r, nk) of whole rows, by operations that autograd sees."""

    @abstractmethod
    def write(self, problem: Problem, tile: Tile, to: Tensor) -> None:
        """The same numbers, written into `to` (*batch, h, r, nk) of any dtype; autograd sees nothing."""

    @abstractmethod
    def pull(self, problem: Problem, tile: Tile, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradients of the rows' scores and of the sink (*batch, h), from the cotangent g; both 0 where hidden."""


class Weights(PairValue):
    """p_ij, the softmax of a row's scores: dS = P ∘ (dP - rowsum(P ∘ dP)); in the dtype of the call."""

    def dtype(self, problem: Problem) -> torch.dtype:
        return problem.dtype

    def values(self, problem: Problem, tile: Tile) -> Tensor:
        return _row_stats(problem, tile).weights(tile.masked)

    def write(self, problem: Problem, tile: Tile, to: Tensor) -> None:
        p = to if to.dtype == problem.accumulate else torch.empty_like(to, dtype=problem.accumulate)
        _softmax(problem, tile, p)
        if p is not to:
            to.copy_(p)

    def pull(self, problem: Problem, tile: Tile, g: Tensor) -> tuple[Tensor, Tensor | None]:
        p = torch.empty_like(g)
        stats = _softmax(problem, tile, p)
        total = (g_s := p * g).sum(-1)
        if finite(total):  # so is g, also where hidden, for 0 · NaN is NaN; p is 0 there
            torch.sub(g, total[..., None], out=g_s).mul_(p)
        else:
            hidden = tile.masked == -torch.inf
            g = g.masked_fill(hidden, 0)
            total = (p * g).sum(-1)
            g_s = (p * (g - total[..., None])).masked_fill(hidden, 0)
        return g_s, None if problem.sink is None else -(stats.sink_weights(problem.sink) * total).sum(-1)


class Scores(PairValue):
    """s_ij, -inf where hidden: dS = dS where it is not; in the dtype that sums are kept in."""

    def dtype(self, problem: Problem) -> torch.dtype:
        return problem.accumulate

    def values(self, problem: Problem, tile: Tile) -> Tensor:
        s = tile.masked
        return s.masked_fill(s == -torch.inf, -torch.inf)  # a constant, by whatever it is hidden: no gradient passes

    def write(self, problem: Problem, tile: Tile, to: Tensor) -> None:
        to.copy_(tile.masked)

    def pull(self, problem: Problem, tile: Tile, g: Tensor) -> tuple[Tensor, Tensor | None]:
        nothing_hidden = tile.visible is None and finite(tile.scores)
        return g if nothing_hidden else g.masked_fill(tile.masked == -torch.inf, 0), None


def of_call(
    value: PairValue,
    q: Any,
    k: Any,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Tensor | float | None,
    rows: Any,
) -> Any:
    """The numbers of a call with these arguments, in the kind of array that q is; `rows` may be negative."""
    keys = arrays.tensor(k, "k")
    no_values = keys[..., :0] if keys.dim() else keys
    call = BoundCall(q, k, no_values, score, mask, positions, sink, None, like=q)
    frame = call.problem.frame
    with call.precision():
        chosen = None
        if rows is not None:
            chosen = arrays.existing(arrays.indices(rows, "rows"), frame.nq, "rows", "queries").to(frame.device)
        return call.answer(call.layout.restore(written_out(value, call.problem, chosen), 2))


def written_out(value: PairValue, problem: Problem, rows: Tensor | None) -> Tensor:
    """The numbers of the queries `rows` (r,), or of all: (*batch, h, r, nk) in value.dtype, differentiable.

    Memory is that of the answer and one strip. Backward computes each strip's scores again.
    """
    tensors = problem.tensors()
    # rows that are chosen may each be a strip of one row
    check_of_pairs(problem, _strip_size(problem) if rows is None else 1, max(problem.frame.nk, 1))
    if data_unavailable(*tensors) or has_tangent(*tensors):
        return _recorded(value, problem, rows)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _WrittenOut.apply(value, problem, rows, *tensors)
    return _filled(value, problem, rows)


@torch.no_grad()
def _filled(value: PairValue, problem: Problem, rows: Tensor | None) -> Tensor:
    frame = problem.frame
    count = frame.nq if rows is None else len(rows)
    # before any work: an answer that does not fit is found out at once
    answer = problem.q.new_empty((*frame.batch, frame.heads, count, frame.nk), dtype=value.dtype(problem))
    for to, of in _strips(problem, rows):
        value.write(problem, _constant(problem.region_tile(frame.region(of))), answer[..., to, :])
    return answer


def _recorded(value: PairValue, problem: Problem, rows: Tensor | None) -> Tensor:
    """The same by operations that autograd, forward mode and torch.func can all see."""
    frame, size = problem.frame, _strip_size(problem)
    chosen = torch.arange(frame.nq, device=frame.device, dtype=torch.int64) if rows is None else rows
    tiles = (problem.region_tile(frame.region(chosen[part])) for part in blocks(len(chosen), size))
    strips = [value.values(problem, tile) for tile in tiles]
    empty = problem.q.new_empty((*frame.batch, frame.heads, 0, frame.nk), dtype=problem.accumulate)
    return torch.cat(strips or [empty], -2).to(value.dtype(problem))


def _row_stats(problem: Problem, tile: Tile) -> RowStats:
    """The statistics of rows all of whose keys are in the tile."""
    nothing = tile.scores.new_empty((*tile.scores.shape[:-2], tile.scores.shape[-1], 0))
    return problem.joined(State.of(tile.scores, nothing, tile.visible)).stats


def _constant(tile: Tile) -> Tile:
    """The tile without its graph, and without a mask that hides nothing in it."""
    hides = tile.visible is not None and not bool(tile.visible.all())
    return Tile(tile.scores.detach(), tile.visible if hides else None)


def _softmax(problem: Problem, tile: Tile, p: Tensor) -> RowStats:
    """Writes the weights of whole rows into p (*batch, h, r, nk); returns the statistics of the rows."""
    s = tile.scores.expand(p.shape)
    if tile.visible is not None:
        # a sum is cheaper than masked_fill; a hidden NaN stays NaN, which of_rows refuses
        s = torch.add(s, s.new_zeros(tile.visible.shape).masked_fill_(~tile.visible, -torch.inf), out=p)
    stats = RowStats.of_rows(s, p, None if problem.sink is None else problem.sink.detach().to(s.dtype))
    if stats is None:
        stats = _row_stats(problem, tile)
        p.copy_(stats.weights(tile.masked))
    return stats


def _strip_size(problem: Problem) -> int:
    return max(1, BUDGET // max(problem.frame.nk * problem.lanes, 1))


def _strips(problem: Problem, rows: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Pairs of slices, of the answer and of the queries: runs of consecutive rows, cut to the size of a strip."""
    size = _strip_size(problem)
    if rows is None:
        yield from ((part, part) for part in blocks(problem.frame.nq, size))
        return
    chosen, first = rows.tolist(), 0
    for n in range(1, len(chosen) + 1):
        if n == len(chosen) or chosen[n] != chosen[n - 1] + 1 or n - first == size:
            yield slice(first, n), slice(chosen[first], chosen[n - 1] + 1)
            first = n


class _WrittenOut(torch.autograd.Function):
    """The numbers, with a backward that holds one strip of scores."""

    @staticmethod
    def forward(ctx: Any, value: PairValue, problem: Problem, rows: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.value, ctx.problem, ctx.rows = value, problem.without_tensors(), rows
        ctx.save_for_backward(*tensors)
        return _filled(value, problem, rows)

    @staticmethod  # torch's stub has *args here, but calls it with one cotangent a result
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        value, rows, needs = ctx.value, ctx.rows, tuple(ctx.needs_input_grad[3:])
        problem = ctx.problem.with_tensors(ctx.saved_tensors)

        def gradients(cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
            (g,) = cotangents
            if torch.is_grad_enabled():  # create_graph: the gradient itself will be differentiated
                return differentiable_gradients(lambda p: [(_recorded(value, p, rows), g)], problem, needs)
            return _backward(value, problem, rows, g, needs)

        with exact(g.device.type):
            return (None, None, None, *linear_in((g,), gradients))


def _backward(
    value: PairValue, problem: Problem, rows: Tensor | None, g: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    sums = ScoreGradients(problem, needs)
    g_sink = problem.q.new_zeros(problem.q.shape[:-2], dtype=problem.accumulate)
    for to, of in _strips(problem, rows):
        evaluated = sums.evaluate(problem.frame.region(of), False)
        g_s, g_strip = value.pull(problem, _constant(evaluated.tile), g[..., to, :].to(problem.accumulate))
        if g_strip is not None:
            g_sink += g_strip
        if evaluated.tile.scores.requires_grad:
            sums.add_scores(evaluated, g_s)
    return sums.gradients(lambda _: g_sink)
