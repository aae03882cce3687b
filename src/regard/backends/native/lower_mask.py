"""Masks as the native kernels read them: intervals or a rule for them, documents, booleans, maps of tiles.

A new mask touches nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.core.problem import Problem
from regard.core.region import Frame
from regard.core.tracing import data_unavailable
from regard.masks.algebra import And, Cover, Everything, Mask
from regard.masks.dense import Dense
from regard.masks.intervals import Interval, IntervalRule
from regard.masks.positional import Window
from regard.masks.ragged import Lengths

_FARTHEST = 1 << 61  # half of kFarthest in native/attention/interval_rule.h: positions come on top
FEW = 16  # rows of a group below which the decoding kernel runs, where a mask written out is linear in the keys


def lower_mask(problem: Problem, tile: tuple[int, int] | None) -> dict[str, Any]:
    """The mask as intervals, as booleans that the caller has, as a tile map with bits, or as intervals and booleans.

    Without tiles, a mask that is known as no interval is written out.
    """
    mask, frame = problem.mask, problem.frame
    if type(mask) is Everything:
        return {}
    intervals = lower_intervals(mask, frame)
    if intervals is not None:
        return intervals
    if type(mask) is Dense:
        return {"allowed": full(frame.lift(mask.allowed))}
    if type(mask) is And:
        for dense, other in ((mask.a, mask.b), (mask.b, mask.a)):
            rest = lower_intervals(other, frame) if type(dense) is Dense else None
            if type(dense) is Dense and rest is not None:
                return {"allowed": full(frame.lift(dense.allowed)), **rest}
    if tile is None or frame.heads // max(problem.key_heads, 1) * frame.nq < FEW:
        return {"allowed": full(mask.visible(frame.region()))}
    return _tile_map(mask, problem, *tile)


def lower_intervals(mask: Mask, frame: Frame) -> dict[str, Any] | None:
    """The keys that each query sees as a rule, or as start and stop; None where neither says it.

    Of documents out of order, whose keys are no intervals, the numbers beside start and stop of the rest.
    """
    rule, span = mask.rule(), frame.positions.span
    if rule is not None and (span is not None or not rule.compares_positions):
        return lower_rule(rule, 0 if span is None else span.q[0] - span.k[0])
    interval = mask.rows(frame)
    if interval is not None or rule is None or rule.q_ids is None:
        return None if interval is None else _table(interval)
    rest = (Window(rule.before, rule.after) & Lengths(rule.keys, rule.queries)).rows(frame)
    return None if rest is None else {**_table(rest), **_documents(rule)}


def lower_rule(rule: IntervalRule, offset: int) -> dict[str, Any]:
    """A rule in indices: query i stands `offset` + i positions after the first key."""
    found: dict[str, Any] = {}
    before, after = distances(rule)
    if rule.before is not None:
        found["first"] = offset - before
    if rule.after is not None:
        found["last"] = offset + after + 1
    for name, counts in (("key_counts", rule.keys), ("query_counts", rule.queries)):
        if counts is not None:
            found[name] = counts.long()[..., None]
    return {**found, **_documents(rule)}


def _documents(rule: IntervalRule) -> dict[str, Tensor]:
    numbers = (("q_documents", rule.q_ids), ("k_documents", rule.k_ids))
    return {name: ids.long() for name, ids in numbers if ids is not None}


def distances(rule: IntervalRule) -> tuple[int, int]:
    """How far back and ahead a rule lets a query see, as numbers that a kernel can add to; 0 where it sets no bound."""
    return min(rule.before or 0, _FARTHEST), min(rule.after or 0, _FARTHEST)


def _table(interval: Interval) -> dict[str, Any]:
    """Intervals as int32 (.., nq, 1): start, stop."""
    start, stop = interval.start[..., None], interval.stop[..., None]
    if data_unavailable(start, stop):
        # nobody has looked: a number of 33 bits must not become a small one, which is right
        most = torch.iinfo(torch.int32).max
        start, stop = start.clamp(-most, most), stop.clamp(-most, most)
    return {"start": start.int(), "stop": stop.int()}


def full(t: Tensor) -> Tensor:
    """With an axis of heads at least."""
    return t.reshape((1,) * (3 - t.dim()) + tuple(t.shape)) if t.dim() < 3 else t


def _tile_map(mask: Mask, problem: Problem, queries: int, keys: int) -> dict[str, Tensor]:
    """Which tiles are NONE (-1) or ALL (-2), and for the rest the number of their bits: never n × n."""
    frame = problem.frame
    tiling = frame.tiling(queries, keys)
    cover = mask.cover(tiling)
    cover = full(cover.expand(*cover.shape[:-2], *tiling.shape))
    tiles = torch.full(cover.shape, -2, dtype=torch.int32).masked_fill(cover == Cover.NONE, -1)
    found = list[Tensor]()
    count = 0
    for n, rows in enumerate(tiling.row_blocks):
        for m, cols in enumerate(tiling.col_blocks):
            some = cover[..., n, m] == Cover.SOME
            if not bool(some.any()):
                continue
            seen = mask.visible(frame.region(rows, cols))
            lead = torch.broadcast_shapes(seen.shape[:-2], cover.shape[:-2])
            if tuple(cover.shape[:-2]) != tuple(lead):  # the mask tells batch elements apart, its cover did not
                cover, tiles = (t.expand(*lead, *tiling.shape).clone() for t in (cover, tiles))
                some = cover[..., n, m] == Cover.SOME
            seen = seen.expand(*lead, rows.stop - rows.start, cols.stop - cols.start)[some]
            found.append(_packed(seen, keys))
            tiles[..., n, m] = tiles[..., n, m].masked_scatter(
                some, torch.arange(count, count + len(seen), dtype=torch.int32)
            )
            count += len(seen)
    bits = torch.cat(found) if found else torch.zeros(1, keys, dtype=torch.int64)
    return {"tiles": tiles, "bits": bits}


def _packed(seen: Tensor, keys: int) -> Tensor:
    """Booleans (tiles, r, c), r ≤ 64, as (tiles, keys) words: bit i of word j is row i, key j."""
    rows = torch.arange(seen.shape[-2])[:, None]
    words = (seen.long() << rows).sum(-2)
    return torch.nn.functional.pad(words, (0, keys - words.shape[-1])).contiguous()
