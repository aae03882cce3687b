"""Problem: one call, validated and frozen, and `tile`, the one formula that every backend is measured by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat

import torch
from torch import Tensor

from regard.core.deferred import written_out
from regard.core.dropout import Dropout
from regard.core.dtypes import accumulator
from regard.core.int8_rows import Int8Rows
from regard.core.region import Frame, Region
from regard.core.shapes import repeat_heads
from regard.core.state import State
from regard.core.tracing import finite
from regard.masks.algebra import Mask, seen_by
from regard.scores.algebra import Pipeline, Pull, Similarity, evaluate


@dataclass(frozen=True, eq=False)
class Problem:
    """One call of attention: q (*batch, h, nq, d), k (*batch, hk, nk, d'), v (*batch, hk, nk, dv), and what applies to
    them.

    q and k are prepared by the similarity already (see Similarity.prepare); `score` compares them. `dtype` is the
    caller's, which the output gets; sums are kept in `accumulator(dtype)`. sink: logits (*batch, h) that take mass and
    add nothing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    score: Pipeline
    mask: Mask
    frame: Frame
    dropout: Dropout | None
    dtype: torch.dtype
    sink: Tensor | None = None
    similarity: Similarity = field(init=False)
    score_tensors: tuple[Tensor, ...] = field(init=False)  # score.tensors(): the fields are searched once
    mask_tensors: tuple[Tensor, ...] = field(init=False)
    _tensors: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        first = self.score.parts[0]
        assert isinstance(first, Similarity)
        object.__setattr__(self, "similarity", first)
        of_score, of_mask = self.score.tensors(), self.mask.tensors()
        object.__setattr__(self, "score_tensors", of_score)
        object.__setattr__(self, "mask_tensors", of_mask)
        sink = () if self.sink is None else (self.sink,)
        every = self.q, self.k, self.v, *of_score, *of_mask, *self.frame.positions.tensors(), *sink
        object.__setattr__(self, "_tensors", every)

    @property
    def key_heads(self) -> int:
        return self.k.shape[-3]

    @property
    def dv(self) -> int:
        return self.v.shape[-1]

    @property
    def accumulate(self) -> torch.dtype:
        return accumulator(self.dtype)

    @property
    def lanes(self) -> int:
        """How many numbers are held for a query and a key: batch × heads × what the similarity needs."""
        return math.prod(self.frame.batch) * self.frame.heads * self.similarity.footprint

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the call: q, k, v, then those of the score, the mask and the positions, then the sink."""
        return self._tensors

    def with_tensors(self, tensors: Iterable[Tensor]) -> Problem:
        """The same call on other tensors, in the order of `tensors()`."""
        rest = iter(tensors)
        q, k, v = next(rest), next(rest), next(rest)
        score, mask = self.score.with_tensors(rest), self.mask.with_tensors(rest)
        frame = replace(self.frame, positions=self.frame.positions.with_tensors(rest))
        sink = None if self.sink is None else next(rest)
        return replace(self, q=q, k=k, v=v, score=score, mask=mask, frame=frame, sink=sink)

    def without_tensors(self) -> Problem:
        """The same call on nothing, for `with_tensors` later: it holds no memory of its tensors."""
        return self.with_tensors(repeat(self.q.new_empty(0)))

    def written_out(self) -> Problem:
        """The same call on ordinary tensors: keys and values gathered from pages, rows of int8 widened.

        These are widened to the accumulation dtype, and q with them: nothing is rounded.
        """
        if not (isinstance(self.k, Int8Rows) or isinstance(self.v, Int8Rows)):
            return replace(self, k=written_out(self.k), v=written_out(self.v))
        q, k, v = (
            t.widened(self.accumulate) if isinstance(t, Int8Rows) else written_out(t).to(self.accumulate)
            for t in (self.q, self.k, self.v)
        )
        return replace(self, q=q, k=k, v=v)

    def tile(
        self, at: Region, q: Tensor, k: Tensor, score: Pipeline, everything: bool = False, first: Tensor | None = None
    ) -> Tile:
        """Scores and visibility of one region, from q (*batch, h, r, d), k (*batch, hk, c, d') and the score's local
        tensors.

        `everything`: the mask is known to hide nothing here. Hidden scores may hold anything; what is hidden leaks into
        no gradient, whatever q and k hold. `first`: what the similarity says here, where `quick` has found it.
        """
        visible = None if everything else seen_by(self.mask, at, (q.shape[-2], k.shape[-2]))
        if first is not None:
            return Tile(evaluate(score, q, k, at, first), visible)
        q, k = q.to(self.accumulate), repeat_heads(k.to(self.accumulate), self.frame.heads)
        shielded = not everything and not finite(q, k)
        return Tile(_shielded(score, q, k, at) if shielded else evaluate(score, q, k, at), visible)

    def quick(self, at: Region, q: Tensor, k: Tensor, score: Pipeline) -> tuple[Tensor, Pull] | None:
        """The similarity of one region by its cheaper way, if it has one: see Similarity.quick."""
        similarity = score.parts[0]
        assert isinstance(similarity, Similarity)
        with torch.no_grad():
            return similarity.quick(q.to(self.accumulate), repeat_heads(k.to(self.accumulate), self.frame.heads), at)

    def region_tile(self, at: Region) -> Tile:
        """`tile` for a region, cut from the problem's own tensors."""
        return self.tile(at, self.q[..., at.rows, :], self.k[..., at.cols, :], self.score.local(at))

    def quick_tile(self, at: Region, everything: bool = False) -> Tile:
        """`region_tile` by the similarity's cheaper way, where it has one; nothing is recorded."""
        q, k, local = self.q[..., at.rows, :], self.k[..., at.cols, :], self.score.local(at)
        found = self.quick(at, q, k, local)
        return self.tile(at, q, k, local, everything, None if found is None else found[0])

    def joined(self, state: State) -> State:
        """The state of some of the queries (*batch, h, r), the sink included."""
        if self.sink is None:
            return state
        # a row that sees no key is 0, whatever the values are that no weight multiplied
        keys = State(state.m, state.l, state.o.masked_fill(state.stats.empty[..., None], 0))
        return keys | State.of_sink(self.sink[..., None].expand(state.m.shape), self.dv)

    def keep(self, at: Region) -> Tensor | None:
        """The dropout factors of a region, None without dropout."""
        return None if self.dropout is None else self.dropout.keep(at, self.accumulate)


@dataclass(frozen=True, eq=False)
class Tile:
    """One region's scores (*batch, h, r, c), and which pairs are visible (broadcastable to it; None = all)."""

    scores: Tensor
    visible: Tensor | None

    @property
    def masked(self) -> Tensor:
        """The scores with -inf where hidden."""
        return self.scores if self.visible is None else self.scores.masked_fill(~self.visible, -torch.inf)


def _shielded(score: Pipeline, q: Tensor, k: Tensor, at: Region) -> Tensor:
    """The same scores; but the gradient of a hidden pair, which is 0, stays 0 whatever its query and key hold.

    0 · NaN is NaN, so gradients are those at queries and keys with 0 in the place of NaN, and a large number in that of
    infinity, where activations have saturated too. The derivative of nan_to_num is 0 there, times the gradient: a
    pair that is visible, and whose gradient is NaN, passes NaN on.
    """
    fine = q.isfinite().all(-1)[..., :, None] & k.isfinite().all(-1)[..., None, :]
    large = torch.finfo(q.dtype).max ** 0.25  # a product of two of them is finite
    clean = evaluate(score, q.nan_to_num(0.0, large, -large), k.nan_to_num(0.0, large, -large), at)
    raw = evaluate(score, q.detach(), k.detach(), at).detach()
    return torch.where(fine, clean, clean + (raw - clean.detach()))
