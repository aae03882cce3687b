"""Programs while they are made: values, each computed once; their derivative by the score; the slots that hold them."""

from __future__ import annotations

import math
import struct
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


class NotLowered(Exception):
    """Why a graph is no program, as a clause."""


@dataclass(frozen=True)
class Instruction:
    """What computes a value from earlier ones. number: the bits of a NUMBER, or which operand is read.

    fixed: whether all keys share it; of operands, the caller says so.
    """

    op: str
    args: tuple[int, ...] = ()
    number: int = 0
    kind: Kind = "float"
    fixed: bool = False


@dataclass
class Code:
    """Instructions in an order in which they can run; a value is known by its place among them. 0 is the score."""

    made: list[Instruction] = field(default_factory=lambda: [Instruction("SCORE")])
    known: dict[Instruction, int] = field(default_factory=dict[Instruction, int])
    slopes: dict[int, int | None] = field(default_factory=lambda: {0: None})

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
        kind = _KINDS.get(op, "float")
        if op in ("AND", "OR", "XOR", "NOT"):
            kind = self.kind(args[0])
        elif op == "WHERE":
            kind = self.kind(args[1])
        return self._simpler(op, args) or self.add(Instruction(op, args, 0, kind))

    def number(self, x: float) -> int:
        try:
            bits = struct.unpack("=i", struct.pack("=f", x))[0]
        except OverflowError:
            bits = struct.unpack("=i", struct.pack("=f", math.copysign(math.inf, x)))[0]
        return self.add(Instruction("NUMBER", (), bits, "float", True))

    def whole(self, x: int) -> int:
        if abs(x) > MOST_INT:
            raise NotLowered("its whole numbers reach beyond 2^31")
        return self.add(Instruction("NUMBER", (), x, "int", True))

    def truth(self, x: bool) -> int:
        return self.add(Instruction("NUMBER", (), -int(x), "bool", True))

    def _is(self, value: int, x: float) -> bool:
        made = self.made[value]
        return (
            made.op == "NUMBER" and made.kind == "float" and made.number == struct.unpack("=i", struct.pack("=f", x))[0]
        )

    def _simpler(self, op: str, args: tuple[int, ...]) -> int | None:
        """A value that is the same for every number, NaN included: 1 · x, x / 1."""
        if op == "MUL" and self._is(args[0], 1.0):
            return args[1] or None
        if op in ("MUL", "DIV") and self._is(args[1], 1.0):
            return args[0] or None
        return None

    def slope(self, value: int) -> int | None:
        """The derivative of a value by the score; None where it does not depend on it."""
        if value == 0:
            return self.number(1.0)
        if value not in self.slopes:
            self.slopes[value] = self._slope(value)
        return self.slopes[value]

    def _slope(self, y: int) -> int | None:
        x = self.made[y]
        if x.kind != "float" or x.op in ("NUMBER", "LOAD", "GATHER", "SIGN", "FLOOR", "CEIL"):
            return None
        if x.op == "WHERE":
            condition, a, b = x.args
            da, db = self.slope(a), self.slope(b)
            if da is None and db is None:
                return None
            zero = self.number(0.0)
            return self.do("WHERE", condition, zero if da is None else da, zero if db is None else db)
        terms: int | None = None
        for n, a in enumerate(x.args):
            da = self.slope(a)
            if da is None:
                continue
            term = self._partial(y, x, n, da)
            terms = term if terms is None or term is None else self.do("ADD", terms, term)
        return terms

    def _partial(self, y: int, x: Instruction, n: int, da: int) -> int | None:
        """The derivative of y = op(.., a, ..) by its n-th argument, times da."""
        do, number, a = self.do, self.number, x.args[0]
        b = x.args[-1]
        one = number(1.0)
        match x.op:
            case "ADD":
                return da
            case "SUB":
                return do("NEG", da) if n else da
            case "NEG":
                return do("NEG", da)
            case "MUL":
                return do("MUL", da, x.args[1 - n])
            case "DIV":
                return do("NEG", do("DIV", do("MUL", da, y), b)) if n else do("DIV", da, b)
            case "MIN" | "MAX":  # where both are equal, half to each
                mine, other = x.args[n], x.args[1 - n]
                wins = do("LT", *((mine, other) if x.op == "MIN" else (other, mine)))
                half = do("WHERE", do("EQ", mine, other), number(0.5), number(0.0))
                return do("MUL", da, do("WHERE", wins, one, half))
            case "POW":
                return do("MUL", da, self._power_slope(y, a, b, n))
            case "REMAINDER":
                return do("NEG", do("MUL", da, do("FLOOR", do("DIV", a, b)))) if n else da
            case "ABS":
                return do("MUL", da, do("SIGN", a))
            case "SQRT":
                return do("DIV", da, do("MUL", number(2.0), y))
            case "EXP":
                return do("MUL", da, y)
            case "LOG":
                return do("DIV", da, a)
            case "LOG1P":
                return do("DIV", da, do("ADD", one, a))
            case "EXPM1":
                return do("MUL", da, do("ADD", y, one))
            case "TANH":
                return do("MUL", da, do("SUB", one, do("MUL", y, y)))
            case "SIGMOID":
                return do("MUL", da, do("MUL", y, do("SUB", one, y)))
            case "ERF":
                bell = do("EXP", do("NEG", do("MUL", a, a)))
                return do("MUL", da, do("MUL", number(2 / math.sqrt(math.pi)), bell))
            case "SIN":
                return do("MUL", da, do("COS", a))
            case "COS":
                return do("NEG", do("MUL", da, do("SIN", a)))
            case _:  # of whole numbers and truths
                return None

    def _power_slope(self, y: int, a: int, b: int, n: int) -> int:
        do, zero = self.do, self.number(0.0)
        if n == 0:  # torch: 0 where the exponent is 0
            less = do("MUL", b, do("POW", a, do("SUB", b, self.number(1.0))))
            return do("WHERE", do("EQ", b, zero), zero, less)
        nothing = do("AND", do("EQ", a, zero), do("LE", zero, b))
        return do("WHERE", nothing, zero, do("MUL", y, do("LOG", a)))

    def rows(self, result: int) -> list[list[int]]:
        """The program that computes a value and its derivative, as rows of six numbers: see native/steps/program.h."""
        slope = self.slope(result)
        slope = self.number(0.0) if slope is None else slope
        first = self._needed([result])
        then = [n for n in self._needed([slope]) if n not in set(first)]
        order = [n for n in (*first, *then) if n]
        fixed = [n for n in order if self.made[n].fixed]
        main = [n for n in first if n and not self.made[n].fixed]
        rest = [n for n in then if n and not self.made[n].fixed]
        steps: list[tuple[str, int | None, tuple[int, ...], int]] = [
            *((self.made[n].op, n, self.made[n].args, self.made[n].number) for n in (*fixed, *main)),
            ("RESULT", None, (result,), 0),
            *((self.made[n].op, n, self.made[n].args, self.made[n].number) for n in rest),
            ("DERIVATIVE", None, (slope,), 0),
        ]
        return self._placed(steps)

    def _needed(self, values: list[int]) -> list[int]:
        """What values are computed from, themselves included, in order."""
        needed, left = set[int](), list(values)
        while left:
            value = left.pop()
            if value not in needed:
                needed.add(value)
                left += self.made[value].args
        return sorted(needed)

    def _placed(self, steps: list[tuple[str, int | None, tuple[int, ...], int]]) -> list[list[int]]:
        """Each value in a slot; the slots of operands and numbers hold nothing else, since their layout is theirs."""
        last = {a: n for n, (_, _, args, _) in enumerate(steps) for a in args}
        where, free, used, rows = {0: 0}, list[int](), 1, list[list[int]]()
        for n, (op, value, args, number) in enumerate(steps):
            slots = [where[a] for a in args]
            for a in {*args}:
                if last[a] == n and self.made[a].op not in ("NUMBER", "LOAD", "SCORE"):
                    free.append(where[a])
            to = 0
            if value is not None:
                if free and op not in ("NUMBER", "LOAD"):
                    to = free.pop()
                else:
                    to, used = used, used + 1
                where[value] = to
            rows.append([_CODES[op], to, *slots, *[0] * (3 - len(slots)), number])
        if used > SLOTS:
            raise NotLowered(f"it holds {used} numbers of a pair at once; the kernels have room for {SLOTS}")
        return rows
