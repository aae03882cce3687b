"""Facts about the inputs of a recorded call, not its weights: Inputs, the inputs themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

from torch import Tensor

from regard.call.hooks import AttentionCall
from regard.call.problem import Problem
from regard.core.state import RowStats
from regard.inspect.facts.algebra import Fact
from regard.scores.algebra import Score

T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class CallFact(Fact[T]):
    """A fact that is computed from the inputs of a recorded call, for record(model, facts=...) only."""

    def of_call(self, call: AttentionCall, name: str, number: int) -> T:
        """The answer for a call: the one with that number, from 0, of the layer with that path in the model."""
        raise NotImplementedError(f"{type(self).__name__} does not define of_call(call, name, number).")

    def accumulator(self, problem: Problem, stats: RowStats) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name}() is for record(model, facts=...): look(q, k) is given the inputs by its caller.")


@dataclass(frozen=True)
class Inputs(CallFact[AttentionCall]):
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

    def of_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        score: Score = call.score.with_tensors(iter([t.detach().clone() for t in call.score.tensors()]))
        sink = call.sink.detach().clone() if isinstance(call.sink, Tensor) else call.sink
        q, k = call.q.detach().clone(), call.k.detach().clone()
        return replace(call, q=q, k=k, score=score, sink=sink, v=None, mask_if_cross=None)
