"""Rows: queries or keys that stand in for tensors while a function of one's own makes a dot product of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.backends.native.programs.graph import NotTraced
from regard.core.tracing import finite
from regard.core.value import number_key

_NUMBERS = (int, float, bool, str, type(None))
_ELEMENTWISE = frozenset(
    (
        *("abs", "celu", "clamp", "cos", "elu", "erf", "exp", "exp2", "expm1", "gelu", "hardtanh", "leaky_relu", "log"),
        *("log1p", "neg", "negative", "pow", "positive", "relu", "rsqrt", "selu", "sigmoid", "silu", "sin", "softplus"),
        *("softsign", "sqrt", "square", "tan", "tanh"),
    )
)
_WITH_TENSORS = frozenset(("add", "sub", "mul", "div", "rsub"))
_ALIASES = {"multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub"}
_OF_FEATURES = frozenset(("softmax", "log_softmax", "normalize"))  # with dim=-1
_KNOWN = _ELEMENTWISE | _WITH_TENSORS | _OF_FEATURES


@dataclass(frozen=True)
class Step:
    """What makes rows of rows, each of one alone.

    key     equal steps make equal rows
    factor  of a multiple, its number
    """

    run: Callable[[Tensor], Tensor]
    key: Any
    factor: float | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """Queries or keys, of which only the operations that make them are known.

    name    "q" or "k"
    heads   how many they have
    width   how many features
    product what becomes of the dot product of queries and keys
    steps   what makes them of the caller's queries or keys
    turned  whether features and rows are transposed
    """

    name: str
    heads: int
    width: int
    product: Callable[[Rows, Rows], Tensor]
    steps: tuple[Step, ...] = ()
    turned: bool = False

    @property
    def factor(self) -> float | None:
        """The number by which they are multiples of the caller's; None where they are something else."""
        factors = [step.factor for step in self.steps]
        return None if None in factors else math.prod(cast("list[float]", factors))

    def made_of(self, t: Tensor) -> Tensor:
        """The rows that are made of a tensor's.

        The gradient of a row that is not finite stays 0 where it comes as 0, as in Problem.tile: it is that at 0 in the
        place of NaN, and at a large number in that of infinity. A row that stays not finite passes none.
        """
        if not self.steps or finite(t):
            return self._run(t)
        fine, raw = t.isfinite().all(-1, keepdim=True), self._run(t.detach()).detach()
        usable, large = fine | raw.isfinite().all(-1, keepdim=True), torch.finfo(t.dtype).max ** 0.25
        clean = self._run(t.nan_to_num(0.0, large, -large).masked_fill(~usable, 0))
        return torch.where(fine, clean, torch.where(usable, raw + (clean - clean.detach()), raw))

    def _run(self, t: Tensor) -> Tensor:
        for step in self.steps:
            t = step.run(t)
        return t

    # What is asked of them.

    def __eq__(self, other: object) -> Any:
        raise other_use()

    def __bool__(self) -> bool:
        raise other_use()

    @property
    def mT(self) -> Rows:
        return replace(self, turned=not self.turned)

    def transpose(self, a: int, b: int) -> Rows:
        if {a, b} != {-1, -2}:
            raise other_use()
        return self.mT

    def size(self, axis: int) -> int:
        """Of features; how many rows there are is not known."""
        if axis != (-2 if self.turned else -1):
            raise other_use()
        return self.width

    @property
    def shape(self) -> _Shape:
        return _Shape(self)

    def __getitem__(self, at: Any) -> Rows:
        if self.turned or type(at) is not tuple or len(at) != 2 or at[0] is not Ellipsis or type(at[1]) is not slice:
            raise other_use()
        some = at[1]
        key = ("getitem", some.start, some.stop, some.step)
        return self._then(Step(lambda t: t[..., some], key), len(range(self.width)[some]))

    def __getattr__(self, name: str) -> Any:
        if _ALIASES.get(name, name) not in _KNOWN:
            raise other_use()
        return lambda *args, **named: self._by(name, getattr(Tensor, name), args, named)

    # What makes others of them.

    def _by(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """fn(self, *args, **named)."""
        name = _ALIASES.get(name, name)
        if name in _WITH_TENSORS and len(args) == 1 and isinstance(args[0], Tensor) and not named:
            return self._with(name, args[0], fn)
        if not all(isinstance(x, _NUMBERS) for x in (*args, *named.values())) or named.get("inplace"):
            raise other_use()
        if name in _OF_FEATURES and (self.turned or args or named.get("dim") != -1):
            raise other_use()
        number: Any = args[0] if len(args) == 1 and type(args[0]) in (int, float) and not named else None
        if name == "mul" and number is not None:
            return self._times(number)
        if name == "div" and number:
            return self._times(1 / number)
        key = name, tuple(map(number_key, args)), tuple((n, number_key(x)) for n, x in named.items())
        return self._then(Step(lambda t: fn(t, *args, **named), key), self.width)

    def _times(self, x: float) -> Rows:
        return self._then(Step(lambda t: t * x, ("times", number_key(x)), x), self.width)

    def _with(self, name: str, x: Tensor, fn: Callable[[Tensor, Tensor], Tensor]) -> Rows:
        """An operation with a tensor that all rows share."""
        shape = (1,) * (3 - x.dim()) + tuple(x.shape)
        shared = shape[-2] == 1 and shape[-3] in (1, self.heads) and not any(n != 1 for n in shape[:-3])
        if self.turned or not shared or shape[-1] not in (1, self.width):
            raise other_use()
        same = _unchanged(x)
        return self._then(Step(lambda t: fn(t, same()), (name, id(x), _version(x))), self.width)

    def projected(self, matrix: Tensor, fn: Callable[[Tensor], Tensor], key: Any) -> Rows:
        """Rows times a matrix (width, other width), one for all or one a head."""
        fits = matrix.dim() in (2, 3) and matrix.shape[-2] == self.width
        if self.turned or not fits or (matrix.dim() == 3 and matrix.shape[0] not in (1, self.heads)):
            raise other_use()
        return self._then(Step(fn, key), matrix.shape[-1])

    def _then(self, step: Step, width: int) -> Rows:
        _refuse_no_grad()
        return replace(self, steps=(*self.steps, step), width=width)

    def _met(self, other: Rows) -> Tensor:
        if (self.name, other.name) != ("q", "k") or self.width != other.width:
            raise other_use()
        _refuse_no_grad()
        return self.product(self, other)

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Tensor):
            same = _unchanged(other)
            return self.projected(other, lambda t: t @ same(), ("matmul", id(other), _version(other)))
        if not isinstance(other, Rows) or (self.turned, other.turned) != (False, True):
            raise other_use()
        return self._met(other)

    def __mul__(self, x: Any) -> Rows:
        return self._by("mul", torch.mul, (x,), {})

    __rmul__ = __mul__

    def __truediv__(self, x: Any) -> Rows:
        return self._by("div", torch.div, (x,), {})

    def __add__(self, x: Any) -> Rows:
        return self._by("add", torch.add, (x,), {})

    __radd__ = __add__

    def __sub__(self, x: Any) -> Rows:
        return self._by("sub", torch.sub, (x,), {})

    def __rsub__(self, x: Any) -> Rows:
        return self._by("rsub", torch.rsub, (x,), {})

    def __neg__(self) -> Rows:
        return self._times(-1.0)

    def __pow__(self, x: Any) -> Rows:
        return self._by("pow", torch.pow, (x,), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        name = _ALIASES.get(name, name)
        if name == "matmul" and isinstance(args[0], Rows) and not named:
            return args[0] @ args[1]
        if name in ("transpose", "swapaxes") and not named:
            return args[0].transpose(*args[1:])
        if name == "einsum":
            return _einsum(*args)
        if name == "linear":
            return _linear(*args, **named)
        if name in ("add", "mul") and isinstance(args[1], Rows) and isinstance(args[0], Tensor):
            return args[1]._by(name, func, args[:1], named)
        if name in _KNOWN and isinstance(args[0], Rows):
            return args[0]._by(name, func, args[1:], named)
        raise other_use()


def _einsum(text: Any, *rows: Any) -> Tensor:
    rows = rows[0] if len(rows) == 1 else rows
    if _is_product(text) and all(isinstance(x, Rows) and not x.turned for x in rows):
        return rows[0]._met(rows[1])
    raise other_use()


def _linear(x: Any, weight: Any, bias: Any = None) -> Rows:
    fits = isinstance(x, Rows) and isinstance(weight, Tensor) and weight.dim() == 2
    if not fits or not (bias is None or isinstance(bias, Tensor)):
        raise other_use()
    w, b = _unchanged(weight), _unchanged(bias)
    key = "linear", id(weight), _version(weight), id(bias), _version(bias)
    return x.projected(weight.T, lambda t: torch.nn.functional.linear(t, w(), b()), key)


class _Shape:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitem__(self, axis: Any) -> int:
        return self._rows.size(axis)

    def __eq__(self, other: object) -> Any:
        raise other_use()


def _is_product(text: Any) -> bool:
    """Whether an equation of einsum is a dot product of all queries and keys: bhid,bhjd->bhij."""
    if not isinstance(text, str) or "->" not in text or text.count(",") != 1:
        return False
    sides, result = text.replace(" ", "").split("->")
    q, k = sides.split(",")
    lead, i, j, d = q[:-2], q[-2:-1], k[-2:-1], q[-1:]
    return k[:-2] == lead and k[-1:] == d and result == lead + i + j and len({i, j, d}) == 3 and not {i, j, d} & {*lead}


def _version(x: Tensor | None) -> int | None:
    """How often a tensor has been written into; None where nobody counts."""
    return None if x is None or x.is_inference() else x._version


def _unchanged(x: Any) -> Callable[[], Any]:
    """The tensor, later; NotTraced where it was written into meanwhile."""
    before = _version(x)

    def same() -> Any:
        if _version(x) != before:
            raise NotTraced("it writes into a tensor")
        return x

    return same


def _refuse_no_grad() -> None:
    if not torch.is_grad_enabled():
        raise NotTraced("it uses q and k under torch.no_grad()")


def other_use() -> NotTraced:
    """What a function of q and k does that Rows do not know."""
    return NotTraced("it uses q and k otherwise than in q @ k.mT, of each row by itself")
