"""The AttentionCall of regard.attention, for models that call it themselves."""

from __future__ import annotations

from typing import Any

import regard.core.arrays as arrays
from regard.call.hooks import AttentionCall
from regard.core.positions import Positions
from regard.masks.algebra import Everything, Mask
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


def of_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Any = None,
    dropout: Any = None,
    backend: Any = None,
) -> AttentionCall:
    """The AttentionCall of a call of regard.attention with these arguments."""
    q, k, v = (arrays.tensor(t, name) for t, name in ((q, "q"), (k, "k"), (v, "v")))
    return AttentionCall(None, q, k, score, mask, positions, sink, v)
