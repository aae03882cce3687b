"""Programs while they are made: values, each computed once, and the slots that hold them."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from regard.backends.native.programs.operations import OPERATIONS, SLOTS

Kind = Literal["float", "int", "bool"]
_CODES = {name: n for n, name in enumerate(OPERATIONS)}
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("LT", "LE", "EQ", "INT_LT", "INT_LE", "INT_EQ"), "bool"),
    **dict.fromkeys(
        ("INT_ADD", "INT_SUB", "INT_MUL", "INT_MIN", "INT_MAX", "INT_DIV", "INT_ABS", "BOOL_TO_INT"), "int"
    ),
}
MOST_INT = 2**31 - 1
_POSITIONS = [("LOAD", "int", "i"), ("LOAD", "int", "j")]
_OF_DIFFERENCES = {"INT_SUB", "INT_LT", "INT_LE", "INT_EQ"}  # what follows from the difference of two positions


class NotLowered(Exception):
    """Why a graph is no program, as a clause."""


class NoRoom(NotLowered):
    """A graph reads more tensors than programs can."""


@dataclass(frozen=True)
class Instruction:
    """What computes a value from earlier ones. number: the bits of a NUMBER, or which operand is read.

    axes: by which of "i" and "j" its numbers differ; of operands, the caller says so.
    """

    op: str
    args: tuple[int, ...] = ()
    number: int = 0
    kind: Kind = "float"
    axes: str = "ij"

    @property
    def fixed(self) -> bool:
        """Whether all keys share it."""
        return "j" not in self.axes


@dataclass(frozen=True)
class Step:
    """A row of a program, before its values have slots. far: what the third slot that it reads says instead."""

    op: str
    args: tuple[int, ...]
    number: int = 0
    value: int | None = None
    far: bool = False


@dataclass(frozen=True)
class Derivative:
    """The derivative of the result by an element of an operand, which a LOAD or a GATHER read.

    far: whether it may be far above 1
    """

    value: int
    read: Instruction
    far: bool

    @property
    def step(self) -> Step:
        return Step(f"{self.read.op}_GRADIENT", (self.value, *self.read.args), self.read.number, far=self.far)


@dataclass
class Code:
    """Instructions in an order in which they can run; a value is known by its place among them. 0 is the score."""

    made: list[Instruction] = field(default_factory=lambda: [Instruction("SCORE")])
    known: dict[Instruction, int] = field(default_factory=dict[Instruction, int])

    def kind(self, value: int) -> Kind:
        return self.made[value].kind

    def add(self, x: Instruction) -> int:
        """The value of an instruction, which is computed once."""
        if x not in self.known:
            self.known[x] = len(self.made)
            self.made.append(x)
        return self.known[x]

    def do(self, op: str, *args: int) -> int:
        """The value of an operation on values of the kinds that it takes."""
        if op in ("DIV", "DIV_NONZERO") and (inverse := self._exact_inverse(args[1])) is not None:
            op, args = op.replace("DIV", "MUL"), (args[0], self.number(inverse))
        kind = _KINDS.get(op, "float")
        if op in ("AND", "OR", "XOR", "NOT"):
            kind = self.kind(args[0])
        elif op == "WHERE":
            kind = self.kind(args[1])
        return self._simpler(op, args) or self.add(Instruction(op, args, 0, kind))

    def number(self, x: float) -> int:
        return self.add(Instruction("NUMBER", (), bits_of(x), "float", ""))

    def whole(self, x: int) -> int:
        if abs(x) > MOST_INT:
            raise NotLowered("its whole numbers reach beyond 2^31")
        return self.add(Instruction("NUMBER", (), x, "int", ""))

    def truth(self, x: bool) -> int:
        return self.add(Instruction("NUMBER", (), -int(x), "bool", ""))

    def is_float(self, value: int) -> bool:
        """Whether it is a NUMBER of kind float."""
        return self.made[value].op == "NUMBER" and self.kind(value) == "float"

    def float_of(self, value: int) -> float:
        """The number that such a value is."""
        return struct.unpack("=f", struct.pack("=i", self.made[value].number))[0]

    def detached(self, value: int) -> int:
        """The same value, through which no derivative goes: its bits, and themselves."""
        return self.do("AND", value, value) if self.kind(value) == "float" else value

    def _is(self, value: int, x: float) -> bool:
        return self.is_float(value) and self.float_of(value) == x

    def _exact_inverse(self, value: int) -> float | None:
        """1 / x of a number that is a power of 2: what is multiplied by it is divided by x, to the last bit."""
        if not self.is_float(value):
            return None
        x = self.float_of(value)
        return 1 / x if abs(math.frexp(x)[0]) == 0.5 and 2.0**-126 <= abs(x) <= 2.0**126 else None

    def _simpler(self, op: str, args: tuple[int, ...]) -> int | None:
        """A value that is the same for every number, NaN included: 1 · x, x / 1; and -x of a number."""
        if op == "NEG" and self.is_float(args[0]):
            return self.number(-self.float_of(args[0]))
        if op == "MUL" and self._is(args[0], 1.0):
            return args[1] or None
        if op in ("MUL", "DIV") and self._is(args[1], 1.0):
            return args[0] or None
        return None

    def rows(
        self, result: int, by_score: int | None, by_operand: Sequence[Derivative] = (), factor: float = 0.0
    ) -> list[list[int]]:
        """The program that computes a value and its derivatives, as rows of six numbers: see native/steps/program.h.

        by_score: the value's derivative by the score; None: it does not depend on it. factor: what the value is
        multiplied by as a sum of such values is made.
        """
        by_score = self.number(0.0) if by_score is None else by_score
        first = self.needed([result])
        inner = self._differences(first)
        first = [n for n in first if n not in inner]
        then = [n for n in self.needed([by_score, *(x.value for x in by_operand)]) if n not in set(first)]
        # what an operand's derivative is read by comes as soon as that is there, and its slot is free again
        rest = [((n, 0), self._step(n)) for n in then]
        rest += [((x.value, 1), x.step) for x in by_operand]
        steps = [
            *(self._step(n, inner) for n in first if n),
            Step("RESULT", (result,), bits_of(factor)),
            *(step for _, step in sorted(rest, key=lambda one: one[0])),
            Step("DERIVATIVE", (by_score,)),
        ]
        return self._ordered(steps)

    def mask_rows(self, result: int) -> list[list[int]]:
        """The program that computes a boolean of a pair, which is its last row."""
        return self._ordered([*(self._step(n) for n in self.needed([result]) if n), Step("RESULT", (result,))])

    def _ordered(self, steps: list[Step]) -> list[list[int]]:
        """The rows of steps: first those whose numbers all keys share, then those that differ by distance alone."""
        shared = [x for x in steps if x.value is not None and self.made[x.value].fixed]
        rest = [x for x in steps if x.value is None or not self.made[x.value].fixed]
        distances = self._distances([x.value for x in rest if x.value is not None])
        if distances:
            of_distance = [x for x in rest if x.value in distances]
            others = [x for x in rest if x.value not in distances]
            loads = [x for x in rest if x.op == "LOAD"]
            read, read_by_others = ({a for x in some for a in x.args} for some in (of_distance, others))
            positions = [x for x in loads if x.value in read]
            # others load the positions that they read themselves
            others = [x for x in others if x not in positions or x.value in read_by_others]
            try:
                return self._placed([*shared, *positions, *of_distance, *others], distances)
            except NotLowered:  # the slots of distances hold nothing else
                pass
        return self._placed([*shared, *rest], distances=set())

    def _distances(self, values: list[int]) -> set[int]:
        """Those of some values that follow from i - j, if positions count up by one: see native/steps/by_distance.h."""
        found = set[int]()
        for n in values:
            x = self.made[n]
            of = [self.made[a] for a in x.args]
            apart = x.op in _OF_DIFFERENCES and sorted((a.op, a.kind, a.axes) for a in of) == _POSITIONS
            shared = all(a in found or self.made[a].axes == "" for a in x.args)
            if apart or (shared and not found.isdisjoint(x.args)):
                found.add(n)
        return found

    def _differences(self, values: list[int]) -> set[int]:
        """Values a - b of which |a - b| alone is read among some: one instruction computes that."""
        reads = Counter(a for n in values for a in self.made[n].args)
        inner = {x.args[0] for n in values if (x := self.made[n]).op == "ABS" and reads[x.args[0]] == 1}
        return {n for n in inner if self.made[n].op == "SUB"} - self._distances(values)

    def _step(self, value: int, inner: Collection[int] = ()) -> Step:
        """inner: the differences whose absolute values are computed at once."""
        x = self.made[value]
        if x.op == "ABS" and x.args[0] in inner:
            return Step("ABS_SUB", self.made[x.args[0]].args, 0, value)
        return Step(x.op, x.args, x.number, value)

    def needed(self, values: list[int]) -> list[int]:
        """What values are computed from, themselves included, in order."""
        needed, left = set[int](), list(values)
        while left:
            value = left.pop()
            if value not in needed:
                needed.add(value)
                left += self.made[value].args
        return sorted(needed)

    def _placed(self, steps: list[Step], distances: set[int]) -> list[list[int]]:
        """Each value in a slot. Those of operands, numbers and distances hold nothing else: kernels lay them out."""
        last = {a: n for n, step in enumerate(steps) for a in step.args}
        where, used, rows = {0: 0}, 1, list[list[int]]()
        free = {True: list[int](), False: list[int]()}  # slots of distances, and others
        for n, step in enumerate(steps):
            slots = [where[a] for a in step.args]
            for a in {*step.args}:
                if last[a] == n and self.made[a].op not in ("NUMBER", "LOAD", "SCORE"):
                    free[a in distances].append(where[a])
            to, own = 0, free[step.value in distances]
            if step.value is not None:
                if own and step.op not in ("NUMBER", "LOAD"):
                    to = own.pop()
                else:
                    to, used = used, used + 1
                where[step.value] = to
            unread = slots[0] if slots and step.value is not None else 0  # an operation may look as if it read more
            slots += [unread] * (3 - len(slots))
            if step.far:
                slots[2] = 1
            rows.append([_CODES[step.op], to, *slots, step.number])
        if used > SLOTS:
            raise NotLowered(f"it holds {used} numbers of a pair at once; the kernels have room for {SLOTS}")
        return rows


def bits_of(x: float) -> int:
    """Those of a float, the nearest one to x, as an integer."""
    try:
        return struct.unpack("=i", struct.pack("=f", x))[0]
    except OverflowError:
        return struct.unpack("=i", struct.pack("=f", math.copysign(math.inf, x)))[0]
