"""A mask that has a given rule."""

from __future__ import annotations

from regard.masks.algebra import Everything, Mask
from regard.masks.intervals import IntervalRule
from regard.masks.positional import Window
from regard.masks.ragged import Documents, Lengths


def mask_of_rule(rule: IntervalRule) -> Mask:
    """Lets through what the rule says, by regard's own masks.

    >>> mask_of_rule(IntervalRule(before=2, after=0))
    Window(before=2, after=0)
    """
    mask: Mask = Window(rule.before, rule.after) if rule.compares_positions() else Everything()
    lengths = rule.by_sequence()
    if lengths:
        mask = mask & Lengths(**lengths)
    return mask if rule.q_ids is None else mask & Documents(rule.q_ids, rule.k_ids)
