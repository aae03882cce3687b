"""The operations of torch that programs know, each as instructions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from regard.backends.native.programs.code import NotLowered
from regard.backends.native.programs.graph import Node, name_of
from regard.backends.native.programs.indexing import indexed
from regard.backends.native.programs.lowering import SEVERAL, Lowering
from regard.backends.native.programs.several import EXACT_REDUCTIONS, REDUCTIONS, of_several

_UNCHANGED = {"expand", "clone", "alias", "contiguous", "lift_fresh_copy", "lift_fresh"}
_FUNCTIONS = {  # of one float
    **{name: (name.upper(),) for name in ("sqrt", "exp", "exp2", "log", "tanh", "sigmoid", "log1p", "expm1", "erf")},
    **{name: (name.upper(),) for name in ("sin", "cos", "floor", "ceil", "neg")},
    "sgn": ("SIGN",),
    "sign": ("SIGN",),
    "silu": ("SIGMOID", "MUL"),
}
_COMPARISONS = {  # the instruction, whether its sides change, whether it is negated
    **{"lt": ("LT", 0, 0), "gt": ("LT", 1, 0), "le": ("LE", 0, 0), "ge": ("LE", 1, 0)},
    **{"eq": ("EQ", 0, 0), "ne": ("EQ", 0, 1)},
}
_NUMBERS = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}  # of which tensors are full
_LOGIC = {"and": "AND", "or": "OR", "xor": "XOR"}


def _function(low: Lowering, x: Node, a: Any) -> int:
    if name_of(x) in ("neg", "sgn", "sign", "floor", "ceil") and not x.dtype.is_floating_point:
        value = low.as_int(low.value(a))
        if name_of(x) in ("sgn", "sign"):
            return low.integer("INT_MIN", low.integer("INT_MAX", value, low.whole(-1)), low.whole(1))
        return low.integer("INT_SUB", low.whole(0), value) if name_of(x) == "neg" else value
    given = low.as_float(low.value(a))
    first, *then = _FUNCTIONS[name_of(x)]
    value = low.code.do(first, given)
    return low.code.do(then[0], given, value) if then else value


def _arithmetic(low: Lowering, x: Node, a: Any, b: Any, alpha: Any = 1) -> int:
    name = {"rsub": "sub"}.get(name_of(x), name_of(x)).upper()
    p, q = low.value(a), low.value(b)
    if x.dtype == torch.bool:
        return low.code.do({"MUL": "AND", "ADD": "OR"}[name], low.as_bool(p), low.as_bool(q))
    floats = x.dtype.is_floating_point
    p, q = (low.as_float(p), low.as_float(q)) if floats else (low.as_int(p), low.as_int(q))
    if alpha != 1:
        factor = low.code.number(float(alpha)) if floats else low.whole(int(alpha))
        if name_of(x) == "rsub":
            p = low.code.do("MUL", p, factor) if floats else low.integer("INT_MUL", p, factor)
        else:
            q = low.code.do("MUL", q, factor) if floats else low.integer("INT_MUL", q, factor)
    if name_of(x) == "rsub":
        p, q = q, p
    return low.code.do(name, p, q) if floats else low.integer(f"INT_{name}", p, q)


def _divided(low: Lowering, x: Node, a: Any, b: Any, rounding_mode: str | None = None) -> int:
    rounding_mode = "floor" if name_of(x) == "floor_divide" else rounding_mode
    p, q = low.value(a), low.value(b)
    if not x.dtype.is_floating_point:
        divisor = _divisor(low, q)
        return low.integer("INT_DIV", low.as_int(p), divisor) if rounding_mode == "floor" else _to_0(low, p, divisor)
    value = low.code.do("DIV", low.as_float(p), low.as_float(q))
    if rounding_mode is None:
        return value
    if rounding_mode == "floor":
        raise NotLowered(f"it has no instruction for {x.op} of floats that rounds down")
    up, down = low.code.do("CEIL", value), low.code.do("FLOOR", value)
    return low.code.do("WHERE", low.code.do("LT", value, low.code.number(0.0)), up, down)


def _to_0(low: Lowering, value: int, divisor: int) -> int:
    """A quotient of whole numbers, rounded to 0: from 0 on it is rounded down."""
    value, zero = low.as_int(value), low.whole(0)
    opposite = low.integer("INT_SUB", zero, low.integer("INT_DIV", low.integer("INT_SUB", zero, value), divisor))
    below = low.code.do("INT_LT", value, zero)
    negative = low.code.do("NOT", below) if low.ranges[divisor][1] < 0 else below
    return low.choose(negative, opposite, low.integer("INT_DIV", value, divisor))


def _divisor(low: Lowering, value: int) -> int:
    value = low.as_int(value)
    at_least, at_most = low.ranges[value]
    if at_least <= 0 <= at_most:
        raise NotLowered("it divides whole numbers by what may be 0")
    return value


def _remainder(low: Lowering, x: Node, a: Any, b: Any) -> int:
    p, q = low.value(a), low.value(b)
    if x.dtype.is_floating_point:
        return low.code.do("REMAINDER", low.as_float(p), low.as_float(q))
    p, q = low.as_int(p), _divisor(low, q)
    at_least, at_most = low.ranges[q]
    if at_least == at_most > 0 and at_most & (at_most - 1) == 0:  # a power of 2: the lowest bits, of negative p too
        value = low.code.do("AND", p, low.whole(at_most - 1))
    else:
        value = low.integer("INT_SUB", p, low.integer("INT_MUL", low.integer("INT_DIV", p, q), q))
    low.ranges[value] = (0, at_most - 1) if at_least > 0 else (at_least + 1, 0)
    return value


def _power(low: Lowering, x: Node, a: Any, b: Any) -> int:
    p = low.value(a)
    if not x.dtype.is_floating_point:
        if b not in (1, 2):
            raise NotLowered(f"it has no instruction for {x.op} of whole numbers")
        return low.as_int(p) if b == 1 else low.integer("INT_MUL", low.as_int(p), low.as_int(p))
    p = low.as_float(p)
    if isinstance(b, (int, float)) and b in (1, 2, 3, -1, -2, 0.5, -0.5):
        value = low.code.do("SQRT", p) if abs(b) == 0.5 else p
        for _ in range(int(abs(b)) - 1):
            value = low.code.do("MUL", value, p)
        return value if b > 0 else low.code.do("DIV", low.code.number(1.0), value)
    return low.code.do("POW", p, low.as_float(low.value(b)))


def _absolute(low: Lowering, x: Node, a: Any) -> int:
    value = low.value(a)
    if x.dtype.is_floating_point:
        return low.code.do("ABS", low.as_float(value))
    value = low.as_int(value)
    at_least, at_most = low.ranges[value]
    found = low.code.do("INT_ABS", value)
    low.ranges[found] = (0 if at_least <= 0 <= at_most else min(abs(at_least), abs(at_most)), max(-at_least, at_most))
    return found


def _extreme(low: Lowering, x: Node, a: Any, b: Any) -> int:
    op = {"maximum": "MAX", "max": "MAX"}.get(name_of(x), "MIN")
    p, q = low.like(x, low.value(a)), low.like(x, low.value(b))
    if x.dtype.is_floating_point:
        return low.code.do(op, p, q)
    return (
        low.integer(f"INT_{op}", p, q) if x.dtype != torch.bool else low.code.do("OR" if op == "MAX" else "AND", p, q)
    )


def _clamp(low: Lowering, x: Node, a: Any, min: Any = None, max: Any = None) -> int:
    value = low.like(x, low.value(a))
    if name_of(x) == "clamp_max":
        min, max = None, min
    floats = x.dtype.is_floating_point
    for bound, op in ((min, "MAX"), (max, "MIN")):
        if bound is None:
            continue
        limit = low.like(x, low.value(bound))
        if not floats:
            value = low.integer(f"INT_{op}", value, limit)
            continue
        beyond = low.code.do("LT", *((value, limit) if op == "MAX" else (limit, value)))  # its slope is 1 at a bound
        if not low.code.is_float(limit) or math.isnan(low.code.float_of(limit)):  # a bound of NaN makes all numbers NaN
            beyond = low.code.do("OR", beyond, low.code.do("NOT", low.code.do("EQ", limit, limit)))
        value = low.code.do("WHERE", beyond, limit, value)
    return value


def _compared(low: Lowering, x: Node, a: Any, b: Any) -> int:
    op, swapped, negated = _COMPARISONS[name_of(x)]
    p, q = low.value(a), low.value(b)
    if "float" in (low.code.kind(p), low.code.kind(q)):
        p, q = low.as_float(p), low.as_float(q)
    else:
        p, q, op = low.as_int(p), low.as_int(q), f"INT_{op}"
    value = low.code.do(op, *((q, p) if swapped else (p, q)))
    return low.code.do("NOT", value) if negated else value


def _logic(low: Lowering, x: Node, a: Any, b: Any) -> int:
    kind, name = (
        name_of(x).strip("_").split("_")[:2] if not name_of(x).startswith("__") else ("bitwise", name_of(x).strip("_"))
    )
    if kind == "bitwise" and x.dtype != torch.bool:
        return low.bits(_LOGIC[name], low.as_int(low.value(a)), low.as_int(low.value(b)))
    return low.code.do(_LOGIC[name], low.as_bool(low.value(a)), low.as_bool(low.value(b)))


def _not(low: Lowering, x: Node, a: Any) -> int:
    if x.dtype != torch.bool:
        return low.integer("INT_SUB", low.whole(-1), low.as_int(low.value(a)))
    return low.code.do("NOT", low.as_bool(low.value(a)))


def _where(low: Lowering, x: Node, condition: Any, a: Any, b: Any) -> int:
    return low.choose(low.as_bool(low.value(condition)), low.like(x, low.value(a)), low.like(x, low.value(b)))


def _filled(low: Lowering, x: Node, a: Any, mask: Any, value: Any) -> int:
    return low.choose(low.as_bool(low.value(mask)), low.like(x, low.value(value)), low.like(x, low.value(a)))


def _same(low: Lowering, x: Node, a: Any, *_: Any, **__: Any) -> int:
    return low.like(x, low.value(a))


def _detached(low: Lowering, x: Node, a: Any) -> int:
    return low.code.detached(low.value(a))


def _relu(low: Lowering, x: Node, a: Any) -> int:
    if not x.dtype.is_floating_point:
        return low.integer("INT_MAX", low.as_int(low.value(a)), low.whole(0))
    value, zero = low.as_float(low.value(a)), low.code.number(0.0)
    return low.code.do("WHERE", low.code.do("LE", value, zero), zero, value)


def _leaky(low: Lowering, x: Node, a: Any, negative_slope: float = 0.01) -> int:
    value, zero = low.as_float(low.value(a)), low.code.number(0.0)
    return low.code.do(
        "WHERE", low.code.do("LT", zero, value), value, low.code.do("MUL", value, low.code.number(negative_slope))
    )


def _by_constant(op: str, factor: float) -> Callable[..., int]:
    """log2 and log10: the natural logarithm, and a factor."""
    return lambda low, x, a: low.code.do("MUL", low.code.do(op, low.as_float(low.value(a))), low.code.number(factor))


def _inverse(low: Lowering, x: Node, a: Any) -> int:
    value = low.as_float(low.value(a))
    return low.code.do("DIV", low.code.number(1.0), low.code.do("SQRT", value) if name_of(x) == "rsqrt" else value)


def _full_like(low: Lowering, x: Node, a: Any, *rest: Any, **_: Any) -> int:
    """A tensor of one number: like another one, or a single number of its dtype (s.new_zeros(()))."""
    if x.shape.numel() != 1 and x.shape != a.shape:
        raise NotLowered(f"{name_of(x)} makes a tensor of a shape of its own")
    return low.like(x, low.value(_NUMBERS.get(name_of(x), *rest[-1:])))


HANDLERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(_FUNCTIONS, _function),
    **dict.fromkeys(("add", "sub", "mul", "rsub"), _arithmetic),
    **dict.fromkeys(("div", "floor_divide"), _divided),
    **dict.fromkeys(("maximum", "minimum"), _extreme),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    **dict.fromkeys(_COMPARISONS, _compared),
    **dict.fromkeys((f"{kind}_{name}" for kind in ("logical", "bitwise") for name in _LOGIC), _logic),
    **dict.fromkeys(("__and__", "__or__", "__xor__"), _logic),
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(_UNCHANGED, _same),
    **dict.fromkeys(("rsqrt", "reciprocal"), _inverse),
    **dict.fromkeys((*_NUMBERS, "full_like", "new_full"), _full_like),
    "_to_copy": _same,
    "detach": _detached,
    "remainder": _remainder,
    "pow": _power,
    "abs": _absolute,
    "where": _where,
    "masked_fill": _filled,
    "relu": _relu,
    "leaky_relu": _leaky,
    "square": lambda low, x, a: _power(low, x, a, 2),
    "log2": _by_constant("LOG", 1 / math.log(2)),
    "log10": _by_constant("LOG", 1 / math.log(10)),
    "index": indexed,
    SEVERAL: of_several,
    **REDUCTIONS,
}
_ROUNDED = {  # by the kernels otherwise than by torch: a pair could be visible in one and hidden in the other
    *("exp", "exp2", "log", "log2", "log10", "tanh", "sigmoid", "log1p", "expm1", "erf", "sin", "cos", "silu"),
}


def _of_last_digits(low: Lowering, x: Node, *_: Any, **__: Any) -> int:
    raise NotLowered(f"which pairs it lets through depends on the last digit of {x.op}")


def _exact_power(low: Lowering, x: Node, a: Any, b: Any) -> int:
    return _power(low, x, a, b) if b in (1, 2, 0.5) or not x.dtype.is_floating_point else _of_last_digits(low, x)


def _exact_remainder(low: Lowering, x: Node, a: Any, b: Any) -> int:
    return _of_last_digits(low, x) if x.dtype.is_floating_point else _remainder(low, x, a, b)


def _in_float32(handler: Callable[..., int]) -> Callable[..., int]:
    """The handler of an operation whose result, of a pair, is not rounded to another dtype than the kernels'."""

    def handled(low: Lowering, x: Node, *args: Any, **kwargs: Any) -> int:
        if x.dtype == torch.float64:
            raise NotLowered("it computes in float64")
        return handler(low, x, *args, **kwargs)

    return handled


# Of masks: operations whose results are torch's to the last bit.
EXACT_HANDLERS = {
    name: _in_float32(handler)
    for name, handler in {
        **HANDLERS,
        **dict.fromkeys(_ROUNDED, _of_last_digits),
        **EXACT_REDUCTIONS,
        "pow": _exact_power,
        "remainder": _exact_remainder,
    }.items()
}
