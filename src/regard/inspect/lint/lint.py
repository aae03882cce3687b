"""lint: what looks wrong in one call of attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
import regard.inspect.lint.layout_checks as layout_checks
import regard.inspect.lint.mask_checks as mask_checks
import regard.inspect.lint.value_checks as value_checks
import regard.inspect.lint.weight_checks as weight_checks
from regard.call.arguments import answers_calls, check_mask
from regard.call.problem import Problem
from regard.core.errors import ShapeError, Unsupported
from regard.core.positions import Positions, resolve_positions
from regard.core.tracing import data_unavailable, graphed
from regard.inspect.compute_facts import find
from regard.inspect.facts.keys import Readers
from regard.inspect.facts.rows import Concentration, MaxScore, RelativeEntropy, Visible
from regard.inspect.lint.defect import Defect, Lint
from regard.masks.algebra import Everything, Mask
from regard.masks.dense import Dense
from regard.runtime.binding import BoundCall
from regard.scores.algebra import Score
from regard.scores.modifiers import Bias
from regard.scores.similarity import ScaledDot

# From here on a bias hides a pair, as masks that are added do: -inf, finfo.min, -1e9, -1e4.
HIDES = -1e4


@torch.no_grad()
@answers_calls
def lint(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    within: Mask = Everything(),
) -> Lint:
    """What looks wrong in a call of `attention`: an inverted mask, a leak, NaN, constant scores.

    Returns a Lint, a sequence of Defects, each with its name, how often it was found, a sentence and what to write
    instead. print(...) shows them; an empty Lint shows "nothing found" and is false. Arguments and errors as
    `attention`, and

    within  a bound for the mask: each pair that the mask shows and `within` hides is a defect. Causal() asserts that no
            query sees the future.

    not finite        NaN or infinity in q, k, v, a tensor of the score or the sink, by index, where a query sees it
    scores not finite scores that are NaN or infinite though all of these are finite
    heads and tokens turned round   q, k and v are more likely (batch, n, heads, d)
    empty rows        queries that see no key, unless Lengths(queries=...) says that they are padding
    inverted mask     no query sees its own key, nor its neighbours; or sequences without any key, beside others whose
                      hidden keys would be a padding mask
    padding on the wrong axis   a mask that hides queries where it should hide keys, or (batch, nk) read as (nq, nk)
    padding in the wrong place  keys that are 0 are seen, and others are hidden
    future leak       a mask that is causal except for a few pairs, or ends each row some keys too late
    beyond ...        pairs that `within` hides
    mask as a bias    a bias of 0 and 1
    saturated scores  half of a head's rows, or more, give one key 99% of the weight
    constant scores   all rows of a head give every key the same weight

    lint checks patterns only in masks that are written out pair by pair (Dense, Where, ~, a class of your own, a bias
    of large negative numbers): Causal(), Window(...), Lengths(...) state their pattern. The patterns are rules of
    thumb; the other findings are facts. Memory: linear in nq and nk. Raises Unsupported if there are no numbers (a
    graph, the meta device).

    >>> import regard as rg, torch
    >>> q, k, v = torch.randn(3, 1, 1, 6, 8).unbind(0)
    >>> lint(q, k, v, mask=rg.Causal())
    nothing found
    >>> lint(q, k, v, mask=rg.Dense(torch.ones(6, 6).triu(1).bool())).names
    ('empty rows', 'inverted mask')
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "q, k and v are read as")  # a finding here
        call = BoundCall(q, k, v, score, mask, positions, sink, None)
    problem = call.problem
    if graphed(*problem.tensors()) or data_unavailable(*problem.tensors()):
        raise Unsupported("lint looks at numbers, which a graph, a transform and the meta device do not have.")
    check_mask(within, "within")
    frame, complaint = problem.frame, within.shape_error(problem.frame)
    if complaint is not None:
        raise ShapeError(complaint)
    if within.compares_positions():  # as for the mask: an error where they are not given and not obvious
        resolve_positions(positions, frame.nq, frame.nk, frame.batch, within, frame.device)
    with call.precision():
        return Lint(tuple(_defects(call, (q, k, v), positions, sink, within)))


def _defects(
    call: BoundCall,
    given: tuple[Any, Any, Any],
    positions: Positions | None,
    sink: Tensor | float | None,
    within: Mask,
) -> Iterator[Defect]:
    problem, frame = call.problem, call.problem.frame
    # without the sink: it is no key, and its weight would hide that all keys weigh alike
    facts = (Visible(), Readers(), MaxScore(), Concentration(), RelativeEntropy())
    seen = find(replace(problem, sink=None), facts)
    visible, readers = seen[Visible()], seen[Readers()]

    own = {name: arrays.tensor(x, name) for name, x in zip("qkv", given, strict=True)}
    part = value_checks.seen_vectors(visible, readers, problem.key_heads, call.layout)
    spoilt = list(value_checks.not_finite({"q": own["q"], "k": own["k"]}, part))
    if bool(weight_checks.rows_not_finite(seen, visible).any()):
        biases = value_checks.seen_biases(problem.score, problem.mask, frame)
        spoilt += value_checks.not_finite(value_checks.named_tensors(problem.score), biases)
    yield from spoilt
    yield from value_checks.not_finite({"v": own["v"]} | ({} if problem.sink is None else {"sink": problem.sink}), part)
    if not spoilt:
        yield from weight_checks.lost(seen, visible)

    yield from layout_checks.turned_round(own["q"], own["k"], own["v"], problem, positions, sink)
    yield from mask_checks.empty_rows(visible, problem.mask, frame)
    placed = positions is not None or frame.nq == frame.nk
    for one in (problem.mask, *_biases_that_hide(problem)):
        yield from mask_checks.written_masks(one, frame, placed)
    yield from mask_checks.beyond(problem.mask, within, frame)
    yield from value_checks.seen_padding(problem.k, problem.v, readers, frame)
    yield from value_checks.masks_as_biases(problem.score)
    yield from weight_checks.saturated(seen, visible)
    yield from weight_checks.constant(seen, visible)


def _biases_that_hide(problem: Problem) -> Iterator[Mask]:
    """Biases that are added as masks, as such."""
    for stage in problem.score.parts:
        if isinstance(stage, Bias) and bool((stage.bias <= HIDES).any()):
            yield Dense(stage.bias > HIDES)
