"""The backward pass that backends share: tile by tile from the log-sum-exp, in memory linear in the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.backends.streaming.tiling import Size, tiles
from regard.call.problem import Problem, Tile
from regard.core.region import Region
from regard.core.shapes import repeat_heads, sum_groups
from regard.core.state import RowStats, weigh
from regard.core.vjp import vjp
from regard.scores.algebra import Pull
from regard.scores.finite import finite_in

Cotangents = tuple[Tensor, "Tensor | None"]  # of out, and of the log-sum-exp where somebody uses it


def backward(
    problem: Problem, out: Tensor, stats: RowStats, cotangents: Cotangents, needs: tuple[bool, ...], size: Size
) -> tuple[Tensor | None, ...]:
    """Gradients of problem.tensors() for which `needs` is true, from the forward's results and their cotangents."""
    sweep = _Sweep(problem, out, stats, cotangents, needs)
    if any(needs[3 : 3 + len(problem.score_tensors)]):
        sweep.sum_delta(size, cotangents[1])
    for at, everything in tiles(problem, size):
        sweep.add(at, everything)
    return sweep.gradients(lambda sink: sink_gradient(stats.sink_weights(sink), sweep.delta))


@dataclass(frozen=True, eq=False)
class EvaluatedTile:
    """One tile of scores, evaluated so that it can be differentiated: from `leaves`, or through `first` by `pull`."""

    at: Region
    leaves: list[Tensor]
    tile: Tile
    first: Tensor | None
    pull: Pull | None


class ScoreGradients:
    """The gradients of q, k and the tensors of the score, summed tile by tile from those of the scores."""

    def __init__(self, problem: Problem, needs: tuple[bool, ...]) -> None:
        self.problem, self.needs = problem, needs
        n = 3 + len(problem.score_tensors)
        self.sums = tuple(
            torch.zeros(t.shape, dtype=problem.accumulate, device=t.device)
            for t in (problem.q, problem.k, problem.v, *problem.score_tensors)
        )
        self.score_sums = problem.score.with_tensors(iter(self.sums[3:]))
        self.differentiated = [m for m in range(n) if m != 2 and needs[m]]

    def evaluate(self, at: Region, everything: bool) -> EvaluatedTile:
        """The scores of one tile. Where none of the gradients is wanted, they require none."""
        problem, rows, cols = self.problem, at.rows, at.cols
        q, k, v = problem.q[..., rows, :], problem.k[..., cols, :], problem.v[..., cols, :]
        local = problem.score.local(at)
        leaves = [finite_in(t.detach(), problem.accumulate) for t in (q, k, v)]
        # the score must read its tensors as the forward did: wider ones are not rounded first
        for t in local.tensors():  # whole numbers and booleans stay
            wide = torch.promote_types(t.dtype, problem.accumulate) if t.is_floating_point() else t.dtype
            leaves.append(t.detach().to(wide))
        for m in self.differentiated:
            leaves[m].requires_grad_()
        local = local.with_tensors(iter(leaves[3:]))
        first, pull = problem.quick(at, leaves[0], leaves[1], local) or (None, None)
        if first is not None:
            first.requires_grad_(bool(self.differentiated))
        with torch.enable_grad():
            tile = problem.tile(at, leaves[0], leaves[1], local, everything, first)
        return EvaluatedTile(at, leaves, tile, first, pull)

    def add_scores(self, evaluated: EvaluatedTile, g_s: Tensor) -> None:
        """One tile's share, from the gradient of its scores: 0 where hidden."""
        gradients = self._by_autograd(evaluated, g_s) if evaluated.first is None else self._by_pull(evaluated, g_s)
        places = (
            self.sums[0][..., evaluated.at.rows, :],
            self.sums[1][..., evaluated.at.cols, :],
            None,
            *self.score_sums.local(evaluated.at).tensors(),
        )
        for m, g in gradients.items():
            place = places[m]
            if g is not None and place is not None:
                place += g

    def _by_autograd(self, evaluated: EvaluatedTile, g_s: Tensor) -> dict[int, Tensor | None]:
        """By place in `sums`, this tile's gradients, from those of its scores."""
        wanted = [evaluated.leaves[m] for m in self.differentiated]
        found = vjp([evaluated.tile.scores], wanted, [g_s])
        return dict(zip(self.differentiated, found, strict=True))

    def _by_pull(self, evaluated: EvaluatedTile, g_s: Tensor) -> dict[int, Tensor | None]:
        """The same where autograd has seen the modifiers only, and the similarity knows its own derivative."""
        assert evaluated.first is not None and evaluated.pull is not None
        known = len(self.problem.similarity.tensors())
        later = [m for m in self.differentiated if m >= 3 + known]
        seen = [evaluated.first, *(evaluated.leaves[m] for m in later)]
        g_first, *g_later = vjp([evaluated.tile.scores], seen, [g_s])
        pulled = (None,) * (2 + known) if g_first is None else evaluated.pull(g_first)  # None: a modifier ignores it
        g_q, g_k, *g_known = pulled
        g_k = None if g_k is None else sum_groups(g_k, self.problem.key_heads)
        found = dict(enumerate((g_q, g_k, None, *g_known))) | dict(zip(later, g_later, strict=True))
        return {m: found[m] for m in self.differentiated}

    def gradients(self, sink: Callable[[Tensor], Tensor]) -> tuple[Tensor | None, ...]:
        """In the order and dtypes of problem.tensors(); `sink` is asked for that of the sink, if it is wanted."""
        given = self.problem.tensors()
        known = [self.sums[m].to(given[m].dtype) if self.needs[m] else None for m in range(len(self.sums))]
        rest: list[Tensor | None] = [None for _ in given[len(self.sums) :]]
        if self.problem.sink is not None and self.needs[-1]:
            rest[-1] = sink(self.problem.sink)
        return (*known, *rest)


class _Sweep(ScoreGradients):
    """The sums of one backward pass.

    With P = exp(S - m) / l, Delta = rowsum(dO · O) - g (g the cotangent of lse):  dS = P (dO Vᵀ - Delta), dV = Pᵀ dO.
    From dS on, autograd differentiates the tile's own scores.
    """

    def __init__(
        self, problem: Problem, out: Tensor, stats: RowStats, cotangents: Cotangents, needs: tuple[bool, ...]
    ) -> None:
        super().__init__(problem, needs)
        self.stats = stats
        self.g_out, self.delta = output_cotangents(out, stats.empty, cotangents)

    @torch.no_grad()
    def sum_delta(self, size: Size, g_lse: Tensor | None) -> None:
        """Delta as Σ_j P_ij dP_ij - g: rowsum(dO · O) is the same but for rounding.

        A parameter of the score sums dS over whole rows, times a derivative that may be large. What rounding leaves of
        Σ_j dS_ij = g_i would be multiplied by it.
        """
        problem, total = self.problem, torch.zeros_like(self.delta)
        for at, everything in tiles(problem, size):
            tile = problem.quick_tile(at, everything)
            v = problem.v[..., at.cols, :].to(problem.accumulate)
            p, g_p = self.stats.rows(at.rows).weights(tile.masked), self._weight_gradient(at, v, problem.keep(at))
            total[..., at.rows] += (p * g_p).masked_fill(tile.masked == -torch.inf, 0).sum(-1)
        self.delta = (total if g_lse is None else total - g_lse).masked_fill(self.stats.empty, 0)

    def add(self, at: Region, everything: bool) -> None:
        """One tile's share of every gradient."""
        problem, rows, cols = self.problem, at.rows, at.cols
        evaluated = self.evaluate(at, everything)
        tile = evaluated.tile
        scores = tile.masked.detach()
        p = self.stats.rows(rows).weights(scores)
        keep, g_out = problem.keep(at), self.g_out[..., rows, :]
        if self.needs[2]:
            seen = None if tile.visible is None else tile.visible.expand(p.shape).mT
            g_v = weigh((p if keep is None else p * keep).mT, g_out, seen)
            self.sums[2][..., cols, :] += sum_groups(g_v, problem.key_heads)
        if tile.scores.requires_grad:
            g_s = p * (self._weight_gradient(at, evaluated.leaves[2], keep) - self.delta[..., rows, None])
            self.add_scores(evaluated, g_s.masked_fill(scores == -torch.inf, 0))  # hidden by the mask, or by a bias

    def _weight_gradient(self, at: Region, v: Tensor, keep: Tensor | None) -> Tensor:
        """dP = keep ∘ (dO Vᵀ) of a tile whose values are v."""
        g_p = self.g_out[..., at.rows, :] @ repeat_heads(v, self.problem.frame.heads).mT
        return g_p if keep is None else g_p * keep


def output_cotangents(out: Tensor, empty: Tensor, cotangents: Cotangents) -> tuple[Tensor, Tensor]:
    """dO, and Delta = rowsum(dO · O) - g with g the cotangent of lse; both 0 for rows that see nothing."""
    g_out, g_lse = cotangents
    g_out = g_out.masked_fill(empty[..., None], 0)
    delta = (g_out * out).sum(-1)
    return g_out, (delta if g_lse is None else delta - g_lse).masked_fill(empty, 0)


def sink_gradient(p: Tensor, delta: Tensor) -> Tensor:
    """The gradient of a sink (*batch, h), a key with the weights p (*batch, h, nq) and no value: dS = P (0 - Delta)."""
    return -(p * delta).sum(-1)
