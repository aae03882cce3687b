"""Dtypes of operations: where torch rounds, or goes on at the other end of a range, and a program would not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.backends.native.programs.code import MOST_INT, NotLowered
from regard.backends.native.programs.graph import Node, name_of
from regard.core.dispatch_mode import flat
from regard.core.dtypes import HALF

Numbered = Node | Tensor
NARROW = {  # their numbers, of those that programs hold
    **{torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int16: (-(2**15), 2**15 - 1)},
    **{torch.uint16: (0, 2**16 - 1), torch.uint32: (0, MOST_INT), torch.uint64: (0, MOST_INT)},
}
MOVED = {  # numbers stay, their places change
    *("select", "slice", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute", "transpose", "t"),
    *("expand", "flip", "stack", "cat", "diagonal", "repeat", "roll", "unfold"),
}
_COMPARED = {"lt", "gt", "le", "ge", "eq", "ne"}
_ADDED = {"add", "sub", "rsub", "sum", "mean", "dot", "mv", "mm"}
# After which the error of a large number in float32 is large beside what is left of it.
_OF_LARGE = {*_ADDED, "remainder", "floor", "ceil", "floor_divide", "sin", "cos", *_COMPARED}


def check_dtypes(x: Node) -> None:
    """Raises NotLowered for an operation on pairs whose result depends on how torch rounds it, or what it is given."""
    name, given = name_of(x), [y for y in flat(x.arguments) if isinstance(y, Numbered)]
    if name == "index":
        return
    if x.dtype in HALF and name not in MOVED:
        raise NotLowered(f"{name} rounds what it computes for pairs to {x.dtype}")
    # the score itself has the precision of float32: its sum with a number of float64 loses no more
    of_score = name in _ADDED and any(y.dtype != torch.float64 and isinstance(y, Node) and "s" in y.axes for y in given)
    rounds = name in _OF_LARGE or "rounding_mode" in x.kwargs
    if rounds and not of_score and torch.float64 in (y.dtype for y in given):
        raise NotLowered(f"it computes in float64 ({name})")
    dtype = _common(x.args) if name in _COMPARED else x.dtype
    for y in given if name in MOVED else x.args:
        _check_given(name, y, dtype)


def _common(args: tuple[Any, ...]) -> torch.dtype:
    """The dtype in which torch compares two sides."""
    a, b = [torch.empty(y.shape, dtype=y.dtype, device="meta") if isinstance(y, Numbered) else y for y in args]
    return torch.result_type(a, b)


def _check_given(name: str, y: Any, dtype: torch.dtype) -> None:
    """Raises NotLowered where torch makes another number of what it is given, before it computes in a dtype."""
    if isinstance(y, Numbered):
        changes = dtype in HALF and y.dtype not in (dtype, torch.bool)
    elif dtype in HALF:
        changes = (
            isinstance(y, (int, float))
            and y == y
            and float(torch.tensor(y, dtype=torch.float64, device="cpu").to(dtype)) != y
        )
    else:
        least, most = NARROW.get(dtype, (-MOST_INT, MOST_INT))
        changes = dtype in NARROW and isinstance(y, (int, float)) and not least <= y <= most
    if changes:
        raise NotLowered(f"{name} makes numbers of {dtype} of what it is given")
