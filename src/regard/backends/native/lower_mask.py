"""Masks as the native kernels read them: intervals or a rule for them, documents, booleans, maps of tiles.

A new mask implements `rows`, `rule` or `visible` (masks/algebra.py); nothing changes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.native.held_masks import held_and_rest, held_tensor
from regard.backends.native.lower_intervals import lower_intervals
from regard.backends.native.mask_program import MaskProgram, hidden_tiles, mask_program, room_of_mask
from regard.backends.native.mask_text import MOST, has_function, why_not_text, with_recorded, write_mask
from regard.backends.native.modifiers.table import programmed
from regard.backends.native.operands import full
from regard.call.of_pairs import check_mask_of_pairs
from regard.call.problem import Problem
from regard.core.region import Frame
from regard.core.shapes import blocks, broadcast_shape
from regard.core.tracing import watched
from regard.core.value import calls_functions_of_others
from regard.masks.algebra import And, Cover, Everything, Mask, seen_by
from regard.masks.dense import Dense
from regard.masks.of_rule import joined

_STRIP = 1 << 20  # pairs that a mask is asked about at a time: 8 MB for each 64-bit number that it computes
# operands of a mask that is a text: the positions of queries and keys, then the tensors of the mask
MASK_TENSORS = tuple(f"mask_{n}" for n in range(2 + MOST))
# below so many rows of a group a mask is written out as booleans, which the kernel of few rows reads; it reads no tiles
MIN_ROWS_FOR_TILES = 16


def lower_mask(problem: Problem, tile: tuple[int, int] | None) -> dict[str, Any]:
    """The mask as intervals, as booleans that the caller has, as a program, as a map of tiles, or several of these.

    Without tiles (in a graph, which serves any) a mask that is known as no interval stays a mask, as a text and
    tensors, which text_calls.py reads where the graph runs; one that has no text is written out, a byte a pair.
    """
    mask, frame = problem.mask, problem.frame
    if tile is not None:
        found = _lowered(_programmed(problem), mask, frame, problem.key_heads, tile)
        assert found is not None
        return found
    if programmed(problem):  # the operator makes the program of the modifiers beside that of the mask
        return mask_as_text(problem)
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


def mask_as_text(problem: Problem) -> dict[str, Any]:
    """The mask in a graph whose operator makes all of the call anew: as a text and tensors, written out if need be."""
    mask, frame = problem.mask, problem.frame
    own = with_recorded(mask, frame)
    if isinstance(own, str) or why_not_text(own) is not None:
        own = Dense(full(mask.visible(frame.region())))
    return _as_text(own, frame)


def lower_in_plan(
    mask: Mask, frame: Frame, key_heads: int, room: int, tile: tuple[int, int], most: float
) -> dict[str, Any] | None:
    """The same of a call that has a plan and no problem.

    room: how many tensors a program of the mask may read. None where a bit for each pair takes more than `most` bytes.
    """
    found = _with_program(mask, frame, key_heads, lambda: room)
    return _lowered(found, mask, frame, key_heads, tile, most)


def _lowered(
    found: _Programmed | None,
    mask: Mask,
    frame: Frame,
    key_heads: int,
    tile: tuple[int, int],
    most: float = math.inf,
) -> dict[str, Any] | None:
    if found is not None and isinstance(found.program, MaskProgram):
        operands = {"mask_code": found.program.rows, **found.program.operands, **found.known}
        return operands | hidden_tiles(found.rest, frame, tile)
    known = _without_pairs(mask, frame)
    if known is not None:
        return known
    if frame.nq * frame.nk // 8 > most:
        return None
    if _few(frame, key_heads):
        return {"allowed": full(seen_by(mask, frame.region(), (frame.nq, frame.nk)))}
    return _tile_map(mask, frame, *tile)


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
    """What _with_program finds of a problem's mask, once."""
    found = _programs.get(problem)
    if found is None:
        room = partial(room_of_mask, problem)
        found = _with_program(problem.mask, problem.frame, problem.key_heads, room)
        if found is not None:
            _programs[problem] = found
    return found


def _with_program(mask: Mask, frame: Frame, key_heads: int, room: Callable[[], int]) -> _Programmed | None:
    """None of a mask that needs no program.

    Of a mask of regard's own a map is better, which serves all heads.
    """
    parts = joined(mask)
    functions = [has_function(part) for part in parts]
    if not any(functions) or 0 in frame.shape:
        return None
    if _few(frame, key_heads) or watched():
        return None
    # where a function's class says no intervals, the whole has none
    kinds = [type(part) for part, function in zip(parts, functions, strict=True) if function]
    silent = any(kind.rows is Mask.rows and kind.rule is Mask.rule for kind in kinds)
    if not silent and _without_pairs(mask, frame) is not None:
        return None
    return _program_beside_intervals(mask, frame, parts, functions, room)


def _program_beside_intervals(
    mask: Mask, frame: Frame, parts: list[Mask], functions: list[bool], room: Callable[[], int]
) -> _Programmed:
    """Of masks that & joins: a program of those that are not intervals. functions: which of them are functions."""
    known: dict[str, Any] | None = None
    own, others = list[Mask](), list[Mask]()
    for part, function in zip(parts, functions, strict=True):
        found = None if function else lower_intervals(part, frame)
        (others if found is None else own).append(part)
        known = known if found is None else found
    if len(own) > 1:  # together
        known = lower_intervals(reduce(and_, own), frame)
    if known is None or not others:
        return _Programmed({}, mask, mask_program(mask, frame, room))
    rest = reduce(and_, others)
    return _Programmed(known, rest, mask_program(rest, frame, room))


def program_of_mask(problem: Problem) -> str:
    """The program of a mask, for `explain`; "" where it has none."""
    found = _programmed(problem)
    return found.program.described() if found is not None and isinstance(found.program, MaskProgram) else ""


def why_no_program(problem: Problem) -> str | None:
    """Why a mask that is a function of Python is no program, as a clause; None where it is one, or needs none."""
    found = _programmed(problem)
    return found.program if found is not None and isinstance(found.program, str) else None


def _few(frame: Frame, key_heads: int) -> bool:
    return frame.heads // max(key_heads, 1) * frame.nq < MIN_ROWS_FOR_TILES


def _without_pairs(mask: Mask, frame: Frame) -> dict[str, Any] | None:
    """The mask as intervals, as tensors that the caller has, or both; None where that does not say it."""
    if type(mask) is Everything:
        return {}
    held, others = held_and_rest(mask)
    intervals = lower_intervals(reduce(and_, others), frame) if others else {}
    if intervals is None:
        return None
    return {name: held_tensor(name, part, frame) for name, part in held.items()} | intervals


def _tile_map(mask: Mask, frame: Frame, queries: int, keys: int) -> dict[str, Tensor]:
    """Which tiles are NONE (-1) or ALL (-2), and for the rest the number of their bits: never n × n."""
    tiling = frame.tiling(queries, keys)
    corner, size = frame.region(slice(0, 1), slice(0, 1)), (min(frame.nq, 1), min(frame.nk, 1))
    cover, one = full(mask.cover(tiling)), full(seen_by(mask, corner, size))
    cover = cover.expand(*broadcast_shape(cover.shape[:-2], one.shape[:-2]), *tiling.shape)
    some = cover == Cover.SOME
    tiles = torch.full(cover.shape, -2, dtype=torch.int32, device="cpu").masked_fill(cover == Cover.NONE, -1)
    # what is never written takes no memory
    bits = torch.empty(max(int(some.sum()), 1), keys, dtype=torch.int64, device="cpu")
    count, strips = 0, list(_strips(some, queries * keys))
    if len(strips) > 1 and calls_functions_of_others(mask):
        most = [max(block.stop - block.start for block in each) for each in zip(*strips, strict=True)]
        check_mask_of_pairs(mask, frame, most[0] * queries, most[1] * keys)
    for n, m in strips:
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
