"""Values of nodes: what torch computes once is an operand, what differs by pair an instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.programs.code import MOST_INT, Code, Instruction, NoRoom, NotLowered
from regard.backends.native.programs.dtypes import NARROW, check_dtypes
from regard.backends.native.programs.graph import Node, Values, name_of
from regard.backends.native.programs.operations import PROGRAM_OPERANDS
from regard.backends.native.programs.reads import Range, Read, broadcasts, extent, number_of, widened
from regard.core.dispatch_mode import flat

SEVERAL = "several numbers of a pair"  # of handlers, the one for a node that is computed of them


@dataclass(frozen=True)
class Made:
    """A value of the code, in the place of an argument."""

    value: int


@dataclass
class Lowering:
    """A graph on its way to a program.

    values   what the nodes are that torch computes once
    exact    the same in float64, recorded by autograd where tensors are learned; None where none is
    lasting  whether the code shall serve other lengths: it holds for wider ranges, and no position is a number of it
    of_pairs whether what is computed of indices alone is computed for each pair, and is no operand
    operands, extents  what the program reads, and the ranges of those that are whole numbers
    numbers  what became a number of the code
    learned  by operand, those of `exact` that it holds
    reads    by value, the instruction that reads a learned operand
    """

    values: Values
    handlers: Mapping[str, Callable[..., int]]
    exact: Values | None = None
    lasting: bool = False
    of_pairs: bool = False
    code: Code = field(default_factory=Code)
    operands: list[Read] = field(default_factory=list[Read])
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    extents: dict[int, Range] = field(default_factory=dict[int, Range])
    numbers: list[tuple[Read, bool | int | float]] = field(default_factory=list[tuple[Read, bool | int | float]])
    ranges: dict[int, Range] = field(default_factory=dict[int, Range])  # of whole numbers
    found: dict[Node, int] = field(default_factory=dict[Node, int])
    learned: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    reads: dict[int, Instruction] = field(default_factory=dict[int, Instruction])
    numbers_of: dict[Node, list[int]] = field(default_factory=dict[Node, list[int]])  # of those with several a pair
    tables: dict[Node | Tensor, int] = field(default_factory=dict[Node | Tensor, int])  # which operand has a table

    # Values of any kind.

    def value(self, x: Any) -> int:
        """The value of a node, a number or a tensor."""
        if isinstance(x, bool):
            return self.code.truth(x)
        if isinstance(x, int):
            return self.whole(x)
        if isinstance(x, float):
            return self.code.number(x)
        if isinstance(x, Made):
            return x.value
        if isinstance(x, Tensor):
            return self.load(Read(x))
        if not isinstance(x, Node):
            raise NotLowered(f"an operation is given {x!r}")
        if x not in self.found:
            self.found[x] = self._computed(x)
        return self.found[x]

    def whole(self, x: int) -> int:
        value = self.code.whole(x)
        self.ranges[value] = (x, x)
        return value

    def _computed(self, x: Node) -> int:
        if x.op == "score":
            return 0
        if x.op == "same":
            return self.value(x.args[0])
        if x.op == "take" or (x.whole and not x.several and not (self.of_pairs and self._of_indices(x))):
            try:
                return self.load(Read(x))
            except (RuntimeError, IndexError) as error:
                raise NotLowered(f"{name_of(x)} cannot be computed for all queries and keys: {error}") from error
        name = name_of(x)
        check_dtypes(x)
        handler = self.handlers.get(name)
        if x.of_several:
            return self.handlers[SEVERAL](self, x)
        if handler is None:
            raise NotLowered(f"it has no instruction for {x.op}")
        return self.checked(x, handler(self, x, *x.args, **x.kwargs))

    def checked(self, x: Node, value: int) -> int:
        """A node's value, with no derivative where autograd records none. Raises NotLowered where torch might wrap."""
        if x.dtype in NARROW:
            least, most = NARROW[x.dtype]
            low, high = self.ranges.get(value, (-MOST_INT, MOST_INT))
            if low < least or high > most:
                raise NotLowered(f"{name_of(x)} may leave the range of {x.dtype}, and goes on at its other end there")
        return value if x.recorded else self.code.detached(value)

    def _of_indices(self, x: Node) -> bool:
        """Whether instructions compute a node of nothing but indices and numbers."""
        own = [y for y in flat(x.arguments) if isinstance(y, (Node, Tensor))]
        known = not isinstance(x.op, str) and name_of(x) in self.handlers and not x.of_several
        return known and all(isinstance(y, Node) and (y.op == "index" or self._of_indices(y)) for y in own)

    # Operands.

    def load(self, read: Read) -> int:
        """What broadcasts to (*batch, h, nq, nk): a number in the code where it is one, else an operand."""
        shape, t = self.values.frame.shape, read.elements(self.values)
        if not broadcasts(t, self.values.frame):
            raise NotLowered(f"a tensor of shape {tuple(t.shape)} meets scores of {shape}")
        if self.becomes_number(read, t):
            one = number_of(t)
            self.numbers.append((read, one))
            return self.value(one)
        return self._instruction("LOAD", (), self._operand(read, t), axes=_axes(t))

    def becomes_number(self, read: Read, t: Tensor) -> bool:
        """Whether an operand, whose elements are t, is a number in the code."""
        placed = isinstance(read.node, Node) and not read.node.axes.isdisjoint(("i", "j"))
        return t.numel() == 1 and self._recorded(read) is None and not (self.lasting and placed)

    def _recorded(self, read: Read) -> Tensor | None:
        """What autograd recorded of an operand; None where no tensor that is learned has a part in it."""
        found = None if self.exact is None else read.elements(self.exact)
        return found if found is not None and found.requires_grad else None

    def _operand(self, read: Read, t: Tensor) -> int:
        """Which operand its elements become."""
        which = len(self.operands)
        if which == PROGRAM_OPERANDS:
            raise NoRoom(f"it reads more than {PROGRAM_OPERANDS} tensors")
        self.operands.append(read)
        self.tensors.append(read.operand(t))
        if (found := extent(t)) is not None:
            self.extents[which] = widened(found) if self.lasting else found
        if (recorded := self._recorded(read)) is not None:
            self.learned[which] = recorded
        return which

    def _instruction(self, op: str, args: tuple[int, ...], which: int, axes: str = "ij") -> int:
        t = self.tensors[which]
        kind = "float" if t.is_floating_point() else "bool" if t.dtype == torch.bool else "int"
        value = self.code.add(Instruction(op, args, which, kind, axes))
        if which in self.extents:
            self.ranges[value] = self.extents[which]
        if which in self.learned:
            self.reads[value] = self.code.made[value]
        return value

    def element(self, read: Read, at: int) -> int:
        """The element of a flat table at an index that lies inside of it."""
        if read.node not in self.tables:
            self.tables[read.node] = self._operand(read, read.elements(self.values))
        return self._instruction("GATHER", (at,), self.tables[read.node])

    # Kinds.

    def as_float(self, value: int) -> int:
        made = self.code.made[value]
        if made.kind == "float":
            return value
        if made.op == "NUMBER":
            return self.code.number(float(made.number if made.kind == "int" else bool(made.number)))
        return self.code.do("INT_TO_FLOAT" if made.kind == "int" else "BOOL_TO_FLOAT", value)

    def as_int(self, value: int) -> int:
        kind = self.code.kind(value)
        if kind == "float":
            raise NotLowered("it makes whole numbers of floats")
        if kind == "int":
            return value
        value = self.code.do("BOOL_TO_INT", value)
        self.ranges[value] = (0, 1)
        return value

    def as_bool(self, value: int) -> int:
        kind = self.code.kind(value)
        if kind == "bool":
            return value
        same = self.code.do("EQ", value, self.code.number(0.0)) if kind == "float" else None
        return self.code.do("NOT", self.code.do("INT_EQ", value, self.whole(0)) if same is None else same)

    def like(self, x: Node, value: int) -> int:
        """A value in the kind that torch gives the node."""
        dtype = x.dtype
        return (
            self.as_float(value)
            if dtype.is_floating_point
            else (self.as_bool if dtype == torch.bool else self.as_int)(value)
        )

    def integer(self, op: str, a: int, b: int) -> int:
        """An operation on whole numbers, which must stay within 32 bits."""
        of_a, of_b = self.ranges[a], self.ranges[b]
        ends = [_INTEGERS[op](p, q) for p in of_a for q in of_b]
        low, high = min(ends), max(ends)
        if max(-low, high) > MOST_INT:
            raise NotLowered("its whole numbers reach beyond 2^31")
        value = self.code.do(op, a, b)
        self.ranges[value] = (low, high)
        return value

    def bits(self, op: str, a: int, b: int) -> int:
        """AND, OR, XOR of whole numbers: of two that are not negative, no more bits than they have."""
        (low, high), (low_b, high_b) = self.ranges[a], self.ranges[b]
        size = max(-low, high, -low_b, high_b).bit_length()
        value = self.code.do(op, a, b)
        if op == "AND":
            tops = [top for bottom, top in ((low, high), (low_b, high_b)) if bottom >= 0]
            self.ranges[value] = (0, min(tops)) if tops else (-(1 << size), max(high, high_b))
        else:
            self.ranges[value] = (0 if min(low, low_b) >= 0 else -(1 << size), (1 << size) - 1)
        return value

    def choose(self, condition: int, a: int, b: int) -> int:
        value = self.code.do("WHERE", condition, a, b)
        if self.code.kind(value) == "int":
            (low, high), (low_b, high_b) = self.ranges[a], self.ranges[b]
            self.ranges[value] = min(low, low_b), max(high, high_b)
        return value


_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "INT_ADD": lambda a, b: a + b,
    "INT_SUB": lambda a, b: a - b,
    "INT_MUL": lambda a, b: a * b,
    "INT_MIN": min,
    "INT_MAX": max,
    "INT_DIV": lambda a, b: a // b,
}


def _axes(t: Tensor) -> str:
    """By which of queries and keys an operand differs."""
    return "".join(name for name, size in zip("ij", t.shape[-2:], strict=True) if size != 1)
