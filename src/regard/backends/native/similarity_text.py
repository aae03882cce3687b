"""Similarities that are no dot products as texts, for graphs: read again where the graph runs, around their tensors.

Queries and keys are prepared already. Additive(None, None, w, None, LeakyReLU(0.2)) is {"LeakyReLU":[0.2]}, and
Elementwise(fn, (a, b)) is {"features":[2,...]}, with the operations of fn as programs/text.py writes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import torch
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
_NO = "no: "  # what begins the reason why there is no text


def write_similarity(problem: Problem) -> str:
    """The text of a similarity in a graph; or, after "no: ", why there is none, as a clause."""
    similarity = problem.similarity
    if isinstance(similarity, Elementwise):
        found = record_features(similarity, problem.frame.heads, problem.q.shape[-1])
        if isinstance(found, str):
            return f"{_NO}{found}"
        return f'{{"features":[{len(similarity.inputs)},{found.text}]}}'
    if not isinstance(similarity, Additive):
        return f"{_NO}{type(similarity).__name__} has none"
    activation = similarity.activation
    numbers = [getattr(activation, name) for name in fields_of(activation)]
    if symbolic(*numbers):
        return f"{_NO}a number of its activation changes from call to call"
    # torch.compile cannot follow json.dumps
    return f'{{"{type(activation).__name__}":[{",".join([str(x) for x in numbers])}]}}'


def why_no_similarity_text(problem: Problem) -> str | None:
    """Why a similarity in a graph has no text, as a clause; None if it has one."""
    text = write_similarity(problem)
    return text.removeprefix(_NO) if text.startswith(_NO) else None


def tensors_of_text(similarity: Similarity) -> tuple[Tensor, ...]:
    """The tensors that a text is read around: those that are not in queries and keys already."""
    return (similarity.w,) if isinstance(similarity, Additive) else similarity.tensors()


def read_similarity(text: str, tensors: Sequence[Tensor]) -> tuple[Similarity, Sequence[Tensor]]:
    """The similarity that write_similarity wrote around the first of these tensors, and the rest of them."""
    similarity = _read(text)
    count = len(similarity.tensors())
    return similarity.with_tensors(iter(tensors[:count])), tensors[count:]


@lru_cache(256)
def _read(text: str) -> Similarity:
    """The similarity around tensors of any numbers."""
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    ((name, given),) = json.loads(text).items()
    if name == "features":
        count, graph = given
        return Elementwise(RecordedFunction(json.dumps(graph, separators=(",", ":"))), (one,) * count)
    return Additive(None, None, one, None, _ACTIVATIONS[name](*given))
