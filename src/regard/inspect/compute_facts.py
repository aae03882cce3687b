"""Finds facts, each in the cheaper way that has it: a sweep of the native kernels, or one over tiles in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.backends.streaming.tiled import Tiled
from regard.call.problem import Problem
from regard.core.state import RowStats
from regard.inspect.facts.algebra import Fact
from regard.inspect.native_facts import ask, why_not, why_nothing
from regard.inspect.results import FactResults
from regard.inspect.sweep import fit, join, parts_of, sweep
from regard.runtime.autograd import attend_with_stats

# The size up to which an lse of the kernels serves the sweep in PyTorch, whose scores are rounded otherwise.
_TRUST = 16.0


@torch.no_grad()
def find(problem: Problem, facts: tuple[Fact[Any], ...]) -> FactResults:
    """The facts of a problem; what it answers says which way each was found. Memory: the answers, and linear in nk.

    Raises ShapeError or IndexError for facts that do not fit the problem.
    """
    fit(problem, facts)
    parts = parts_of(facts)
    reasons = {part: why_not(problem, part) for part in parts}
    lse, answers = None, dict[Fact[Any], Any]()
    if why_nothing(problem) is None and (None in reasons.values() or not parts):
        lse, answers = ask(problem, tuple(part for part in parts if reasons[part] is None))
    left = tuple(part for part in parts if reasons[part] is not None)
    if left or lse is None:
        stats = attend_with_stats(Tiled(), problem)[1] if lse is None or not _trusted(lse) else RowStats.of_lse(lse)
        swept = sweep(problem, stats, left)
        lse = swept.lse if lse is None else lse
        answers |= {part: swept[part] for part in left}
    return FactResults(lse, join(facts, answers), problem.key_heads, {fact: _way(fact, reasons) for fact in facts})


def _trusted(lse: Tensor) -> bool:
    return bool((lse.abs().masked_fill(lse == -torch.inf, 0) <= _TRUST).all())


def _way(fact: Fact[Any], reasons: dict[Fact[Any], str | None]) -> str:
    whys = [why for part in fact.parts() if (why := reasons[part]) is not None]
    return f"tiles in PyTorch, not the native kernels: {'; '.join(whys)}" if whys else "the native kernels"
