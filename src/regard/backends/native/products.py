"""A Custom similarity that is a function of the dot product of q and k: that product, and a modifier of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor

from regard.backends.native.modifiers.program import why_no_program_of_scores
from regard.backends.native.programs.recorder import NotTraced
from regard.call.problem import Problem
from regard.core.region import Region
from regard.core.tracing import data_unavailable, watched
from regard.scores.algebra import Modifier, Pipeline
from regard.scores.similarity import Custom, Dot


def with_product(problem: Problem) -> Problem:
    """The problem with Dot() >> a modifier in the place of a Custom, where the kernels can run that; else as it is."""
    found = _rewritten(problem)
    return found if isinstance(found, Problem) else problem


def why_no_product(problem: Problem) -> str | None:
    """Why a Custom is no function of the dot product that the kernels can run, as a clause; None where it is."""
    found = _rewritten(problem)
    return found if isinstance(found, str) else None


_found: WeakKeyDictionary[Problem, Problem | str] = WeakKeyDictionary()


def _rewritten(problem: Problem) -> Problem | str | None:
    """None of a problem without a Custom."""
    similarity = problem.similarity
    if type(similarity) is not Custom or 0 in problem.frame.shape:
        return None
    if data_unavailable(*problem.tensors()) or watched():
        return "a graph records the call"
    if problem not in _found:
        _found[problem] = _product(problem, similarity)
    return _found[problem]


def _product(problem: Problem, similarity: Custom) -> Problem | str:
    width = problem.q.shape[-1]
    if width != problem.k.shape[-1]:
        return "queries and keys have other widths"
    modifier = OfProduct(similarity.fn, similarity.inputs, width)
    found = replace(problem, score=Pipeline((Dot(), modifier, *problem.score.parts[1:])))
    return why_no_program_of_scores(found) or found


@dataclass(frozen=True)
class OfProduct(Modifier):
    """fn(q, k, *tensors), where it computes what it says of a pair from q · k alone. width: of q and k."""

    positional: ClassVar[bool] = False
    indexed: ClassVar[bool] = False

    fn: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    width: int

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.fn(Rows(s, self.width, "q"), Rows(s, self.width, "k"), *self.inputs)


class Rows:
    """Queries or keys of which only the dot products s are known, and multiples of them."""

    def __init__(self, s: Tensor, width: int, name: str, factor: float = 1.0, transposed: bool = False) -> None:
        self._s, self._width, self._name, self._factor, self._transposed = s, width, name, factor, transposed

    @property
    def mT(self) -> Rows:
        return Rows(self._s, self._width, self._name, self._factor, not self._transposed)

    def transpose(self, a: int, b: int) -> Rows:
        if {a, b} != {-1, -2}:
            raise _other_use()
        return self.mT

    def size(self, axis: int) -> int:
        """Of features; how many rows there are is not known."""
        if axis != (-2 if self._transposed else -1):
            raise _other_use()
        return self._width

    @property
    def shape(self) -> _Shape:
        return _Shape(self)

    def __mul__(self, x: Any) -> Rows:
        if type(x) not in (int, float):
            raise _other_use()
        return Rows(self._s, self._width, self._name, self._factor * x, self._transposed)

    __rmul__ = __mul__

    def __truediv__(self, x: Any) -> Rows:
        if type(x) not in (int, float) or x == 0:
            raise _other_use()
        return self * (1 / x)

    def __matmul__(self, other: Any) -> Tensor:
        if not isinstance(other, Rows) or (self._transposed, other._transposed) != (False, True):
            raise _other_use()
        return self._times(other)

    def _times(self, other: Rows) -> Tensor:
        if (self._name, other._name) != ("q", "k"):
            raise _other_use()
        factor = self._factor * other._factor
        return self._s if factor == 1.0 else self._s * factor

    def __getattr__(self, name: str) -> Any:
        raise _other_use()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if kwargs or name not in ("matmul", "einsum", "transpose", "swapaxes", "mul", "div"):
            raise _other_use()
        if name == "matmul" and isinstance(args[0], Rows):
            return args[0] @ args[1]
        if name in ("transpose", "swapaxes"):
            return args[0].transpose(*args[1:])
        if name == "einsum":
            text, *rows = args
            rows = rows[0] if len(rows) == 1 else rows
            if _is_product(text) and all(isinstance(x, Rows) and not x._transposed for x in rows):
                return rows[0]._times(rows[1])
        raise _other_use()


class _Shape:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitem__(self, axis: Any) -> int:
        return self._rows.size(axis)


def _is_product(text: Any) -> bool:
    """Whether an equation of einsum is a dot product of all queries and keys: bhid,bhjd->bhij."""
    if not isinstance(text, str) or "->" not in text or text.count(",") != 1:
        return False
    sides, result = text.replace(" ", "").split("->")
    q, k = sides.split(",")
    lead, i, j, d = q[:-2], q[-2:-1], k[-2:-1], q[-1:]
    return k[:-2] == lead and k[-1:] == d and result == lead + i + j and len({i, j, d}) == 3 and not {i, j, d} & {*lead}


def _other_use() -> NotTraced:
    return NotTraced("it uses q and k otherwise than in q @ k.mT")
