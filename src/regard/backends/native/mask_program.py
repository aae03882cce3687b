"""Masks that a person wrote, as programs that the kernels run a tile at a time: native/steps/mask_program.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.backends.native.modifiers.program import OPERAND_NAMES, operands_of_modifiers
from regard.backends.native.modifiers.table import programmed
from regard.backends.native.operands import full
from regard.backends.native.programs.lower import lower_mask_graph
from regard.backends.native.programs.of_problem import described, made_or_reason
from regard.backends.native.programs.structure import graph_of_mask
from regard.call.problem import Problem
from regard.core.region import Frame
from regard.masks.algebra import Cover, Mask


@dataclass(frozen=True, eq=False)
class MaskProgram:
    """What the kernels read of a mask: rows of code, int32 (n, 6), and operands, by name."""

    rows: Tensor
    operands: dict[str, Tensor]

    def described(self) -> str:
        """For `explain`."""
        return described(self.rows, self.operands)


def mask_program(mask: Mask, frame: Frame, room: Callable[[], int]) -> MaskProgram | str:
    """A mask, a call's or a part of it, as a program; or why there is none, as a clause.

    room: how many tensors it may read
    """
    with torch.no_grad():
        program = made_or_reason(lambda: lower_mask_graph(graph_of_mask(mask, frame), frame, mask.tensors()))
    if isinstance(program, str):
        return program
    if program.operands and len(program.operands) > room():
        return f"it reads {len(program.operands)} tensors; the kernels have room for {room()}"
    return MaskProgram(program.rows, dict(zip(OPERAND_NAMES[::-1], program.operands, strict=False)))


def room_of_mask(problem: Problem) -> int:
    """How many tensors a program of a problem's mask may read: the last of all operands, modifiers take the first."""
    return len(OPERAND_NAMES) - (operands_of_modifiers(problem) if programmed(problem) else 0)


def hidden_tiles(mask: Mask, frame: Frame, tile: tuple[int, int]) -> dict[str, Tensor]:
    """A map of the tiles that a mask is known to hide, for a program of it; nothing where it hides none."""
    if type(mask).cover is Mask.cover:  # it says so of no tile
        return {}
    tiling = frame.tiling(*tile)
    hidden = full(mask.cover(tiling)) == Cover.NONE
    if not bool(hidden.any()):
        return {}
    hidden = hidden.expand(*hidden.shape[:-2], *tiling.shape)
    return {"tiles": torch.full(hidden.shape, -2, dtype=torch.int32, device="cpu").masked_fill(hidden, -1)}
