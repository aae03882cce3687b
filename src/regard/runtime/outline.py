"""Outlines: what stays of a call's values when the numbers in their tensors are left out, to compare structures by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.core.dropout import Dropout
from regard.core.positions import Positions
from regard.core.value import Value, names
from regard.masks.algebra import Mask


def plain(t: Tensor) -> bool:
    """Whether the kernels can read a tensor where it lies."""
    return t.is_cpu and t.layout is _STRIDED and not t.is_neg()


_STRIDED = torch.strided


class Open(Exception):
    """The value holds something whose meaning may change while it looks the same: a function, a foreign class."""


def outline(item: Any, leaves: list[Tensor]) -> Any:
    """What stays of a value when its tensors are reduced to dtype, shape and strides; they go to `leaves`."""
    kind = type(item)
    if kind in _CONSTANTS:
        return item
    parts = _parts.get(kind)
    if parts is not None:
        of_part = _of_tokens if kind in _per_token else outline
        return (kind, *[of_part(getattr(item, name), leaves) for name in parts]) if parts else kind
    if kind is tuple:
        return tuple([outline(part, leaves) for part in item])
    if isinstance(item, Tensor) and plain(item):
        leaves.append(item)
        return item.dtype, item.shape, item.stride()
    if isinstance(item, Value) and kind.__module__.startswith("regard."):
        _parts[kind] = names(kind)
        if issubclass(kind, Mask) and kind.per_token:
            _per_token.add(kind)
        return outline(item, leaves)
    raise Open


def outline_of_positions(positions: Any) -> Any:
    """Whether positions count up by one, known without looking; else the batch axes of their tensors."""
    if type(positions) is not Positions:
        raise Open
    return positions.span is not None or (positions.q.shape[:-1], positions.k.shape[:-1])


def outline_of_dropout(dropout: Any) -> Any:
    """Its probability; None where nothing is dropped. The seed is of a call."""
    if type(dropout) is not Dropout:
        raise Open
    return dropout.p or None


def _of_tokens(item: Any, leaves: list[Tensor]) -> Any:
    """The same of a tensor with a number for each query or key: it does not say how many there are."""
    if not isinstance(item, Tensor):
        return outline(item, leaves)
    if not plain(item):
        raise Open
    leaves.append(item)
    return item.dtype, item.shape[:-1]


_CONSTANTS = frozenset({int, float, bool, type(None)})
_parts: dict[type, tuple[str, ...]] = {}  # of regard's own classes
_per_token = set[type]()
