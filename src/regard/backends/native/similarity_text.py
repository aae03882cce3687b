"""Similarities that are no dot products as texts, for graphs: read again where the graph runs, around their tensors.

Queries and keys are prepared already. Additive(None, None, w, None, LeakyReLU(0.2)) is {"LeakyReLU":[0.2]}, and
Elementwise(fn, (a, b)) is {"features":[2,...]}, with the operations of fn as programs/text.py writes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from regard.backends.native.programs.record import record_features
from regard.backends.native.programs.text import RecordedFunction
from regard.call.problem import Problem
from regard.core.tracing import symbolic
from regard.core.value import fields_of
from regard.scores.activations import Activation, LeakyReLU, Sigmoid, Tanh
from regard.scores.additive import Additive
from regard.scores.algebra import Similarity
from regard.scores.elementwise import Elementwise

_ACTIVATIONS: dict[str, type[Activation]] = {kind.__name__: kind for kind in (Tanh, Sigmoid, LeakyReLU)}


@dataclass(frozen=True)
class SimilarityText:
    """What an operator is given of a similarity: a text, and the tensors that are not in queries and keys already."""

    text: str
    tensors: tuple[Tensor, ...]


def write_similarity(problem: Problem) -> SimilarityText | str:
    """The similarity of a call in a graph; or why it has no text, as a clause."""
    similarity = problem.similarity
    if isinstance(similarity, Elementwise):
        found = record_features(similarity, problem.frame.heads, problem.q.shape[-1])
        if isinstance(found, str):
            return found
        return SimilarityText(f'{{"features":[{len(similarity.inputs)},{found.text}]}}', similarity.inputs)
    if not isinstance(similarity, Additive):
        return f"{type(similarity).__name__} has none"
    activation = similarity.activation
    numbers = [getattr(activation, name) for name in fields_of(activation)]
    if symbolic(*numbers):
        return "a number of its activation changes from call to call"
    # torch.compile cannot follow json.dumps
    return SimilarityText(f'{{"{type(activation).__name__}":[{",".join([str(x) for x in numbers])}]}}', (similarity.w,))


def read_similarity(text: str, tensors: Sequence[Tensor]) -> tuple[Similarity, Sequence[Tensor]]:
    """The similarity that write_similarity wrote, around the first of these tensors, and the rest of them."""
    said, count = _read(text)
    own, rest = tuple(tensors[:count]), tensors[count:]
    if isinstance(said, RecordedFunction):
        return Elementwise.untried(said, own), rest
    return Additive(None, None, own[0], None, said), rest


@lru_cache(256)
def _read(text: str) -> tuple[RecordedFunction | Activation, int]:
    """The function of an Elementwise or the activation of an Additive, and how many tensors the similarity has."""
    ((name, given),) = json.loads(text).items()
    if name == "features":
        count, graph = given
        return RecordedFunction(json.dumps(graph)), count
    return _ACTIVATIONS[name](*given), 1
