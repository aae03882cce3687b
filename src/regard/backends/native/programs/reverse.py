"""Derivatives of a program's result, by reverse accumulation, as instructions that join its code."""

from __future__ import annotations

import math
from collections.abc import Collection

from regard.backends.native.programs.code import Code, Instruction

_FLAT = {"SIGN", "FLOOR", "CEIL", "INT_TO_FLOAT", "BOOL_TO_FLOAT", "AND"}  # their derivative is 0; AND: of detach


def derivatives(code: Code, result: int, wanted: Collection[int]) -> dict[int, int]:
    """The derivatives of a value by others, by the value; those on which it does not depend are missing."""
    return _Reverse(code, result, wanted).found


class _Reverse:
    """Goes from the result to what it depends on, and adds up each value's derivative before it goes on from there.

    chosen: derivatives that are 0 in a branch that torch.where does not choose. They stay 0 there, whatever the branch
    computes; PyTorch multiplies them, and 0 times infinity is NaN.
    """

    def __init__(self, code: Code, result: int, wanted: Collection[int]) -> None:
        self.code, self.chosen = code, set[int]()
        order = code.needed([result])
        depends = {value for value in order if value in wanted}
        for value in order:
            x = code.made[value]
            if x.kind == "float" and x.op not in _FLAT and not depends.isdisjoint(x.args):
                depends.add(value)
        by: dict[int, int] = {result: code.number(1.0)} if result in depends else {}
        for value in reversed(order):
            x = code.made[value]
            if value not in by or value in wanted:
                continue
            for n, a in enumerate(x.args):
                if a in depends:
                    term = self._pull(value, x, n, by[value])
                    by[a] = self._sum(by[a], term) if a in by else term
        self.found = {value: by[value] for value in wanted if value in by}

    def _sum(self, a: int, b: int) -> int:
        total = self.code.do("ADD", a, b)
        if a in self.chosen and b in self.chosen:
            self.chosen.add(total)
        return total

    def _do(self, op: str, g: int, *args: int) -> int:
        """An operation on a derivative, whose result is 0 where that was chosen to be 0."""
        if g not in self.chosen:
            return self.code.do(op, g, *args)
        found = self.code.do(op if op == "NEG" else f"{op}_NONZERO", g, *args)
        self.chosen.add(found)
        return found

    def _where(self, condition: int, a: int, b: int) -> int:
        found = self.code.do("WHERE", condition, a, b)
        self.chosen.add(found)
        return found

    def _pull(self, y: int, x: Instruction, n: int, g: int) -> int:
        """The derivative by the n-th argument of y = op(.., a, ..), from that by y."""
        do, number, times, a, b = self.code.do, self.code.number, self._times, x.args[0], x.args[-1]
        one, zero = number(1.0), number(0.0)
        match x.op:
            case "WHERE":
                return self._where(a, *((g, zero) if n == 1 else (zero, g)))
            case "ADD":
                return g
            case "SUB":
                return self._do("NEG", g) if n else g
            case "NEG":
                return self._do("NEG", g)
            case "MUL":
                return times(g, x.args[1 - n])
            case "DIV":
                return self._do("NEG", self._over(times(g, y), b)) if n else self._over(g, b)
            case "MIN" | "MAX":  # where both are equal, half to each
                mine, other = x.args[n], x.args[1 - n]
                loses = do("LT", *((mine, other) if x.op == "MAX" else (other, mine)))
                half = do("WHERE", do("EQ", mine, other), times(g, number(0.5)), g)
                return self._where(loses, zero, half)
            case "POW":
                return times(g, self._power_slope(y, a, b, n))
            case "REMAINDER":
                return self._do("NEG", times(g, do("FLOOR", do("DIV", a, b)))) if n else g
            case "ABS":
                return times(g, do("SIGN", a))
            case "SQRT":
                return self._over(g, do("MUL", number(2.0), y))
            case "EXP":
                return times(g, y)
            case "EXP2":
                return times(g, do("MUL", y, number(math.log(2))))
            case "LOG":
                return self._over(g, a)
            case "LOG1P":
                return self._over(g, do("ADD", one, a))
            case "EXPM1":
                return times(g, do("ADD", y, one))
            case "TANH":
                return times(g, do("SUB", one, do("MUL", y, y)))
            case "SIGMOID":
                return times(g, do("MUL", y, do("SUB", one, y)))
            case "ERF":
                return times(g, do("MUL", number(2 / math.sqrt(math.pi)), do("EXP", do("NEG", do("MUL", a, a)))))
            case "SIN":
                return times(g, do("COS", a))
            case "COS":
                return self._do("NEG", times(g, do("SIN", a)))
            case _:
                raise AssertionError(f"{x.op} has no derivative")

    def _times(self, g: int, factor: int) -> int:
        return self._do("MUL", g, factor)

    def _over(self, g: int, divisor: int) -> int:
        return self._do("DIV", g, divisor)

    def _power_slope(self, y: int, a: int, b: int, n: int) -> int:
        do, zero = self.code.do, self.code.number(0.0)
        if n == 0:  # torch: 0 where the exponent is 0
            less = do("MUL", b, do("POW", a, do("SUB", b, self.code.number(1.0))))
            return do("WHERE", do("EQ", b, zero), zero, less)
        nothing = do("AND", do("EQ", a, zero), do("LE", zero, b))
        return do("WHERE", nothing, zero, do("MUL", y, do("LOG", a)))


def bound(code: Code, value: int) -> float:
    """What the size of a float is at most; infinity where nothing says it."""
    x = code.made[value]
    match x.op:
        case "NUMBER":
            return abs(code.float_of(value))
        case "TANH" | "SIGMOID" | "SIGN" | "SIN" | "COS" | "ERF" | "BOOL_TO_FLOAT":
            return 1.0
        case "NEG" | "ABS" | "MUL_NONZERO" | "MUL" | "WHERE" | "MIN" | "MAX" | "ADD" | "SUB":
            sizes = [bound(code, a) for a in x.args if code.kind(a) == "float"]
        case _:
            return math.inf
    if x.op in ("ADD", "SUB"):
        return sum(sizes)
    if x.op in ("MUL", "MUL_NONZERO"):
        return 0.0 if 0.0 in sizes else math.prod(sizes)
    return max(sizes)
