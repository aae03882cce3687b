"""Masks as the native kernels read them: intervals or a rule for them, documents, booleans, maps of tiles.

A new mask touches nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.native.call_operands import DOCUMENTS, INTERVALS
from regard.backends.native.held_masks import held_operand
from regard.backends.native.mask_program import MaskProgram, hidden_tiles, mask_program
from regard.backends.native.mask_text import MOST, has_function, why_not_text, with_recorded, write_mask
from regard.backends.native.modifiers.table import programmed
from regard.backends.native.operands import ONE, KernelOperand, full
from regard.call.problem import Problem
from regard.core.region import Frame
from regard.core.shapes import FARTHEST, blocks
from regard.core.tracing import data_unavailable, watched
from regard.masks.algebra import And, Cover, Everything, Mask
from regard.masks.dense import Dense
from regard.masks.intervals import Interval, IntervalRule
from regard.masks.of_rule import joined, mask_of_rule

_MOST_DISTANCE = FARTHEST // 2  # positions come on top
_STRIP = 1 << 20  # pairs that a mask is asked about at a time: 8 MB for each 64-bit number that it computes
# operands of a mask that is a text: the positions of queries and keys, then the tensors of the mask
MASK_TENSORS = tuple(f"mask_{n}" for n in range(2 + MOST))
FEW = 16  # rows of a group below which the decoding kernel runs, where a mask written out is linear in the keys


def lower_mask(problem: Problem, tile: tuple[int, int] | None) -> dict[str, Any]:
    """The mask as intervals, as booleans that the caller has, as a program, as a map of tiles, or several of these.

    Without tiles (in a graph, which serves any) a mask that is known as no interval stays a mask, as a text and
    tensors, which text_calls.py reads where the graph runs; one that has no text is written out, a byte a pair.
    """
    mask, frame = problem.mask, problem.frame
    if tile is not None:
        found = _programmed(problem)
        if found is None or not isinstance(found.program, MaskProgram):
            return _lower(mask, frame, problem.key_heads, tile)
        operands = {"mask_code": found.program.rows, **found.program.operands, **found.known}
        return operands | hidden_tiles(found.rest, frame, tile)
    if programmed(problem):  # the operator makes the program of the modifiers beside that of the mask
        own = with_recorded(mask, frame)
        if isinstance(own, str) or why_not_text(own) is not None:
            own = Dense(full(mask.visible(frame.region())))
        return _as_text(own, frame)
    known = _without_pairs(mask, frame)
    if known is not None:
        return known
    own = with_recorded(mask, frame)
    if isinstance(own, Mask) and why_not_text(own) is None:
        return _as_text(own, frame)
    if type(mask) is And:
        for pairs, other in ((mask.a, mask.b), (mask.b, mask.a)):
            rest = lower_intervals(other, frame)
            if rest is not None:
                return {"allowed": full(pairs.visible(frame.region())), **rest}
    return {"allowed": full(mask.visible(frame.region()))}


def _as_text(mask: Mask, frame: Frame) -> dict[str, Any]:
    text, tensors = write_mask(mask, frame)
    tensors = (frame.positions.q, frame.positions.k, *tensors)
    return {"mask_text": text, **dict(zip(MASK_TENSORS, tensors, strict=False))}


@dataclass(frozen=True, eq=False)
class _Programmed:
    """A mask with a function of Python: known & rest, where `known` is intervals, as lower_intervals writes them.

    program: of the rest, or why there is none
    """

    known: dict[str, Any]
    rest: Mask
    program: MaskProgram | str


_programs: WeakKeyDictionary[Problem, _Programmed] = WeakKeyDictionary()


def _programmed(problem: Problem) -> _Programmed | None:
    """None of a mask that needs no program.

    Of a mask of regard's own a map is better: it serves all heads, and plans keep it.
    """
    found = _programs.get(problem)
    if found is not None:
        return found
    mask, frame = problem.mask, problem.frame
    parts = joined(mask)
    functions = [has_function(part) for part in parts]
    if not any(functions) or 0 in frame.shape:
        return None
    if _few(frame, problem.key_heads) or watched():
        return None
    # where a function's class says no intervals, the whole has none
    kinds = [type(part) for part, function in zip(parts, functions, strict=True) if function]
    silent = any(kind.rows is Mask.rows and kind.rule is Mask.rule for kind in kinds)
    if not silent and _without_pairs(mask, frame) is not None:
        return None
    _programs[problem] = found = _program_beside_intervals(problem, parts, functions)
    return found


def _program_beside_intervals(problem: Problem, parts: list[Mask], functions: list[bool]) -> _Programmed:
    """Of masks that & joins: a program of those that are not intervals. functions: which of them are functions."""
    known: dict[str, Any] | None = None
    own, others = list[Mask](), list[Mask]()
    for part, function in zip(parts, functions, strict=True):
        found = None if function else lower_intervals(part, problem.frame)
        (others if found is None else own).append(part)
        known = known if found is None else found
    if len(own) > 1:  # together
        known = lower_intervals(reduce(and_, own), problem.frame)
    if known is None or not others:
        return _Programmed({}, problem.mask, mask_program(problem.mask, problem))
    rest = reduce(and_, others)
    return _Programmed(known, rest, mask_program(rest, problem))


def program_of_mask(problem: Problem) -> str:
    """The program of a mask, for `explain`; "" where it has none."""
    found = _programmed(problem)
    return found.program.described() if found is not None and isinstance(found.program, MaskProgram) else ""


def why_no_program(problem: Problem) -> str | None:
    """Why a mask that is a function of Python is no program, as a clause; None where it is one, or needs none."""
    found = _programmed(problem)
    return found.program if found is not None and isinstance(found.program, str) else None


def _few(frame: Frame, key_heads: int) -> bool:
    return frame.heads // max(key_heads, 1) * frame.nq < FEW


def _lower(mask: Mask, frame: Frame, key_heads: int, tile: tuple[int, int]) -> dict[str, Any]:
    known = _without_pairs(mask, frame)
    if known is not None:
        return known
    if _few(frame, key_heads):
        return {"allowed": full(mask.visible(frame.region()))}
    return _tile_map(mask, frame, *tile)


def _without_pairs(mask: Mask, frame: Frame) -> dict[str, Any] | None:
    """The mask as intervals, as tensors that the caller has, or both; None where that does not say it."""
    if type(mask) is Everything:
        return {}
    found: dict[str, Any] = {}
    others: list[Mask] = []
    for part in joined(mask):
        name, t = held_operand(part, frame)
        if t is None or name in found:
            others.append(part)
        else:
            found[name] = t
    intervals = lower_intervals(reduce(and_, others), frame) if others else {}
    return None if intervals is None else {**found, **intervals}


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


def _tile_map(mask: Mask, frame: Frame, queries: int, keys: int) -> dict[str, Tensor]:
    """Which tiles are NONE (-1) or ALL (-2), and for the rest the number of their bits: never n × n."""
    tiling = frame.tiling(queries, keys)
    cover, one = full(mask.cover(tiling)), full(mask.visible(frame.region(slice(0, 1), slice(0, 1))))
    cover = cover.expand(*torch.broadcast_shapes(cover.shape[:-2], one.shape[:-2]), *tiling.shape)
    some = cover == Cover.SOME
    tiles = torch.full(cover.shape, -2, dtype=torch.int32, device="cpu").masked_fill(cover == Cover.NONE, -1)
    # what is never written takes no memory
    bits = torch.empty(max(int(some.sum()), 1), keys, dtype=torch.int64, device="cpu")
    count = 0
    for n, m in _strips(some, queries * keys):
        rows = slice(n.start * queries, min(n.stop * queries, frame.nq))
        cols = slice(m.start * keys, min(m.stop * keys, frame.nk))
        r, c = rows.stop - rows.start, cols.stop - cols.start
        seen = full(mask.visible(frame.region(rows, cols)))
        words = _packed(seen.expand(*seen.shape[:-2], r, c), queries, keys)
        every = torch.ones(max(r, c), dtype=torch.bool, device="cpu")
        whole = _packed(every[:r, None], queries, 1) * _packed(every[None, :c], 1, keys)
        # the mask is known better now than its cover is
        none, all_ = (words == 0).all(-1), (words == whole).all(-1)
        here, asked = tiles[..., n, m], some[..., n, m]
        here.masked_fill_(asked & none, -1)
        mixed = asked & ~none & ~all_
        found = words.expand(*mixed.shape, keys)[mixed]
        here[mixed] = torch.arange(count, count + len(found), dtype=torch.int32, device="cpu")
        bits[count : count + len(found)] = found
        count += len(found)
    return {"tiles": tiles, "bits": bits[: max(count, 1)]}


def _strips(some: Tensor, pairs: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows and of keys that hold every tile of which `some` is true; pairs: of a tile."""
    wanted = some.flatten(0, -3).any(0)
    most = max(_STRIP // max(pairs * math.prod(some.shape[:-2]), 1), 1)
    height, width = (max(size, 1) for size in (most // max(wanted.shape[1], 1), min(most, wanted.shape[1])))
    for n in blocks(wanted.shape[0], height):
        for m in blocks(wanted.shape[1], width):
            columns = wanted[n, m].any(0).nonzero()
            if len(columns):
                yield n, slice(m.start + int(columns[0]), m.start + int(columns[-1]) + 1)


def _packed(seen: Tensor, queries: int, keys: int) -> Tensor:
    """Pairs (.., r, c) as a word for each key of each tile (.., R, C, keys): bit i is row i, at most 64."""
    r, c = seen.shape[-2:]
    padded = pad(seen.to(torch.uint8), (0, -c % keys, 0, -r % queries)).unflatten(-2, (-1, queries))
    eights = pad(padded, (0, 0, 0, -queries % 8)).unflatten(-2, (-1, 8))
    byte = eights[..., 7, :]
    for n in range(6, -1, -1):
        byte = byte + byte + eights[..., n, :]
    words = sum(
        (byte[..., n, :].long() << 8 * n for n in range(byte.shape[-2])),
        start=torch.tensor(0, dtype=torch.int64, device="cpu"),
    )
    return words.unflatten(-1, (-1, keys))
