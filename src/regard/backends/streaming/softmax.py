"""softmax(masked scores) V of whole rows, written out: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.call.problem import Problem
from regard.core.region import Region
from regard.core.shapes import repeat_heads
from regard.core.state import RowStats, weigh


def softmax_rows(problem: Problem, at: Region, everything: bool = False) -> tuple[Tensor, RowStats]:
    """out and the row statistics of the queries of a region that holds all keys which they see.

    everything: the mask is known to hide nothing here. All operations can be differentiated, to any order. The weights
    are normalised before they meet the values, so that the derivatives of a row with one weight of 1 are exactly 0.
    """
    q, k, v = problem.q[..., at.rows, :], problem.k[..., at.cols, :], problem.v[..., at.cols, :]
    tile = problem.tile(at, q, k, problem.score.local(at), everything)
    s, v = tile.masked, repeat_heads(v.to(problem.accumulate), problem.frame.heads)
    keyless = (s == -torch.inf).all(-1)  # by a mask, or by a bias of -inf
    keys = s.shape[-1]
    if problem.sink is not None:  # one key more, without a value
        s = torch.cat([s, problem.sink[..., None, None].expand(*s.shape[:-1], 1)], -1)
    hidden = s == -torch.inf
    empty = hidden.all(-1)
    s = s.masked_fill(empty[..., None], 0)
    # a hidden pair has no weight, also in a row that sees a NaN
    p = torch.softmax(s, -1).masked_fill(hidden, 0)[..., :keys]
    keep = problem.keep(at)
    out = weigh(p if keep is None else p * keep, v, tile.visible)
    m = s.detach().amax(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    l = torch.exp(s - m[..., None]).sum(-1)
    out = out.masked_fill(keyless[..., None], 0)
    return out, RowStats(m.masked_fill(empty, -torch.inf), l.masked_fill(empty, 0))
