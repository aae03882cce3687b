"""Several numbers of a pair, such as a row of a table: each is a value of the code, until they are reduced to one."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.programs.code import NotLowered
from regard.backends.native.programs.dtypes import MOVED, check_dtypes
from regard.backends.native.programs.graph import Node, name_of
from regard.backends.native.programs.indexing import MOST_NUMBERS, numbers_of_each, rows_indexed
from regard.backends.native.programs.lowering import Lowering, Made
from regard.backends.native.programs.reads import Read
from regard.core.dispatch_mode import flat, mapped

OF_SEVERAL = " of several numbers"  # of handlers, those of reductions


def of_several(low: Lowering, x: Node) -> int:
    """The one number of a pair that is computed of several."""
    if x.several:
        raise NotLowered(f"{x.op} gives {prod(x.shape)} numbers for each pair, where one is expected")
    return _numbers(low, x)[0]


def _numbers(low: Lowering, x: Any) -> list[int]:
    """The values of what an operation is given, in the order of its axes."""
    if isinstance(x, (Node, Tensor)) and prod(x.shape) > MOST_NUMBERS:
        raise NotLowered(f"it computes {prod(x.shape)} numbers for each pair; programs have at most {MOST_NUMBERS}")
    if not isinstance(x, Node):
        return [low.value(one) for one in x.flatten().tolist()] if isinstance(x, Tensor) else [low.value(x)]
    if not x.pair:
        read = Read(x, table=True)
        return [low.element(read, low.whole(n)) for n in range(prod(x.shape))] if x.shape else [low.value(x)]
    if not x.of_several:
        return [low.value(x)]
    known = low.numbers_of.get(x)
    if known is None:
        known = low.numbers_of[x] = [low.checked(x, value) for value in _computed(low, x, name_of(x))]
    return known


def _computed(low: Lowering, x: Node, name: str) -> list[int]:
    if not x.whole:
        check_dtypes(x)
    if name == "index":
        return rows_indexed(low, x)
    if name in MOVED:
        return _rearranged(low, x)
    reduction = low.handlers.get(f"{name}{OF_SEVERAL}")
    if reduction is not None:
        rows = _products(low, x) if name in ("dot", "mv", "mm") else _rows(low, x)
        return [reduction(low, x, *row) for row in rows]
    handler = low.handlers.get(name)
    if handler is not None:
        return _each(low, x, handler)
    if x.whole:
        return numbers_of_each(low, x)
    raise NotLowered(f"it has no instruction for {x.op} of several numbers of a pair")


def _each(low: Lowering, x: Node, handler: Callable[..., int]) -> list[int]:
    """An operation on each number by itself."""
    if x.whole:
        return numbers_of_each(low, x)
    own = dict[int, list[Any]]()
    for y in flat(x.arguments):
        if isinstance(y, (Node, Tensor)):
            of = _numbers(low, y)
            places = torch.arange(len(of), dtype=torch.int64, device="cpu").reshape(y.shape).expand(x.shape).flatten()
            own[id(y)] = [Made(of[n]) for n in places.tolist()]

    def at(n: int) -> Callable[[Any], Any]:
        return lambda y: own[id(y)][n] if id(y) in own else y

    return [
        handler(low, x, *mapped(x.args, at(n)), **{name: at(n)(y) for name, y in x.kwargs.items()})
        for n in range(prod(x.shape))
    ]


def _rearranged(low: Lowering, x: Node) -> list[int]:
    every, places = list[int](), dict[int, Tensor]()
    for y in flat(x.arguments):
        if isinstance(y, (Node, Tensor)) and id(y) not in places:
            of = _numbers(low, y)
            places[id(y)] = torch.arange(len(every), len(every) + len(of), dtype=torch.int64, device="cpu").reshape(
                y.shape
            )
            every += of
    moved = x.op(*mapped(x.args, lambda y: places.get(id(y), y)), **x.kwargs)
    return [every[n] for n in moved.flatten().tolist()]


def _rows(low: Lowering, x: Node) -> list[list[Made]]:
    """What is reduced to each number of a node."""
    of = x.args[0]
    values, rank = _numbers(low, of), len(of.shape)
    named = dict(zip([a.name for a in x.op._schema.arguments], x.args, strict=False)) | x.kwargs
    axes = named.get("dim")
    axes = list(range(rank)) if axes is None or axes == [] else [axes] if isinstance(axes, int) else list(axes)
    if named.get("ord", 2) != 2:
        raise NotLowered(f"it has no instruction for {x.op} of order {named['ord']}")
    axes = sorted(n % max(rank, 1) for n in axes)
    places = torch.arange(len(values), dtype=torch.int64, device="cpu").reshape(of.shape)
    kept = [n for n in range(rank) if n not in axes]
    rows = places.permute([*kept, *axes]).reshape(prod(of.shape[n] for n in kept), -1)
    return [[Made(values[n]) for n in row] for row in rows.tolist()]


def _products(low: Lowering, x: Node) -> list[list[Made]]:
    """The products whose sums are a product of matrices."""
    a, b = x.args
    left, right = _numbers(low, a), _numbers(low, b)
    width = a.shape[-1]
    columns = b.shape[1] if len(b.shape) > 1 else 1
    return [
        [_times(low, left[r * width + n], right[n * columns + c]) for n in range(width)]
        for r in range(len(left) // max(width, 1))
        for c in range(columns)
    ]


def _times(low: Lowering, a: int, b: int) -> Made:
    return Made(low.code.do("MUL", low.as_float(a), low.as_float(b)))


def _folded(op: str) -> Callable[..., int]:
    def handler(low: Lowering, x: Node, *numbers: Made) -> int:
        values = [low.like(x, one.value) for one in numbers]
        if not values:
            raise NotLowered(f"{x.op} is given no number")
        kind = low.code.kind(values[0])
        named = {"bool": {"MAX": "OR", "MIN": "AND"}.get(op, op), "int": f"INT_{op}", "float": op}[kind]
        named = op if op in ("AND", "OR") else named
        total = values[0]
        for value in values[1:]:
            total = low.integer(named, total, value) if kind == "int" else low.code.do(named, total, value)
        return total

    return handler


def _extreme(op: str) -> Callable[..., int]:
    """The greatest or least of some numbers. Those that are equal to it share its derivative alike, as in torch."""
    folded = _folded(op)

    def handler(low: Lowering, x: Node, *numbers: Made) -> int:
        found, do = folded(low, x, *numbers), low.code.do
        if low.code.kind(found) != "float" or len(numbers) == 1:
            return found
        best, zero = low.code.detached(found), low.code.number(0.0)
        share = count = zero
        for one in numbers:
            value = low.as_float(one.value)
            known = low.code.detached(value)
            equal = do("EQ", known, best)
            # 0, with a derivative of 1; not of an infinite number, whose difference from itself is NaN
            moves = do("AND", equal, do("EQ", do("SUB", known, known), zero))
            share = do("ADD", share, do("WHERE", moves, do("SUB", value, known), zero))
            count = do("ADD", count, do("BOOL_TO_FLOAT", equal))
        return do("ADD", best, do("DIV", share, count))

    return handler


def _mean(low: Lowering, x: Node, *numbers: Made) -> int:
    return low.code.do("MUL", _SUM(low, x, *numbers), low.code.number(1 / len(numbers)))


def _norm(low: Lowering, x: Node, *numbers: Made) -> int:
    total = _SUM(low, x, *(_times(low, one.value, one.value) for one in numbers))
    none = low.code.do("EQ", total, low.code.number(0.0))  # where its derivative is 0, in torch too
    root = low.code.do("SQRT", low.code.do("WHERE", none, low.code.number(1.0), total))
    return low.code.do("WHERE", none, low.code.number(0.0), root)


def _exact(name: str, reduction: Callable[..., int]) -> Callable[..., int]:
    """Of masks: floats are added up in another order by torch."""

    def handler(low: Lowering, x: Node, *numbers: Made) -> int:
        if x.dtype.is_floating_point and name not in _IN_ANY_ORDER:
            raise NotLowered(f"which pairs it lets through depends on the last digit of {x.op}")
        return reduction(low, x, *numbers)

    return handler


_SUM = _folded("ADD")
_IN_ANY_ORDER = tuple(f"{name}{OF_SEVERAL}" for name in ("amax", "max", "amin", "min"))
_BY_NAME: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("sum", "dot", "mv", "mm"), _SUM),
    "mean": _mean,
    "prod": _folded("MUL"),
    **dict.fromkeys(("amax", "max"), _extreme("MAX")),
    **dict.fromkeys(("amin", "min"), _extreme("MIN")),
    "any": _folded("OR"),
    "all": _folded("AND"),
    "linalg_vector_norm": _norm,
}
REDUCTIONS = {
    f"{name}{OF_SEVERAL}": reduction for name, reduction in _BY_NAME.items()
}  # of the numbers that become one
EXACT_REDUCTIONS = {name: _exact(name, reduction) for name, reduction in REDUCTIONS.items()}
