"""Operands of programs: how each is made of what a node of the graph is for all queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.backends.native.programs.code import MOST_INT, NotLowered
from regard.backends.native.programs.graph import Node, Values
from regard.core.region import Frame

Range = tuple[int, int]
_WORDS = {torch.float32, torch.int32, torch.bool, torch.bfloat16, torch.float16}


@dataclass(frozen=True, eq=False)
class Read:
    """An operand: a node's numbers, or a tensor's.

    table  whether the kernels read elements of it by an index, not one for each query or key
    axes   of a tensor that is indexed by all heads, rows or columns: which of its axes are which; empty: it is aligned
    """

    node: Node | Tensor
    table: bool = False
    axes: tuple[str, ...] = ()

    def elements(self, values: Values) -> Tensor:
        """The numbers, laid out as the kernels read them."""
        t = values.of(self.node)
        if self.axes:
            t = viewed(t, self.axes, values.frame)
        return t.contiguous().flatten() if self.table else t[(None,) * max(0, 3 - t.dim())]

    def shape(self, elements: Tensor) -> tuple[int | bool, ...]:
        """What the code depends on: the shape of a table, and of others which sizes are 1."""
        return tuple(elements.shape) if self.table else tuple([n == 1 for n in elements.shape])

    def operand(self, elements: Tensor) -> Tensor:
        """The numbers in a dtype that the kernels read."""
        known = (torch.float32, torch.int32) if self.table else _WORDS
        if elements.dtype in known:
            return elements
        return elements.float() if elements.is_floating_point() else elements.int()


def axes_of(indices: list[Node]) -> tuple[str, ...]:
    """Which axes indices run along, where each is all of the heads, rows or columns, once; else none."""
    names = tuple([n.args[0] if n.op == "index" else "" for n in indices])
    return names if len({*names}) == len(names) and {*names} <= {"h", "row", "col"} else ()


def viewed(t: Tensor, axes: tuple[str, ...], frame: Frame) -> Tensor:
    """A tensor with these axes as (heads, rows, columns), of size 1 where it has none."""
    counts = {"h": frame.heads, "row": frame.nq, "col": frame.nk}
    for axis, name in enumerate(axes):
        if t.shape[axis] < counts[name]:
            raise NotLowered("it indexes a tensor that is smaller than the call")
        t = t.narrow(axis, 0, counts[name])
    t = t.permute([axes.index(name) for name in counts if name in axes])
    return t.reshape([counts[name] if name in axes else 1 for name in counts])


def broadcasts(t: Tensor, frame: Frame) -> bool:
    """Whether a tensor broadcasts to the scores of a call, (*batch, h, nq, nk)."""
    shape = frame.shape
    sizes = zip(t.shape[::-1], shape[::-1], strict=False)
    return t.dim() <= len(shape) and all(n in (1, size) for n, size in sizes)


def extent(t: Tensor) -> Range | None:
    """The least and the greatest of whole numbers; None of others."""
    if t.is_floating_point() or t.dtype == torch.bool:
        return None
    if not t.numel():
        return 0, 0
    least, greatest = t.aminmax()
    low, high = int(least), int(greatest)
    if max(-low, high) > MOST_INT:
        raise NotLowered("its whole numbers reach beyond 2^31")
    return low, high


def widened(of: Range) -> Range:
    """A range as wide as bits can count to, on either side of 0: longer sequences lie in it for a while.

    >>> widened((3, 100)), widened((-1, -1)), widened((-5, 0))
    ((0, 127), (-1, -1), (-7, 0))
    """
    low, high = of
    return (
        0 if low >= 0 else 1 - (1 << (-low).bit_length()),
        (1 << high.bit_length()) - 1 if high >= 0 else -1,
    )


def number_of(t: Tensor) -> bool | int | float:
    """The number that a tensor holds, which has one."""
    one = t.item()
    return bool(one) if t.dtype == torch.bool else one
