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


def held_and_rest(mask: Mask) -> tuple[dict[str, Mask], list[Mask]]:
    """The masks that & joins: those that operands hold, one for each name of an operand, and the others."""
    held: dict[str, Mask] = {}  # dict[...]() is nothing that torch.compile traces
    rest: list[Mask] = []
    for part in joined(mask):
        name = _operand_of(part)
        if name is None or name in held:
            rest.append(part)
        else:
            held[name] = part
    return held, rest


def beside_held(mask: Mask) -> Mask:
    """The masks that & joins without those that operands hold: what a plan reads again as intervals at each call."""
    held, rest = held_and_rest(mask)
    return reduce(and_, rest, Everything()) if held else mask


def held_tensor(name: str, mask: Mask, frame: Frame) -> Tensor:
    """What the operand of this name holds of a mask, with an axis of heads at least."""
    if type(mask) is PartMask:
        whole = mask.part.frame(frame)
        return mask.part.of_pairs(held_tensor(name, mask.whole, whole), whole)
    return full(HELD[name].tensor(mask, frame))


def _operand_of(mask: Mask) -> str | None:
    """The name of the operand that holds a mask; None if none does."""
    while type(mask) is PartMask:
        mask = mask.whole
    return next((name for name, held in HELD.items() if type(mask) is held.kind), None)
