"""What one feature adds to a score as a graph of torch's operations."""

from __future__ import annotations

from typing import Any

import torch

from regard.backends.native.programs.graph import Graph, Node, NotTraced
from regard.backends.native.programs.recorder import Recorder
from regard.core.region import Frame
from regard.scores.elementwise import Elementwise


def trace_features(similarity: Elementwise, frame: Frame, kind: type[Recorder] = Recorder) -> Graph:
    """The graph of what a feature of a pair adds to its score. frame: (heads, 1, 1, d). Raises NotTraced."""
    heads, _, _, width = frame.shape
    recorder = kind(4)
    q, k = (
        recorder.keep(name, (), "s", recorder.score((heads, *pairs, width), torch.float32))
        for name, pairs in (("query", (2, 1)), ("key", (1, 3)))
    )
    tensors = [
        recorder.keep("tensor", (n,), "", recorder.differentiable(t.float()))
        for n, t in enumerate(similarity.aligned(similarity.inputs))
    ]
    with recorder.recording():
        found: Any = similarity.fn(q, k, *tensors)
    recorder.look_for_functions(found)
    result = recorder.node_of(found)
    if not isinstance(result, Node):
        raise NotTraced("what its function returns does not depend on the pair")
    return Graph(result, recorder.fixed, function=recorder.function)
