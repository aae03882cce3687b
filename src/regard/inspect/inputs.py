"""Inputs: the wish to keep what was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from regard.inspect.facts import Fact
from regard.problem import Problem
from regard.witness import Witnessed


@dataclass(frozen=True)
class Inputs(Fact[Witnessed]):
    """Among the facts of `record`: keep q, k, score, mask, positions and sink of each call, as `Recorded.inputs`.

    They are copies, on their device, without gradients: memory linear in the sequence, but of its full width. `look`
    does not take it, since its caller has them.
    """

    def tally(self, problem: Problem) -> NoReturn:
        raise TypeError("Inputs() is for record(model, facts=...): look(q, k) is given the inputs by its caller.")
