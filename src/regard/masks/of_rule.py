"""A mask that has a given rule, and the rule that part of a mask is."""

from __future__ import annotations

from functools import reduce
from operator import and_

from regard.masks.algebra import And, Everything, Mask
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


def rule_and_rest(mask: Mask) -> tuple[IntervalRule, Mask]:
    """A mask as a rule of distances and lengths of keys, & the rest: those of the masks that & joins that have no rule.

    >>> from regard.masks.positional import Causal, Prefix
    >>> rule_and_rest(Causal() & Prefix(2))
    (IntervalRule(before=None, after=0, keys=None, queries=None, first=None, q_ids=None, k_ids=None), Prefix(n=2))
    """
    rule, others = IntervalRule(), list[Mask]()
    for part in joined(mask):
        own = part.rule()
        both = None if own is None or own.queries is not None or own.q_ids is not None else rule.both(own)
        if both is None:
            others.append(part)
        else:
            rule = both
    return rule, reduce(and_, others, Everything())


def joined(mask: Mask) -> list[Mask]:
    """The masks that & joins, from left to right."""
    found: list[Mask] = []  # list[...]() is nothing that torch.compile traces
    left = [mask]
    while left:
        part = left.pop()
        if type(part) is And:
            left += [part.b, part.a]
        else:
            found.append(part)
    return found
