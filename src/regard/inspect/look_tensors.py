"""look: facts about the weights of one call, in linear memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.call.arguments import answers_calls_of_pairs
from regard.core.errors import Unsupported
from regard.core.positions import Positions, resolve_positions
from regard.core.region import Frame
from regard.core.tracing import graphed
from regard.core.value import written
from regard.core.wrong_calls import kind_of
from regard.inspect.compute_facts import find
from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.rows import Entropy, MaxScore
from regard.inspect.results import FactResults
from regard.masks.algebra import Everything, Mask
from regard.runtime.binding import BoundCall
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@answers_calls_of_pairs
def look(
    q: Any,
    k: Any,
    *,
    facts: tuple[Fact[Any], ...] = (Entropy(), MaxScore()),
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
) -> FactResults:
    """The facts about the weights of `attention` on these arguments, without the nq × nk weights.

    Answers have the axes (*batch, h, ...), without h if q has no head axis; float32, or float64 for float64 inputs.
    Weights are those before dropout. No gradients (see `entropy` and `max_score`). Memory: the answers and one tile.
    facts: a tuple of values of regard.facts, or of your own. Other arguments and their errors as `attention`; TypeError
    for an object that is not a fact, ShapeError or IndexError for a fact that does not fit the call.

    The first argument decides what is returned:

        look(q, k, facts=, score=, mask=, positions=, sink=)  -> FactResults
        look(layer, x, context, facts=, mask=, positions=)    -> FactResults, of a layer of regard.nn on its input
        look(model, text, tokenizer=)                         -> Report, to be printed or saved
        look(model, "a", "b", tokenizer=)                     -> Report, of two texts that are read together
        look(model, ids)                                      -> Report, of token ids (n,)
        look(model, [text, ...], tokenizer=)                  -> TextReports: means over texts, and a Report each
        look(model, image, processor=)                        -> Report, of a model that reads pixels
        look(pipeline, text)                                  -> Report, of a pipeline of transformers

    A SentenceTransformer brings its own tokenizer. See regard.inspect.models.of_model for the rest of a model's
    arguments and errors.

    >>> import torch
    >>> q = torch.zeros(4, 8)
    >>> from regard.masks.positional import Causal
    >>> seen = look(q, q, mask=Causal())
    >>> seen[Entropy()].exp().round(decimals=4)   # equal weights: as many effective keys as the query may see
    tensor([1., 2., 3., 4.])
    """
    seen, call = survey(q, k, facts, score, mask, positions, sink)
    return seen if call.layout.headed else seen.without(len(call.layout.batch), None)


@torch.no_grad()
def survey(
    q: Any,
    k: Any,
    facts: tuple[Fact[Any], ...],
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Tensor | float | None,
) -> tuple[FactResults, BoundCall]:
    """The answers, with the head axis that q may lack, and the call that they are about."""
    check_facts(facts)
    call = BoundCall(q, k, arrays.tensor(k, "k")[..., :0], score, mask, positions, sink, None, like=q)
    if not torch.compiler.is_dynamo_compiling() and graphed(*call.problem.tensors()):  # dynamo runs look outside
        raise Unsupported(
            "look cannot be traced (torch.export, torch.jit.trace, make_fx, fake tensors): call it outside of the "
            "graph. attention_weights, attention_state, entropy and max_score can be."
        )
    if positions is None:
        _refuse_unknown_positions(call.problem.frame, facts)
    with call.precision():
        return find(call.problem, facts), call


def check_facts(facts: Any) -> None:
    """TypeError for what is no tuple of facts."""
    if isinstance(facts, Fact):
        raise TypeError(f"facts is {facts!r}; expected a tuple of facts: facts=({facts!r},).")
    if isinstance(facts, type):
        raise TypeError(f"facts is the class {facts.__name__}; expected a tuple of values: facts=({written(facts)},).")
    if not isinstance(facts, Collection):
        raise TypeError(f"facts is {kind_of(facts)}; expected a tuple of facts, such as facts=(Entropy(),).")
    for fact in cast("Collection[Any]", facts):
        if isinstance(fact, type):
            raise TypeError(f"facts holds the class {fact.__name__}, not one of its values; write {written(fact)}.")
        if not isinstance(fact, Fact):
            raise TypeError(f"facts holds {kind_of(fact)}; expected facts, such as Entropy().")


def _refuse_unknown_positions(frame: Frame, facts: tuple[Fact[Any], ...]) -> None:
    """What compares positions needs them where there are fewer queries than keys, as a mask would."""
    positional = next((fact for fact in facts if fact.compares_positions()), None)
    resolve_positions(None, frame.nq, frame.nk, frame.batch, positional, frame.device)
