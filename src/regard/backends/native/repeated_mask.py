"""Masks that each call of a plan lowers itself: a function may see other variables, a tensor hold other numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.backends.native.args import KernelArgs, bytes_of_pairs
from regard.backends.native.call_operands import OF_MASK, PLACED
from regard.backends.native.ffi import library
from regard.backends.native.lower_mask import lower_in_plan
from regard.backends.native.mask_program import room_of_mask
from regard.backends.native.modifiers.base import RepeatedModifiers
from regard.backends.native.modifiers.program import OPERAND_NAMES
from regard.call.problem import Problem
from regard.core.functions import settled
from regard.core.region import Frame
from regard.core.value import fields_of, is_regards_own
from regard.masks.algebra import Mask
from regard.masks.dense import Where


def is_code(mask: Mask) -> bool:
    """Whether a mask may mean something else at the next call, though it looks the same."""
    return not settled(mask.fn) if type(mask) is Where else not is_regards_own(type(mask))


def has_code(mask: Mask) -> bool:
    """Whether a mask, or one that it is made of, is code."""
    if is_code(mask):
        return True
    fields = [getattr(mask, name) for name in fields_of(mask)]
    return any(isinstance(field, Mask) and has_code(field) for field in fields)


class RepeatedMask:
    """The operands of a mask, for each call of a plan anew.

    names  of those that the plan's first call had: no other call reads them
    """

    def __init__(self, problem: Problem, args: KernelArgs, modifiers: RepeatedModifiers | None) -> None:
        taken = () if modifiers is None else modifiers.names
        own = {*OF_MASK, *OPERAND_NAMES}.difference(taken)
        self.names = args.operands.keys() & own
        self._key_heads, self._room, self._placed = problem.key_heads, room_of_mask(problem), "q_at" in args.operands

    def operands(self, frame: Frame, mask: Mask, most: float) -> dict[str, Any] | None:
        """The operands and numbers of a call's mask; None where the call must run without a plan.

        most: bytes that a mask may take which is written out pair by pair
        """
        if mask.shape_error(frame) is not None:
            return None
        try:
            found = lower_in_plan(mask, frame, self._key_heads, self._room, library().tile, most)
        except Exception:  # of a person's code: the call without a plan says which
            return None
        if found is None or bytes_of_pairs(found) > most:
            return None
        return found if self._placed or PLACED.isdisjoint(found) else None

    def leaves_room(self, program: dict[str, Tensor]) -> bool:
        """Whether the operands of a program of modifiers are none of those that masks may take."""
        return program.keys().isdisjoint(OPERAND_NAMES[len(OPERAND_NAMES) - self._room :])
