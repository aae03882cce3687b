"""Masks as a text and tensors, for graphs: what is no interval is not written out there, but read again where it runs.

A map of tiles cannot be made in a graph: it has as many bits as the numbers of the mask say, and tiles of one
instruction set. So the operator is given the mask itself: Or(Causal(),Dilated(3)) is ["Or",["Causal"],["Dilated",3]],
a tensor stands there as its number in the list of tensors, ["Dense",[0]].
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from regard.core.region import Frame
from regard.core.tracing import symbolic
from regard.core.value import Value
from regard.masks.algebra import And, Everything, Mask, Not, Or
from regard.masks.dense import Dense
from regard.masks.positional import Causal, Dilated, Prefix, Window
from regard.masks.ragged import LENGTHS_FIELDS, Documents, Lengths

_FIELDS: dict[type, tuple[str, ...]] = {  # by type, not isinstance: a subclass may mean something else
    And: ("a", "b"),
    Or: ("a", "b"),
    Not: ("a",),
    Everything: (),
    Causal: (),
    Window: ("before", "after"),
    Prefix: ("n",),
    Dilated: ("step",),
    Lengths: LENGTHS_FIELDS,
    Documents: ("q_ids", "k_ids"),
    Dense: ("allowed",),
}
_CLASSES: dict[str, Any] = {kind.__name__: kind for kind in _FIELDS}
MOST = 6  # tensors that a mask in a graph may hold


def why_not_text(mask: Mask) -> str | None:
    """Why a mask cannot be written as a text, as a clause; None if it can."""
    unknown = _unknown(mask)
    if unknown is not None:
        return unknown
    return f"it holds more than {MOST} tensors" if len(mask.tensors()) > MOST else None


def _unknown(mask: Mask) -> str | None:
    names = _FIELDS.get(type(mask))
    if names is None:
        return f"{type(mask).__name__} is a function of Python"
    for name in names:
        item = getattr(mask, name)
        if isinstance(item, Mask):
            found = _unknown(item)
            if found is not None:
                return found
        elif isinstance(item, int) and symbolic(item):
            return f"{type(mask).__name__}.{name} changes from call to call"
    return None


def write_mask(mask: Mask, frame: Frame) -> tuple[str, list[Tensor]]:
    """A mask that has a text, as that text and its tensors, which have an axis of heads where they are for pairs."""
    tensors: list[Tensor] = []
    return _written(mask, frame, tensors), tensors


def _written(item: Any, frame: Frame, tensors: list[Tensor]) -> str:
    """The text of a mask or of a field; its tensors are appended to `tensors`."""
    if isinstance(item, Mask):
        parts = [f'"{type(item).__name__}"']
        for name in _FIELDS[type(item)]:
            part = getattr(item, name)
            parts.append(_written(frame.lift(part) if type(item) is Dense else part, frame, tensors))
        return f"[{','.join(parts)}]"
    if isinstance(item, Tensor):
        tensors.append(item)
        return f"[{len(tensors) - 1}]"
    return "null" if item is None else str(item)


def read_mask(text: str, tensors: list[Tensor]) -> Mask:
    """The mask that write_mask wrote, around these tensors."""
    mask = _read(json.loads(text), tensors)
    assert isinstance(mask, Mask)
    return mask


def _read(part: Any, tensors: list[Tensor]) -> Value | Tensor | int | None:
    if not isinstance(part, list):
        return part
    if isinstance(part[0], int):
        return tensors[part[0]]
    return _CLASSES[part[0]](*(_read(each, tensors) for each in part[1:]))
