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
    """Of the masks that & joins those that an operand holds, by its name, one each; and the others."""
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
    """What a plan reads again as intervals at each call: of the masks that & joins those that no operand holds."""
    held, rest = held_and_rest(mask)
    return reduce(and_, rest, Everything()) if held else mask


def held_tensor(mask: Mask, frame: Frame) -> Tensor:
    """What the operand of a mask holds, with an axis of heads at least."""
    if type(mask) is PartMask:
        whole = mask.part.frame(frame)
        return mask.part.of_pairs(held_tensor(mask.whole, whole), whole)
    return full(next(held for held in HELD.values() if type(mask) is held.kind).tensor(mask, frame))


def _operand_of(mask: Mask) -> str | None:
    """The operand that holds a mask, by name; None: no one does."""
    while type(mask) is PartMask:
        mask = mask.whole
    for name, held in HELD.items():
        if type(mask) is held.kind:
            return name
    return None
