"""Similarities that are no dot products as a text and tensors, for graphs: read again where the graph runs.

Queries and keys are prepared already. Additive(None, None, w, None, LeakyReLU(0.2)) is ["LeakyReLU",0.2], with w.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard.core.tracing import symbolic
from regard.core.value import fields_of
from regard.scores.activations import Activation, LeakyReLU, Sigmoid, Tanh
from regard.scores.additive import Additive
from regard.scores.algebra import Similarity

# What an operator is given of a similarity that has a text: its tensors.
SIMILARITY_TENSORS = ("similarity_0",)
_ACTIVATIONS: dict[str, type[Activation]] = {kind.__name__: kind for kind in (Tanh, Sigmoid, LeakyReLU)}


def write_similarity(similarity: Similarity) -> dict[str, Any] | str:
    """The text and the tensors, by the names of an operator's arguments; or why there is no text, as a clause."""
    if not isinstance(similarity, Additive):
        return f"{type(similarity).__name__} has no text"
    activation = similarity.activation
    numbers = [getattr(activation, name) for name in fields_of(activation)]
    if symbolic(*numbers):
        return "a number of its activation changes from call to call"
    parts = [f'"{type(activation).__name__}"', *[str(x) for x in numbers]]  # torch.compile cannot follow json.dumps
    return {"similarity_text": f"[{','.join(parts)}]", **dict(zip(SIMILARITY_TENSORS, (similarity.w,), strict=True))}


def read_similarity(text: str, tensors: Sequence[Tensor]) -> Similarity:
    """The similarity that write_similarity wrote, of queries and keys as they are, around these tensors."""
    name, *numbers = json.loads(text)
    (w,) = tensors
    return Additive(None, None, w, None, _ACTIVATIONS[name](*numbers))
