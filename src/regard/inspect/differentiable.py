"""entropy and max_score with gradients, for a loss: a training run can be kept from collapsing or exploding scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.backends.streaming.backward import ScoreGradients
from regard.backends.streaming.tiled import Tiled
from regard.backends.streaming.tiling import Size, Strip, strips
from regard.call.arguments import answers_calls_of_pairs
from regard.call.of_pairs import check_of_pairs
from regard.call.problem import Problem
from regard.core.cotangents import has_tangent, linear_in
from regard.core.dtypes import exact
from regard.core.positions import Positions
from regard.core.region import Region
from regard.core.state import RowStats, State
from regard.core.tracing import data_unavailable
from regard.inspect.facts.algebra import room
from regard.inspect.facts.rows import Entropy, MaxScore
from regard.inspect.sweep import sweep
from regard.masks.algebra import Everything, Mask
from regard.runtime.autograd import differentiable_gradients
from regard.runtime.binding import BoundCall
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@answers_calls_of_pairs
def entropy(
    q: Any,
    k: Any,
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
) -> Any:
    """H_i = -Σ_j p_ij ln p_ij in nats, (*batch, h, nq), differentiable: the fact Entropy as a term of a loss.

    Arguments, axes and errors as `attention`; float32, or float64 for float64 inputs. A row that sees nothing has
    entropy 0 and gradients 0. With a sink, H sums over the keys only, whose weights sum to 1 - p_sink.
    Gradients flow to q, k, the sink and every tensor in the score:
        dH_i/ds_ij = -p_ij (ln p_ij + H_i + p_sink,i),   dH_i/dsink = p_sink,i (1 - p_sink,i - H_i).
    Memory is linear in nq and nk, forward and backward; higher derivatives, forward mode, torch.func hold all scores.
    Source: Zhai et al. 2023, on entropy collapse (arXiv 2303.06296).

    >>> import regard as rg
    >>> q, k = torch.randn(2, 4, 9, 8, requires_grad=True), torch.randn(2, 4, 9, 8)
    >>> loss = (1.0 - rg.entropy(q, k, mask=rg.Causal())).relu().mean()   # no row may look at too few keys
    >>> loss.backward()
    >>> q.grad.shape
    torch.Size([2, 4, 9, 8])
    """
    return _answer(_EntropyRule(), BoundCall(q, k, _no_values(k), score, mask, positions, sink, None, like=q))


@answers_calls_of_pairs
def max_score(
    q: Any,
    k: Any,
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
) -> Any:
    """max_j s_ij over the keys that query i may see, (*batch, h, nq), differentiable: a term against exploding scores.

    Arguments, axes and errors as `attention`; float32, or float64 for float64 inputs. A row that sees nothing has
    -inf and gradients 0. A sink is not a key and has no effect. The gradient goes only to the largest score, or to the
    first of equal ones. Memory as `entropy`. Source: Kimi Team 2025, QK-clip (arXiv 2507.20534).

    >>> import regard as rg
    >>> q, k = torch.ones(1, 2, requires_grad=True), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> rg.max_score(q, k, score=rg.Dot()).sum().backward()
    >>> q.grad
    tensor([[0., 3.]])
    """
    return _answer(_MaxRule(), BoundCall(q, k, _no_values(k), score, mask, positions, sink, None, like=q))


def _no_values(k: Any) -> Tensor:
    keys = arrays.tensor(k, "k").detach()
    return keys[..., :0] if keys.dim() else keys


class _Rule:
    """One number a row, and its derivative with respect to the row's scores."""

    def values(self, problem: Problem) -> tuple[Tensor, ...]:
        """The numbers (*batch, h, nq), then what else `pull` needs; nothing is recorded."""
        raise NotImplementedError

    def pull(self, at: Region, scores: Tensor, g: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """The gradient of a tile's masked scores, from the cotangents g (*batch, h, nq) and what `values` gave."""
        raise NotImplementedError

    def sink_gradient(self, sink: Tensor, g: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """That of the sink (*batch, h)."""
        raise NotImplementedError

    def recorded(self, scores: Tensor, problem: Problem) -> Tensor:
        """The numbers of some rows, from their masked scores (*batch, h, r, c), by operations that autograd sees."""
        raise NotImplementedError


class _EntropyRule(_Rule):
    def values(self, problem: Problem) -> tuple[Tensor, ...]:
        m, l = Tiled().forward_for_backward(replace(problem, sink=None)).saved
        stats = problem.joined(State(m, l, m.new_zeros((*m.shape, 0)))).stats
        p_sink = torch.zeros_like(m) if problem.sink is None else stats.sink_weights(problem.sink)
        # the mass of the keys by itself: 1 - p_sink has lost the digits of a small one
        mass = l * stats.weights(m[..., None])[..., 0]
        return sweep(problem, stats, (Entropy(),))[Entropy()], stats.m, stats.l, p_sink, mass

    def pull(self, at: Region, scores: Tensor, g: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        h, m, l, p_sink, _ = (t[..., at.rows] for t in kept)
        stats = RowStats(m, l)
        log_p, p = stats.log_weights(scores), stats.weights(scores)
        g_s = -g[..., at.rows, None] * p * (log_p + (h + p_sink)[..., None])
        return g_s.masked_fill(p == 0, 0)

    def sink_gradient(self, sink: Tensor, g: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        h, _, _, p_sink, mass = kept
        return (g * p_sink * (mass - h)).sum(-1)

    def recorded(self, scores: Tensor, problem: Problem) -> Tensor:
        hidden, sink = scores == -torch.inf, problem.sink
        beside = [] if sink is None else [sink[..., None, None].expand(*scores.shape[:-1], 1)]
        logits = torch.cat([scores, *beside], -1)
        most = torch.nn.functional.pad(logits.detach(), (1, 0), value=-torch.inf).amax(-1, keepdim=True)
        shift = most.masked_fill(most == -torch.inf, 0)
        l = (logits - shift).exp().sum(-1, keepdim=True)
        l = l.masked_fill(l == 0, 1)
        log_p = scores.masked_fill(hidden, 0) - shift - l.log()
        return -((scores - shift).exp() / l * log_p).sum(-1)


class _MaxRule(_Rule):
    def values(self, problem: Problem) -> tuple[Tensor, ...]:
        check_of_pairs(problem, *Tiled().size.settled(problem))
        rows = problem.q.new_zeros(problem.q.shape[:-1], dtype=problem.accumulate)  # scores alone are asked for
        peak = sweep(problem, RowStats(rows, rows), (MaxScore(),))[MaxScore()]
        return peak.score, peak.key

    def pull(self, at: Region, scores: Tensor, g: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        best = at.col == kept[1][..., at.rows, None]
        return torch.where(best, g[..., at.rows, None], 0)

    def sink_gradient(self, sink: Tensor, g: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        return torch.zeros_like(sink)

    def recorded(self, scores: Tensor, problem: Problem) -> Tensor:
        padded = torch.nn.functional.pad(scores, (1, 0), value=-torch.inf)
        return padded.gather(-1, padded.detach().argmax(-1, keepdim=True))[..., 0]


def _answer(rule: _Rule, call: BoundCall) -> Any:
    problem = call.problem
    tensors = problem.tensors()
    with call.precision():
        if data_unavailable(*tensors) or has_tangent(*tensors):
            found = _recorded(rule, problem)
        elif torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            found = _Rows.apply(rule, problem, *tensors)
        else:
            with torch.no_grad():
                found = rule.values(problem)[0]
        return call.answer(call.layout.restore(found, 1))


def _recorded(rule: _Rule, problem: Problem) -> Tensor:
    """By operations that autograd, forward mode and torch.func can all see."""

    def scores(strip: Strip) -> Tensor:
        regions = [problem.frame.region(strip.rows, cols) for cols, _ in strip.tiles]
        found = [problem.region_tile(at).masked for at in regions]
        return torch.cat(found, -1) if found else room(problem, strip.rows.stop - strip.rows.start, 0)

    rows = [rule.recorded(scores(strip), problem) for strip in strips(problem, Size())]
    return torch.cat(rows, -1) if rows else room(problem, 0)


class _Rows(torch.autograd.Function):
    """The numbers of a rule, with a backward in linear memory: each tile of scores is computed again."""

    @staticmethod
    def forward(ctx: Any, rule: _Rule, problem: Problem, *tensors: Tensor) -> Tensor:
        found = rule.values(problem)
        ctx.rule, ctx.problem, ctx.given = rule, problem.without_tensors(), len(tensors)
        ctx.save_for_backward(*tensors, *found)
        return found[0]

    @staticmethod  # torch's stub has *args here, but calls it with one cotangent a result
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        tensors, kept = tuple(saved[: ctx.given]), tuple(saved[ctx.given :])
        needs, problem = tuple(ctx.needs_input_grad[2:]), ctx.problem.with_tensors(tensors)
        rule = ctx.rule

        def gradients(cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
            (g,) = cotangents
            if torch.is_grad_enabled():  # create_graph: the gradient itself will be differentiated
                return differentiable_gradients(lambda p: [(_recorded(rule, p), g)], problem, needs)
            return _backward(rule, problem, kept, g, needs)

        with exact(g.device.type):
            return (None, None, *linear_in((g,), gradients))


def _backward(
    rule: _Rule, problem: Problem, kept: tuple[Tensor, ...], g: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    sums = ScoreGradients(problem, needs)
    for strip in strips(problem, Size()) if sums.differentiated else ():
        for cols, everything in strip.tiles:
            evaluated = sums.evaluate(problem.frame.region(strip.rows, cols), everything)
            sums.add_scores(evaluated, rule.pull(evaluated.at, evaluated.tile.masked.detach(), g, kept))
    return sums.gradients(lambda sink: rule.sink_gradient(sink, g, kept))
