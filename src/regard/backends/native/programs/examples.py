"""Texts of scores and masks that are described by constants: recorded for examples of the sizes that may change.

The texts of all examples must be the same, else a graph would hold a number of one call. torch.compile has a guard for
a branch by a size, but none for the least of a size and a number: few and many queries and keys are among the examples.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from regard.backends.native.programs.code import NotLowered
from regard.backends.native.programs.graph import NotTraced
from regard.backends.native.programs.lower import lower
from regard.backends.native.programs.recorder import PortableRecorder
from regard.backends.native.programs.structure import graph_of, key_of
from regard.backends.native.programs.text import RecordedModifier, write_graph
from regard.backends.native.programs.trace import trace, trace_mask
from regard.backends.native.programs.trace_features import trace_features
from regard.core.functions import Unknown
from regard.core.positions import Positions
from regard.core.region import Frame
from regard.core.tracing import constant_in_graphs
from regard.core.value import fields_of

NO = "no: "  # what begins the reason why there is no text
CHANGES = "a number that it reads may change from call to call"
# A size that may change: "queries", "keys" or "others", and what it is in the call that is traced, if torch says so.
Changing = tuple[str, int | None]


@constant_in_graphs
def text_of(kind: str, described: tuple[Any, ...], around: tuple[Any, ...]) -> str:
    """What is recorded of a "mask", "modifiers" or "features", or NO and why there is nothing.

    around: batch, heads, queries, keys, the leading axes of the positions of queries and keys, Frame.headed
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        try:
            return _text(kind, described, around)
        except (NotTraced, NotLowered) as why:
            return NO + str(why)
        except Exception as error:  # what Python raises where it runs the function for an example
            return f"{NO}{type(error).__name__} was raised while it was recorded for a graph"


class _Sizes:
    """What sizes that may change are in an example: as in the call that is traced, if no others are given.

    changing: whether there are any
    """

    def __init__(self, queries: int | None = None, keys: int = 0, others: int = 0) -> None:
        self._named = None if queries is None else {"queries": queries, "keys": keys, "others": others}
        self.changing = False

    def __call__(self, size: int | Changing) -> int:
        if isinstance(size, int):
            return size
        self.changing = True
        name, traced = size
        if self._named is None:
            return _IF_UNKNOWN[name] if traced is None else traced
        return self._named[name]

    def most_elements(self, part: Any) -> int:
        """Of all tensors that `part` describes."""
        what, _, held = part
        if what == "tensor":
            return prod(map(self, held))
        return 0 if what == "constant" else max(map(self.most_elements, held), default=0)


_IF_UNKNOWN = {"queries": 37, "keys": 41, "others": 43}
_MANY = tuple((n, n + 2, n + 4) for n in (1 << 20, 1 << 16, 1 << 12, 1 << 9))
_MOST_ELEMENTS = 1 << 22


def _text(kind: str, described: tuple[Any, ...], around: tuple[Any, ...]) -> str:
    """Raises NotTraced, NotLowered, and what functions raise."""
    sizes = _Sizes()
    items, frame = _example(described, around, sizes, number=0)
    text = _recorded(kind, items, frame)
    if kind == "modifiers":
        held = [t for stage in items for t in stage.tensors()]
        lower(graph_of((RecordedModifier(text, tuple(held)),), frame), frame, held, (False,) * len(held))
    try:
        key_of(items)  # what has a key reads numbers and functions alone: torch guards not all of the rest
    except Unknown:
        raise NotTraced("it reads what may change without that torch.compile notices") from None
    others = [_Sizes(53, 59, 61)]
    if sizes.changing:
        many = [_Sizes(*n) for n in _MANY]
        others += [one for one in many if max(map(one.most_elements, described)) <= _MOST_ELEMENTS][:1]
    if any(_recorded(kind, *_example(described, around, one, number=1)) != text for one in others):
        raise NotTraced(CHANGES)
    if sizes.changing and _of_few(kind, described, around) not in (text, None):
        raise NotTraced(CHANGES)
    return text


def _of_few(kind: str, described: tuple[Any, ...], around: tuple[Any, ...]) -> str | None:
    """What is recorded for few queries and keys; None if it cannot run there: a table may be too short."""
    try:
        return _recorded(kind, *_example(described, around, _Sizes(5, 6, 7), number=1))
    except Exception:
        return None


def _recorded(kind: str, items: tuple[Any, ...], frame: Frame) -> str:
    if kind == "mask":
        return write_graph(trace_mask(items[0], frame, PortableRecorder))
    if kind == "features":
        return write_graph(trace_features(items[0], frame, PortableRecorder))
    return write_graph(trace(items, frame, torch.float32, PortableRecorder))


def _example(
    described: tuple[Any, ...], around: tuple[Any, ...], size: _Sizes, number: int
) -> tuple[tuple[Any, ...], Frame]:
    """What is described, around tensors of one number, and a frame."""

    def tensor(dtype: torch.dtype, shape: tuple[int | Changing, ...]) -> Tensor:
        return torch.full((), number, dtype=dtype, device="cpu").expand([size(x) for x in shape])

    batch, heads, nq, nk, q_lead, k_lead, headed = around
    positions = [
        torch.arange(size(count), dtype=torch.int64, device="cpu").expand([*map(size, lead), size(count)])
        for count, lead in ((nq, q_lead), (nk, k_lead))
    ]
    frame = Frame(tuple(map(size, batch)), size(heads), size(nq), size(nk), Positions(*positions), headed)
    return tuple([_made(part, tensor) for part in described]), frame


def _made(part: Any, tensor: Callable[..., Tensor]) -> Any:
    """What a part is a description of. tensor: one of a dtype and a shape."""
    what, of, held = part
    if what == "tensor":
        return tensor(of, held)
    if what == "constant":
        return held
    own = tuple([_made(one, tensor) for one in held])
    if what == "tuple":
        return own
    item = object.__new__(of)
    for name, field in zip(fields_of(item), own, strict=True):
        object.__setattr__(item, name, field)
    return item
