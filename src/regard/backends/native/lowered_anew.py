"""What a plan lowers again for each of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from regard.backends.base import Example
from regard.backends.native.args import KernelArgs
from regard.backends.native.call_operands import HELD, INTERVALS
from regard.backends.native.families import KernelFamily, RepeatedSimilarity
from regard.backends.native.held_masks import beside_held
from regard.backends.native.modifiers.base import RepeatedModifiers
from regard.backends.native.modifiers.table import measures_positions
from regard.backends.native.repeated_mask import RepeatedMask, has_code
from regard.call.problem import Problem


@dataclass(frozen=True, eq=False)
class LoweredAnew:
    """What depends on the numbers of a call, or on the code of a person's.

    similarity  what makes the part of the struct of a similarity that is code; None: the first call's serves others
    modifiers   what makes the operands of the score's modifiers; None: they are the caller's own tensors, or shared
    mask        what makes the operands of a mask that is code, or that was written out from the numbers in its tensors
    intervals   whether tensors of the mask, or positions, decide which interval of keys each query sees
    rule        whether the mask has a rule, so that its intervals follow from a few numbers
    places      whether something compares positions, which are operands then
    distances   whether these must lie near each other, since a modifier measures their distances
    checked     whether the mask has tensors, whose shapes are compared with the call's before a seed is drawn
    leaves      addresses of what the first call's struct leads to besides q, k and v, and the caller has, by where they
                stand in the struct
    """

    similarity: RepeatedSimilarity | None
    modifiers: RepeatedModifiers | None
    mask: RepeatedMask | None
    intervals: bool
    rule: bool
    places: bool
    distances: bool
    checked: bool
    leaves: Mapping[int, int]

    @staticmethod
    def of(family: KernelFamily, args: KernelArgs, example: Example) -> LoweredAnew:
        problem, mask = example.problem, example.problem.mask
        similarity = None if family.repeated_part is None else family.repeated_part(problem)
        modifiers = family.repeated(problem)
        placed = ("q_at" in args.operands, measures_positions(problem))
        decided = _decided_by_tensors(problem, args)
        leaves = {at: t.data_ptr() for at, t in family.leaves(problem, args).items() if t is not None}
        written_out = not decided and any(t.data_ptr() not in leaves.values() for t in problem.mask_tensors)
        if written_out or has_code(mask):
            repeated = RepeatedMask(problem, args, modifiers)
            return LoweredAnew(similarity, modifiers, repeated, False, False, *placed, True, leaves)
        rule = beside_held(mask).rule() is not None
        # intervals that have no rule follow from the numbers in positions, where there are any
        by_positions = not rule and "start" in args.operands and example.positions is not None
        intervals = decided or (by_positions and mask.compares_positions())
        return LoweredAnew(similarity, modifiers, None, intervals, rule, *placed, bool(problem.mask_tensors), leaves)

    @property
    def of_mask(self) -> bool:
        """Whether the mask's own tensors are read for each call, by none of their addresses."""
        return self.mask is not None or self.intervals

    def names(self) -> set[str]:
        """The operands that are made for each call."""
        return {name for made in (self.modifiers, self.mask) if made is not None for name in made.names}


def _decided_by_tensors(problem: Problem, args: KernelArgs) -> bool:
    """Whether the mask is intervals that its tensors decide, call by call: Documents, a Prefix a sequence.

    Not lengths, and starts and stops, that the kernels read where they are: then a plan sets an address.
    """
    if "tiles" in args.operands or not HELD.keys().isdisjoint(args.operands):
        return False
    leaves = ((one, args.operands[one.name]) for one in INTERVALS if one.leaf and one.name in args.operands)
    read = {t.data_ptr() for one, t in leaves if one.strided or t.is_contiguous()}
    return any(t.data_ptr() not in read for t in problem.mask_tensors)
