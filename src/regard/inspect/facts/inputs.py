"""Inputs: the wish to keep what was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from regard.core.hooks import AttentionCall
from regard.core.problem import Problem
from regard.core.state import RowStats
from regard.inspect.facts.algebra import Fact


@dataclass(frozen=True)
class Inputs(Fact[AttentionCall]):
    """The inputs of a recorded call: layer, q, k, score, mask, positions and sink, as an AttentionCall.

    Only for record(model, facts=...): the caller of `look` has them. q, k, the score's tensors and the sink are copies,
    on their device, without gradients: memory linear in the sequence, but of the full width.

    >>> import regard as rg, torch
    >>> layer = rg.nn.MultiHeadAttention(8, heads=2)
    >>> with rg.record(layer, facts=(Inputs(),)) as tape:
    ...     _ = layer(torch.randn(1, 5, 8), mask=rg.Causal())
    >>> call = tape.calls[0][Inputs()]
    >>> rg.attention_weights(call.q, call.k, score=call.score, mask=call.mask).shape
    torch.Size([1, 2, 5, 5])
    """

    def accumulator(self, problem: Problem, stats: RowStats) -> NoReturn:
        raise TypeError("Inputs() is for record(model, facts=...): look(q, k) is given the inputs by its caller.")
