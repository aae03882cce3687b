"""Masks as a text and tensors, for graphs: what is no interval is not written out there, but read again where it runs.

A map of tiles cannot be made in a graph: it has as many bits as the numbers of the mask say, and tiles of one
instruction set. So the operator is given the mask itself: Or(Causal(),Dilated(3)) is ["Or",["Causal"],["Dilated",3]],
a tensor stands there as its number in the list of tensors, ["Dense",[0]]. A function of Python is recorded first: see
programs/text.py.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from torch import Tensor

from regard.backends.native.programs.record import record_mask
from regard.backends.native.programs.text import RecordedMask
from regard.call.of_part import PartMask
from regard.core.region import Frame
from regard.core.tracing import symbolic
from regard.core.value import Value, fields_of, is_regards_own
from regard.masks.algebra import And, Mask, Not, Or
from regard.masks.dense import Dense, Where

MOST = 6  # tensors that a mask in a graph may hold


def why_not_text(mask: Mask) -> str | None:
    """Why a mask cannot be written as a text, as a clause; None if it can."""
    unknown = _unknown(mask)
    if unknown is not None:
        return unknown
    return f"it holds more than {MOST} tensors" if len(mask.tensors()) > MOST else None


def has_function(mask: Mask) -> bool:
    """Whether a mask, or one that it is made of, is a function of Python or a class of a person's own."""
    if type(mask) is And or type(mask) is Or:
        return has_function(mask.a) or has_function(mask.b)
    if type(mask) is Not:
        return has_function(mask.a)
    if type(mask) is PartMask:
        return has_function(mask.whole)
    return type(mask) in (Where, RecordedMask) or _is_function(mask)


def _unknown(mask: Mask) -> str | None:
    """Why the fields of a mask, and of those in it, do not say what it is: regard's own masks of plain fields do."""
    if _is_function(mask):
        return f"{type(mask).__name__} is a function of Python"
    for name in fields_of(mask):
        item = getattr(mask, name)
        if isinstance(item, Mask):
            found = _unknown(item)
            if found is not None:
                return found
        elif isinstance(item, int) and symbolic(item):
            return f"{type(mask).__name__}.{name} changes from call to call"
    return None


def _is_function(mask: Mask) -> bool:
    """Whether code says what a mask is: a class of others, or a field that is no mask, tensor or whole number."""
    if type(mask) is RecordedMask:
        return False
    if not is_regards_own(type(mask)):
        return True
    items = [getattr(mask, name) for name in fields_of(mask)]
    return not all(item is None or isinstance(item, (Mask, Tensor, int)) for item in items)


def with_recorded(mask: Mask, frame: Frame) -> Mask | str:
    """The mask with a RecordedMask in the place of each function of Python; or why that cannot be, as a clause."""
    if type(mask) is Not:
        inner = with_recorded(mask.a, frame)
        return inner if isinstance(inner, str) else Not(inner)
    if type(mask) is And or type(mask) is Or:
        a, b = with_recorded(mask.a, frame), with_recorded(mask.b, frame)
        if isinstance(a, str) or isinstance(b, str):
            return a if isinstance(a, str) else b
        return And(a, b) if type(mask) is And else Or(a, b)
    return record_mask(mask, frame) if _is_function(mask) else mask


def write_mask(mask: Mask, frame: Frame) -> tuple[str, list[Tensor]]:
    """A mask that has a text, as that text and its tensors, which have an axis of heads where they are for pairs."""
    tensors: list[Tensor] = []
    return _written(mask, frame, tensors), tensors


def _written(item: Any, frame: Frame, tensors: list[Tensor]) -> str:
    """The text of a mask or of a field; its tensors are appended to `tensors`."""
    if isinstance(item, Mask):
        parts = [f'"{type(item).__name__}"']
        for name in fields_of(item):
            part = getattr(item, name)
            parts.append(_written(frame.lift(part) if type(item) is Dense else part, frame, tensors))
        return f"[{','.join(parts)}]"
    if isinstance(item, Tensor):
        tensors.append(item.detach())  # no mask has a gradient
        return f"[{len(tensors) - 1}]"
    if isinstance(item, tuple):
        return f"[{','.join([_written(part, frame, tensors) for part in item])}]"  # pyright: ignore
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
    if part[0] == RecordedMask.__name__:
        return RecordedMask(json.dumps(part[1]), tuple([tensors[n] for (n,) in part[2]]))
    return _class_of(part[0])(*(_read(each, tensors) for each in part[1:]))


@cache
def _class_of(name: str) -> Any:
    """The mask of regard's that has this name."""
    found: list[type[Mask]] = [Mask]
    for kind in found:  # which grows meanwhile
        found += kind.__subclasses__()
    return next(kind for kind in found if kind.__name__ == name and is_regards_own(kind))
