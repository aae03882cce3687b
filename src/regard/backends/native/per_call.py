"""The parts of a call's struct that a plan computes for each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from regard.backends.base import Example
from regard.backends.native.args import KernelArgs
from regard.backends.native.call_operands import HELD, INTERVALS
from regard.backends.native.families import KernelFamily, RepeatedSimilarity
from regard.backends.native.held_masks import beside_held
from regard.backends.native.lower_intervals import distances
from regard.backends.native.modifiers.base import RepeatedModifiers
from regard.backends.native.modifiers.table import measures_positions
from regard.backends.native.repeated_mask import RepeatedMask, has_code
from regard.call.problem import Problem


class RuleBounds(NamedTuple):
    """How far back and ahead the rule of a mask lets a query see; 0 where it sets no bound.

    positional: whether it sets one.
    """

    before: int
    after: int
    positional: bool


@dataclass(frozen=True, eq=False)
class PerCall:
    """What depends on the numbers in the tensors of a call, or on code that is not regard's.

    similarity  what makes the part of the struct of a similarity that is code; None: the first call's serves others
    modifiers   what makes the operands of the score's modifiers; None: they are the caller's own tensors, or shared
    mask        what makes the operands of a mask that is code, or that was written out from the numbers in its tensors
    rule        of the mask beside the tensors that kernels read where they are: its bounds; None: it has no rule
    intervals_from_tensors  whether tensors of the mask, or positions, decide which interval of keys each query sees
    needs_positions         whether something compares positions, which are operands then
    positions_must_be_near  each other, since a modifier measures their distances
    checks_mask_shape       whether the mask has tensors, whose shapes are checked before a seed is drawn
    leaves      the caller's tensors besides q, k and v that the first call's struct leads to: their addresses, by the
                offset of the address in the struct
    """

    similarity: RepeatedSimilarity | None
    modifiers: RepeatedModifiers | None
    mask: RepeatedMask | None
    rule: RuleBounds | None
    intervals_from_tensors: bool
    needs_positions: bool
    positions_must_be_near: bool
    checks_mask_shape: bool
    leaves: Mapping[int, int]

    @staticmethod
    def of(family: KernelFamily, args: KernelArgs, example: Example) -> PerCall:
        problem, mask = example.problem, example.problem.mask
        similarity = None if family.repeated_part is None else family.repeated_part(problem)
        modifiers = family.repeated(problem)
        placed = ("q_at" in args.operands, measures_positions(problem))
        decided = _decided_by_tensors(problem, args)
        leaves = {at: t.data_ptr() for at, t in family.leaves(problem, args).items() if t is not None}
        written_out = not decided and any(t.data_ptr() not in leaves.values() for t in problem.mask_tensors)
        if written_out or has_code(mask):
            repeated = RepeatedMask(problem, args, modifiers)
            return PerCall(similarity, modifiers, repeated, None, False, *placed, True, leaves)
        rule = beside_held(mask).rule()
        # intervals that have no rule follow from the numbers in positions, where there are any
        by_positions = rule is None and "start" in args.operands and example.positions is not None
        intervals = decided or (by_positions and mask.compares_positions())
        bounds = None if rule is None else RuleBounds(*distances(rule), rule.compares_positions())
        return PerCall(similarity, modifiers, None, bounds, intervals, *placed, bool(problem.mask_tensors), leaves)

    @property
    def of_mask(self) -> bool:
        """Whether the mask's tensors are lowered for each call, so that the struct has no address of them."""
        return self.mask is not None or self.intervals_from_tensors

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
