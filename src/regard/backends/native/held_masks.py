"""Masks whose tensors the kernels read as they are, each as an operand of its own, and what stands beside them."""

from __future__ import annotations

from functools import reduce
from operator import and_

from torch import Tensor

from regard.backends.native.call_operands import HELD
from regard.backends.native.operands import full
from regard.call.of_part import PartMask
from regard.core.region import Frame
from regard.masks.algebra import Everything, Mask
from regard.masks.of_rule import joined


def held_operand(mask: Mask, frame: Frame) -> tuple[str, Tensor | None]:
    """The operand that holds a mask, by name, and its tensor, with an axis of heads at least; None: none does."""
    if type(mask) is PartMask:
        whole = mask.part.frame(frame)
        name, t = held_operand(mask.whole, whole)
        return name, None if t is None else mask.part.of_pairs(t, whole)
    for name, held in HELD.items():
        if type(mask) is held.kind:
            return name, full(held.tensor(mask, frame))
    return "", None


def beside_held(mask: Mask) -> Mask:
    """Those of the masks that & joins that no operand holds: what a plan reads again as intervals at each call."""
    parts = joined(mask)
    rest = [part for part in parts if not _is_held(part)]
    return mask if len(rest) == len(parts) else reduce(and_, rest, Everything())


def _is_held(mask: Mask) -> bool:
    while type(mask) is PartMask:
        mask = mask.whole
    return any(type(mask) is held.kind for held in HELD.values())
