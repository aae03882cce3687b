"""Graphs of modifiers and masks, traced once for all calls that differ in nothing that these see while traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.programs.graph import Graph
from regard.backends.native.programs.trace import trace, trace_mask
from regard.backends.native.programs.trace_features import trace_features
from regard.call.part import PartOfCall
from regard.core.functions import NUMBERS, Unknown, function_key
from regard.core.region import Frame
from regard.core.value import Value, attributes_of, is_regards_own, names, number_key
from regard.masks.algebra import Mask
from regard.scores.algebra import Modifier
from regard.scores.elementwise import Elementwise

_MOST = 256
_graphs: dict[Any, Graph] = {}


def graph_of(stages: Sequence[Modifier], frame: Frame) -> Graph:
    """The graph of modifiers, which may be kept from another call. Raises NotTraced."""
    return _kept(tuple(stages), frame, lambda: trace(stages, frame, torch.float32))


def graph_of_mask(mask: Mask, frame: Frame) -> Graph:
    """The graph of a mask, which may be kept from another call. Raises NotTraced."""
    return _kept(mask, frame, lambda: trace_mask(mask, frame))


def graph_of_features(similarity: Elementwise, frame: Frame) -> Graph:
    """The graph of what a feature adds to scores, kept as the others are. frame: (heads, 1, 1, d). Raises NotTraced."""
    return _kept((similarity, *frame.shape), frame, lambda: trace_features(similarity, frame))


def _kept(item: Any, frame: Frame, traced: Callable[[], Graph]) -> Graph:
    try:
        at = frame.positions
        sizes = frame.batch, frame.heads, *sizes_traced(frame.nq, frame.nk), frame.headed
        key = key_of(item), sizes, at.q.dim(), at.k.dim()
        found = _graphs.get(key)
    except (Unknown, TypeError):
        return traced()
    if found is None:
        found = traced()
        if found.fixed and _key_or_none(item) == key[0]:  # else another thread changed what it read meanwhile
            if len(_graphs) >= _MOST:
                _graphs.clear()
            _graphs[key] = found
    return found


def sizes_traced(nq: int, nk: int) -> tuple[Any, ...]:
    """What a graph follows from of the numbers of queries and keys, and the dtype of quotients of whole numbers."""
    return min(nq, 2), min(nk, 3), nq == nk, torch.get_default_dtype()


def _key_or_none(item: Any) -> Any:
    try:
        return key_of(item)
    except Unknown:
        return None


def key_of(item: Any) -> Any:
    """What a modifier, or a field of it, is while it is traced: not the numbers in its tensors. Raises Unknown."""
    if isinstance(item, Tensor):
        return item.dtype, tuple(item.shape)
    if isinstance(item, tuple):
        return tuple(key_of(part) for part in item)
    if isinstance(item, PartOfCall):
        return item  # what is equal to it has the same ranges; those of tensors are the same tensors
    if isinstance(item, Value):
        kind = type(item)
        code = () if is_regards_own(kind) else _read_by(kind)
        fields = names(kind)
        besides = [(name, x) for name, x in attributes_of(item).items() if name not in fields]
        own = [key_of(getattr(item, name)) for name in fields]
        return kind, code, *own, *((name, key_of(x)) for name, x in besides)
    if isinstance(item, NUMBERS):
        return number_key(item)
    if isinstance(item, FunctionType):
        return function_key(item)
    if isinstance(item, torch.dtype):
        return item
    raise Unknown


# Methods that no value runs while it is traced: dataclasses make most of them.
_NEVER_RUN = frozenset(
    f"__{name}__"
    for name in (
        *("init", "post_init", "init_subclass", "repr", "eq", "hash", "setattr", "delattr"),
        *("getstate", "setstate", "replace", "annotate", "annotate_func"),
    )
)


def _read_by(kind: type) -> Any:
    """The functions and numbers of a class, and the numbers outside of it that they read. Raises Unknown."""
    found: list[Any] = []
    for base in kind.__mro__:
        if is_regards_own(base) or base is object:
            continue
        for name, member in vars(base).items():
            special = name.startswith("__") and (name in _NEVER_RUN or not isinstance(member, FunctionType))
            if special or name.startswith("_abc_"):
                continue
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            found.append(key_of(member.fget if isinstance(member, property) else member))
    return tuple(found)
