"""Modifiers and masks as a graph of torch's operations, recorded while they run once on a few pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.programs.compositions import EXACTLY_COMPOSED
from regard.backends.native.programs.graph import Graph, Node, NotTraced, alike
from regard.backends.native.programs.recorder import Recorder
from regard.backends.native.programs.traced_region import AXES, TracedRegion
from regard.core.errors import Unsupported
from regard.core.functions import settled
from regard.core.pair_indexing import PairIndexing
from regard.core.region import Frame
from regard.core.tracing import outside_of_graphs
from regard.masks.algebra import And, Mask, Not, Or
from regard.scores.algebra import Modifier
from regard.scores.modifiers import Bias


def trace(stages: Sequence[Modifier], frame: Frame, dtype: torch.dtype, kind: type[Recorder] = Recorder) -> Graph:
    """The graph of the modifiers of a call. Raises NotTraced, and Unsupported where it follows from sizes of tiles."""
    return _of_any_size(lambda more: _trace(stages, frame, dtype, kind, more), "a modifier of the score")


def trace_mask(mask: Mask, frame: Frame, kind: type[Recorder] = Recorder) -> Graph:
    """The graph of what a mask says of a pair. Raises the same."""
    return _of_any_size(lambda more: _trace_mask(mask, frame, kind, more), "the mask")


# Queries and keys beyond the usual ones: as few as others, and as many as a part of a call may have.
_MORE = (1, 1), (2046, 0), (0, 2045)


@outside_of_graphs  # torch.compile would follow the mode that records, where it has ended a graph for an error
def _of_any_size(traced: Callable[[tuple[int, int]], Graph], what: str) -> Graph:
    """The graph for the usual pairs; where sizes were read it must be that for more of them too."""
    graph = traced((0, 0))
    if graph.sizes and not all(_is_that_of(traced, more, graph) for more in _MORE):
        raise Unsupported(
            f"{what} computes with a size of the tensors that it is given (s.shape, len(at.i), j.numel(), ...). These "
            "are of a part of the call, which each backend chooses: read at.frame.nq and at.frame.nk, the numbers of "
            "queries and keys of the call, or have them as a field."
        )
    return graph


def _is_that_of(traced: Callable[[tuple[int, int]], Graph], more: tuple[int, int], graph: Graph) -> bool:
    try:
        return alike(graph.result, traced(more).result, {})
    except NotTraced as why:
        if isinstance(why.__cause__, IndexError):  # a table is too short: lowering says how long it must be
            return True
        raise


def _trace(
    stages: Sequence[Modifier], frame: Frame, dtype: torch.dtype, kind: type[Recorder], more: tuple[int, int]
) -> Graph:
    recorder = kind(len(frame.batch) + 3)
    region = TracedRegion(frame, recorder, more)
    shape = (*frame.batch, frame.heads, *region.size)
    s = recorder.keep("score", (), "s", recorder.score(shape, dtype))
    tensors = [t for stage in stages for t in stage.tensors()]
    rest = iter(recorder.given(tensors))
    own: list[Any] = [stage.with_tensors(rest) if stage.tensors() else stage for stage in stages]
    with recorder.recording():
        for stage in own:
            pair = stage.of_pair()
            if pair is not None:
                s = recorder.keep("same", (_of_score(pair, recorder, s, dtype),), "sbhij", recorder.score(shape, dtype))
            elif type(stage) is Bias:
                s = _plus(s, region.pairs(stage.bias).to(dtype))
            else:
                s = stage.local(region).modify(s, region)
                recorder.check_scores(s, shape, stage)
                recorder.look_for_functions(s)
    result = recorder.node_of(s)
    if not isinstance(result, Node):
        raise NotTraced("what its modifiers return does not depend on the pair")
    return Graph(result, recorder.fixed, function=recorder.function, sizes=recorder.sizes)


def _trace_mask(mask: Mask, frame: Frame, kind: type[Recorder], more: tuple[int, int]) -> Graph:
    recorder = kind(len(frame.batch) + 3)
    recorder.composed = EXACTLY_COMPOSED
    region = TracedRegion(frame, recorder, more)
    with recorder.recording():
        seen: Any = _visible(mask.with_tensors(iter(recorder.given(mask.tensors()))), region, recorder)
    result = recorder.node_of(seen)
    if not isinstance(result, Node) or result.dtype != torch.bool or not result.aligned:
        raise NotTraced("what it returns is no boolean that depends on the pair")
    return Graph(result, recorder.fixed, sizes=recorder.sizes)


def _visible(mask: Mask, region: TracedRegion, recorder: Recorder) -> Tensor:
    """mask.visible(region), where parts of the mask may be functions of single pairs."""
    if type(mask) is And:
        return _visible(mask.a, region, recorder) & _visible(mask.b, region, recorder)
    if type(mask) is Or:
        return _visible(mask.a, region, recorder) | _visible(mask.b, region, recorder)
    if type(mask) is Not:
        return ~_visible(mask.a, region, recorder)
    pair = mask.of_pair()
    if pair is None:
        return mask.visible(region)
    node = _of_pair(pair, recorder)
    whole = torch.zeros((1,) * (recorder.dims - 2) + region.size, dtype=torch.bool, device="cpu")
    return recorder.keep("same", (node,), "".join(node.axes), whole)


def _plus(s: Tensor, x: Tensor) -> Tensor:
    """regard.scores.finite.plus, which looks at numbers, of every pair."""
    y, most = s + x, torch.finfo(s.dtype).max
    lost = (y.abs() > most) & (s.abs() <= most) & (x.abs() <= most)
    return torch.where(lost, y.clamp(-most, most), y)


def _of_score(fn: Callable[..., Tensor], recorder: Recorder, s: Tensor, dtype: torch.dtype) -> Node:
    """fn(s, b, h, i, j) of single pairs, in the graph."""
    before = recorder.node_of(s)
    assert isinstance(before, Node)
    score = recorder.score((), dtype)
    return _of_pair(fn, recorder, recorder.keep_of_pair("same", (before,), before.axes, score))


def _of_pair(fn: Callable[..., Tensor], recorder: Recorder, *scores: Tensor) -> Node:
    """fn(*scores, b, h, i, j) of single pairs, in the graph: all its numbers have no axes."""
    index = [
        recorder.keep_of_pair("index", (name,), frozenset(AXES[name]), torch.zeros((), dtype=torch.int64, device="cpu"))
        for name in ("b", "h", "row", "col")
    ]
    recorder.constants = settled(fn)
    with PairIndexing():
        found: Any = fn(*scores, *index)
    recorder.constants = False
    recorder.look_for_functions(found)
    node = recorder.node_of(found)
    if not isinstance(found, Tensor) or found.dim() or not isinstance(node, Node):
        raise NotTraced("its function returns no number that depends on the pair")
    return node
