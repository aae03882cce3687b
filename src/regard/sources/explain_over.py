"""explain_over: how attention_over would run a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.backends.base import Backend
from regard.call.arguments import answers_calls_over
from regard.core.shapes import count_of
from regard.masks.algebra import Everything, Mask
from regard.runtime.dispatch import Explanation
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot
from regard.sources.over_call import over_call
from regard.sources.source import Part, Source


@answers_calls_over
def explain_over(
    q: Any,
    source: Source | Iterable[tuple[Any, ...]] | Callable[[], Iterable[tuple[Any, ...]]],
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Tensor | None = None,
    sink: Tensor | float | None = None,
    backend: Backend | None = None,
    ahead: int = 2,
) -> Explanation:
    """How `attention_over` would run this call: the parts it skips, the bytes it holds, and the backend of a part.

    It reads one part of the keys and values, the largest that some query may see, and finds the backend for it, and why
    the others cannot run it. Other parts run there too, unless a reason depends on their numbers (points that are far
    apart under Distance). Arguments and errors as `attention_over`; ValueError for a source that can be read once.

    >>> import regard as rg
    >>> k, v = torch.zeros(2, 9, 8).unbind(0)
    >>> parts = [(k[:3], v[:3]), (k[3:5], v[3:5]), (k[5:], v[5:])]
    >>> found = rg.explain_over(torch.zeros(1, 8), parts, mask=rg.Causal(), positions=torch.tensor([4]))
    >>> dict(found.facts)["parts"]
    '2 read (5 keys), 1 skipped (4 keys): the mask hides all of it'
    """
    q = arrays.tensor(q, "q")
    call = over_call(q, source, score, mask, positions, sink, backend, ahead, None)
    source = call.source
    if not source.rereadable:
        raise ValueError(
            f"the source {source!r} is an iterator: explaining it would use it up. Pass a list, or a function that "
            "returns a new iterator."
        )
    read, skipped = list[int](), list[int]()  # how many keys each part has
    first: Part | None = None
    largest: Part | None = None
    with torch.no_grad(), closing(call.parts()) as parts:
        for part in parts:
            hidden = call.hides(q, part)
            (skipped if hidden else read).append(part.count)
            first = first or part
            if not hidden and (largest is None or part.count > largest.count):
                largest = part
        if largest is None and first is not None:  # the answer has the shape that the first part says
            largest = first
            read.append(skipped.pop(0))
        assert largest is not None, "`parts` raises where there is none"
        k, v = (arrays.tensor(x, name).to(q.device) for x, name in zip(largest.read(), "kv", strict=True))
        found = call.explain(q, largest, k, v)
    held = k.nbytes + v.nbytes
    facts = (
        ("source", repr(source)),
        ("parts", _counted(read, "read", "") + (_skipped(skipped) if skipped else "")),
        (
            "held",
            f"{count_of(held, 'byte', ',')} of keys and values a part, {count_of(ahead + 1, 'part')} "
            f"at a time: {held * (ahead + 1):,}",
        ),
        *((f"a part's {name}" if name in ("call", "score", "mask") else name, text) for name, text in found.facts),
    )
    return Explanation(found.backend, found.reasons, facts)


def _counted(parts: list[int], what: str, why: str) -> str:
    return f"{len(parts)} {what} ({count_of(sum(parts), 'key')}){why}"


def _skipped(parts: list[int]) -> str:
    return ", " + _counted(parts, "skipped", f": the mask hides all of {'it' if len(parts) == 1 else 'them'}")
