"""look: facts about the weights of one call, in linear memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard.arrays as arrays
from regard.backends.tiled import Tiled
from regard.call import Call
from regard.inspect.facts import Entropy, Fact, MaxScore
from regard.inspect.sweep import Seen, sweep
from regard.masks.algebra import Everything, Mask
from regard.positions import Positions
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


def look(
    q: Any,
    k: Any,
    *,
    facts: tuple[Fact[Any], ...] = (Entropy(), MaxScore()),
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
) -> Seen:
    """What the weights of `attention` on these arguments are like: the answers to `facts`, never nq × nk of them.

    Answers have the axes (*batch, h, ...), without h where q has no head axis; float32, or float64 for float64 inputs.
    Weights are those before dropout. No gradients. Memory: the answers and one tile.

    >>> import torch
    >>> q = torch.zeros(4, 8)
    >>> from regard.masks.positional import Causal
    >>> seen = look(q, q, mask=Causal())
    >>> seen[Entropy()].exp()   # equal weights: as many effective keys as the query may see
    tensor([1., 2., 3., 4.])
    """
    seen, call = survey(q, k, facts, score, mask, positions, sink)
    return seen if call.layout.headed else seen.headless(len(call.layout.batch))


@torch.no_grad()
def survey(
    q: Any,
    k: Any,
    facts: tuple[Fact[Any], ...],
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Tensor | float | None,
) -> tuple[Seen, Call]:
    """The answers, with the head axis that q may lack, and the call that they are about."""
    call = Call(q, k, arrays.tensor(k, "k")[..., :0], score, mask, positions, sink, None, like=q)
    with call.precision():
        return sweep(call.problem, call.run(Tiled(), lse=True)[1], facts), call
