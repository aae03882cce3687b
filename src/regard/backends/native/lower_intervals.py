"""Intervals of keys as the native kernels read them: a rule of few numbers, or a start and a stop for each query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.call_operands import DOCUMENTS, INTERVALS
from regard.backends.native.operands import ONE, KernelOperand
from regard.core.region import Frame
from regard.core.shapes import FARTHEST
from regard.core.tracing import data_unavailable
from regard.masks.algebra import Mask
from regard.masks.intervals import Interval, IntervalRule
from regard.masks.of_rule import mask_of_rule

_MOST_DISTANCE = FARTHEST // 2  # positions come on top


def lower_intervals(mask: Mask, frame: Frame) -> dict[str, Any] | None:
    """The keys that each query sees as a rule, or as start and stop; None where neither says it.

    Of documents out of order, whose keys are no intervals, the numbers beside start and stop of the rest.
    """
    rule, span = mask.rule(), frame.positions.span
    if rule is not None and (span is not None or not rule.compares_positions()):
        return lower_rule(rule, 0 if span is None else span.offset())
    interval = mask.rows(frame)
    if interval is not None or rule is None or rule.q_ids is None:
        return None if interval is None else _table(interval)
    rest = mask_of_rule(rule._replace(q_ids=None, k_ids=None)).rows(frame)
    return None if rest is None else {**_table(rest), **_numbers(rule, DOCUMENTS)}


def lower_rule(rule: IntervalRule, offset: int | tuple[int, ...]) -> dict[str, Any]:
    """A rule in indices: query i stands `offset` + i positions after the first key; a tuple is of each sequence."""
    found: dict[str, Any] = {}
    if isinstance(offset, tuple):
        if rule.compares_positions():
            shifts = [_readable(n) for n in offset]
            found["shifts"] = torch.tensor(shifts, dtype=torch.int64, device="cpu")[:, None]
        offset = 0
    if rule.before is not None:
        found["first"] = _readable(offset - rule.before)
    if rule.after is not None:
        found["last"] = _readable(offset + rule.after + 1)
    return {**found, **_numbers(rule, INTERVALS)}


def _numbers(rule: IntervalRule, read: Iterable[KernelOperand]) -> dict[str, Tensor]:
    """What these operands hold of a rule."""
    found: dict[str, Tensor] = {}  # dict[...]() is nothing that torch.compile traces
    for operand in read:
        numbers = getattr(rule, operand.rule) if operand.rule else None
        if numbers is not None:
            found[operand.name] = numbers.long()[..., None] if operand.axes[-1] is ONE else numbers.long()
    return found


def distances(rule: IntervalRule) -> tuple[int, int]:
    """How far back and ahead a rule lets a query see, as numbers that a kernel can add to; 0 where it sets no bound."""
    return min(rule.before or 0, _MOST_DISTANCE), min(rule.after or 0, _MOST_DISTANCE)


def _readable(bound: int) -> int:
    """A bound of positions as a kernel can add to it: one that is as far beyond every key."""
    return max(-_MOST_DISTANCE, min(bound, _MOST_DISTANCE))


def _table(interval: Interval) -> dict[str, Any]:
    """Intervals as int32 (.., nq, 1): start, stop."""
    start, stop = interval.start[..., None], interval.stop[..., None]
    if data_unavailable(start, stop):
        # nobody has looked: a number of 33 bits must not become a small one, which is right
        most = torch.iinfo(torch.int32).max
        start, stop = start.clamp(-most, most), stop.clamp(-most, most)
    return {"start": start.int(), "stop": stop.int()}
