"""Tensors indexed by what a pair computes: views, elements of tables, and rows of them."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.programs.code import MOST_INT, NotLowered
from regard.backends.native.programs.graph import Node, name_of
from regard.backends.native.programs.lowering import Lowering
from regard.backends.native.programs.reads import Read, axes_of
from regard.core.dispatch_mode import flat

MOST_NUMBERS = 256  # of a pair that an operation reads or makes


def indexed(low: Lowering, x: Node, table: Any, indices: list[Any]) -> int:
    """table[indices], one number: a view where each is an index of its own axis, else an element of the flat table."""
    if isinstance(table, Node) and table.aligned:
        raise NotLowered("it indexes what it computed for pairs")
    shape = low.values.of(table).shape
    if len(indices) != len(shape) or any(n is None for n in indices):
        raise NotLowered(f"it indexes {len(indices)} of the {len(shape)} axes of a tensor")
    if all(isinstance(n, Node) for n in indices) and (axes := axes_of(indices)):
        return low.load(Read(table, axes=axes))
    return low.element(Read(table, table=True), _place(low, shape, [_index(low, n) for n in indices]))


def rows_indexed(low: Lowering, x: Node) -> list[int]:
    """The numbers of t[indices], and of t[i][j], in the order of the axes that are left."""
    table, indices = x.args[0], list(x.args[1])
    while isinstance(table, Node) and table.several and name_of(table) == "index":
        outer, before = iter(indices), list(table.args[1])
        table = table.args[0]
        before += [None] * (len(table.shape) - len(before))
        indices = [next(outer, None) if n is None else n for n in before]
    indices += [None] * (len(table.shape) - len(indices))
    if isinstance(table, Node) and table.several:
        return _of_each(low, table, indices)
    if isinstance(table, Node) and table.aligned:
        raise NotLowered("it indexes what it computed for pairs")
    if None not in indices:
        return [indexed(low, x, table, indices)]
    shape, read = low.values.of(table).shape, Read(table, table=True)
    return [low.element(read, _place(low, shape, at)) for at in _every(low, shape, indices)]


def numbers_of_each(low: Lowering, x: Node) -> list[int]:
    """The numbers of a node that torch computes once for all queries, or all keys: elements of a table of all."""
    return _of_each(low, x, [None] * len(x.shape))


def _of_each(low: Lowering, x: Node, indices: list[Any]) -> list[int]:
    if not x.whole:
        raise NotLowered("it indexes what it computed for pairs")
    shape, frame = low.values.of(x).shape, low.values.frame.shape
    *batch, h, i, j = shape[: len(frame)]
    if prod(batch) not in (1, prod(frame[:-3])):
        raise NotLowered("what it indexes depends on one of several batch axes")
    own = {n.args[0]: n for n in _indices_in(x)}
    sizes = [prod(batch), h, i, j]
    places = [
        low.as_int(low.value(own[name])) if size > 1 else None
        for name, size in zip(("b", "h", "row", "col"), sizes, strict=True)
    ]
    read, whole = Read(x, table=True), (*sizes, *x.shape)
    return [low.element(read, _place(low, whole, [*places, *at])) for at in _every(low, x.shape, indices)]


def _indices_in(x: Node) -> list[Node]:
    """The indices of a pair that a node is computed of."""
    if x.op == "index":
        return [x]
    return [found for y in flat(x.arguments) if isinstance(y, Node) for found in _indices_in(y)]


def _every(low: Lowering, shape: tuple[int, ...], indices: list[Any]) -> list[list[int | None]]:
    """All indices of the axes that are not indexed, in order, with the others."""
    left = [range(size) for size, n in zip(shape, indices, strict=True) if n is None]
    if prod(map(len, left)) > MOST_NUMBERS:
        raise NotLowered(f"it reads {prod(map(len, left))} numbers of a tensor for each pair; at most {MOST_NUMBERS}")
    known = [None if n is None else _index(low, n) for n in indices]
    own = [None if n is None else _inside(low, n, size) for n, size in zip(known, shape, strict=True)]
    found: list[list[int | None]] = []
    for numbers in product(*left):
        rest = iter(numbers)
        found.append([low.whole(next(rest)) if n is None else n for n in own])
    return found


def _index(low: Lowering, n: Any) -> int:
    """The value of an index, a whole number."""
    if isinstance(n, Node) and n.aligned and not n.several and n.dtype not in (torch.bool, torch.uint8):
        return low.as_int(low.value(n))
    if isinstance(n, Tensor) and n.numel() == 1 and n.dtype not in (torch.bool, torch.uint8):
        return low.whole(int(n))
    raise NotLowered("it indexes by parts of an index, or by several numbers at once")


def _place(low: Lowering, shape: tuple[int, ...], indices: list[int | None]) -> int:
    """The place of an element of a tensor in memory; None: an index of an axis of size 1."""
    found, step = None, prod(shape)
    for index, size in zip(indices, shape, strict=True):
        step //= max(size, 1)
        if index is None:
            continue
        at = _inside(low, index, size)
        at = at if step == 1 else low.integer("INT_MUL", at, low.whole(step))
        found = at if found is None else low.integer("INT_ADD", found, at)
    return low.whole(0) if found is None else found


def _inside(low: Lowering, index: int, size: int) -> int:
    """An index of an axis, counted from its beginning; nothing but its range says that it is one."""
    least, most = low.ranges.get(index, (-MOST_INT, MOST_INT))
    if least < -size or most >= size:
        raise NotLowered(f"it indexes an axis of {size} by {least} to {most}")
    if least >= 0:
        return index
    behind = low.integer("INT_ADD", index, low.whole(size))
    if most < 0:
        return behind
    found = low.code.do("WHERE", low.code.do("INT_LT", index, low.whole(0)), behind, index)
    low.ranges[found] = (0, size - 1)
    return found
