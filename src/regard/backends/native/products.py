"""A Custom similarity that is a function of a dot product: that product, and a modifier of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.backends.native.modifiers.program import why_no_program_of_scores
from regard.backends.native.programs.graph import NotTraced
from regard.backends.native.programs.structure import key_of
from regard.backends.native.rows import Rows, other_use
from regard.call.problem import Problem
from regard.core.deferred import DeferredRows
from regard.core.functions import Unknown
from regard.core.region import Region
from regard.core.shapes import repeat_heads
from regard.core.tracing import data_unavailable, watched
from regard.core.vjp import vjp
from regard.scores.algebra import Modifier, Pipeline
from regard.scores.similarity import Custom, Dot

Gradients = tuple["Tensor | None", ...]
_MOST = 256  # functions that are known to agree with themselves


def with_product(problem: Problem) -> Problem:
    """The problem with Dot() >> a modifier in the place of a Custom, where the kernels can run that; else as it is."""
    if type(problem.similarity) is not Custom:
        return problem
    found = _rewritten(problem)
    return found if isinstance(found, Problem) else problem


def why_no_product(problem: Problem) -> str | None:
    """Why a Custom is no function of a dot product that the kernels can run, as a clause; None where it is."""
    found = _rewritten(problem)
    return found if isinstance(found, str) else None


def rows_made(problem: Problem) -> bool:
    """Whether with_product(problem) has other queries or keys than the problem: its function makes them of these."""
    found = with_product(problem)
    return found.q is not problem.q or found.k is not problem.k


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
    widths = problem.q.shape[-1], problem.k.shape[-1]
    modifier = OfProduct(similarity.fn, similarity.inputs, problem.frame.heads, problem.key_heads, widths)
    inputs = [t.detach() for t in similarity.inputs]
    given = problem.q.detach(), problem.k.detach()
    try:
        with torch.enable_grad():  # of nothing; but where the function forbids gradients is seen
            q, k = _rows(replace(problem, q=given[0], k=given[1]), inputs)
            if not _agrees(problem, modifier, inputs):
                return "it computes something else of stand-ins for q and k"
    except NotTraced as why:
        return str(why)
    except Exception as error:  # PyTorch says it where it runs the function
        return f"{type(error).__name__} was raised while it ran on stand-ins for q and k"
    if q is given[0] and k is given[1]:
        q, k = problem.q, problem.k
    found = replace(problem, q=q, k=k, score=Pipeline((Dot(), modifier, *problem.score.parts[1:])))
    return why_no_program_of_scores(found) or found


_agreed = set[Any]()  # what was tried, by what the result follows from


def _agrees(problem: Problem, modifier: OfProduct, inputs: Sequence[Tensor]) -> bool:
    """Whether a Custom's function computes of a few rows what it does of stand-ins for them: tried once for each
    function. One that looks at the numbers of a tensor becomes no program, whatever is found here.
    """
    try:
        key = key_of(modifier), problem.accumulate, len(problem.frame.batch)
    except Unknown:
        return _computes_the_same(problem, modifier, inputs)
    if key not in _agreed:
        if not _computes_the_same(problem, modifier, inputs):
            return False
        if len(_agreed) >= _MOST:
            _agreed.clear()
        _agreed.add(key)
    return True


def _computes_the_same(problem: Problem, modifier: OfProduct, inputs: Sequence[Tensor]) -> bool:
    """It may ask what they are, or how many: isinstance(q, Tensor). The rows are the same for all calls."""
    q = _some_rows(problem, problem.frame.heads, 2, problem.q.shape[-1])
    k = _some_rows(problem, problem.key_heads, 3, problem.k.shape[-1])
    made = _rows(replace(problem, q=q, k=k), inputs)
    own = modifier.with_tensors(iter(inputs))
    at = problem.frame.region(slice(0, 1), slice(0, 1))  # which the modifier does not read
    s = own.modify(made[0] @ repeat_heads(made[1], problem.frame.heads).mT, at)
    right = modifier.fn(q.clone(), repeat_heads(k, problem.frame.heads).clone(), *inputs)
    if s.shape != right.shape or s.dtype != right.dtype:
        return False
    # the function may multiply the rounding of a product
    error = 1e-3 * float(right.detach().abs().nan_to_num(0, 0, 0).amax())
    return torch.allclose(s, right, rtol=1e-3, atol=error, equal_nan=True)


def _some_rows(problem: Problem, heads: int, rows: int, width: int) -> Tensor:
    """Numbers between -1 and 1, without a pattern and without a generator, which the caller may have seeded."""
    numbers = torch.arange(heads * rows * width, dtype=problem.accumulate, device="cpu")
    return (0.7 * numbers + rows).sin().reshape(*(1 for _ in problem.frame.batch), heads, rows, width)


def _rows(problem: Problem, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The queries and keys whose dot product a problem's Custom computes; those of the problem where only multiples.

    Raises NotTraced where there is not one such product.
    """
    similarity, met = problem.similarity, list[tuple[Rows, Rows]]()
    assert isinstance(similarity, Custom)
    pair = torch.zeros(problem.frame.heads, 1, 1, dtype=problem.accumulate, device="cpu")

    def product(q: Rows, k: Rows) -> Tensor:
        met.append((q, k))
        return pair

    widths = problem.q.shape[-1], problem.k.shape[-1]
    similarity.fn(*_stand_ins(problem.frame.heads, problem.key_heads, widths, product), *inputs)
    if not met:
        raise other_use()
    (q, k), *others = met
    if all(rows.factor is not None for both in met for rows in both):
        return problem.q, problem.k
    keys = [[step.key for step in rows.steps] for rows in (q, k)]
    if any([[step.key for step in rows.steps] for rows in both] != keys for both in others):
        raise NotTraced("it computes several products of rows")
    return _made(q, problem.q, problem.accumulate), _made(k, problem.k, problem.accumulate)


def _made(rows: Rows, t: Tensor, dtype: torch.dtype) -> Tensor:
    if not rows.steps:
        return t
    if isinstance(t, DeferredRows):
        raise NotTraced("keys that lie in pages or in int8 are read where they are")
    found = rows.made_of(t.to(dtype))
    if found.shape[:-1] != t.shape[:-1]:
        raise other_use()
    if found.dtype != dtype:
        raise NotTraced(f"it computes in {str(found.dtype).removeprefix('torch.')}")
    return found


def _stand_ins(
    heads: int, key_heads: int, widths: tuple[int, int], product: Callable[[Rows, Rows], Tensor]
) -> tuple[Rows, Rows]:
    # a function is given keys of all heads: where they share keys, what differs by head is not a row of the caller's
    return Rows("q", heads, widths[0], product), Rows("k", key_heads if key_heads == heads else 1, widths[1], product)


def needs_of_product(problem: Problem, needs: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which tensors of with_product(problem) need gradients, so that those of the problem find theirs."""
    if not rows_made(problem):
        return needs
    learned = any(needs[3 : 3 + len(problem.similarity.tensors())])
    return needs[0] or learned, needs[1] or learned, *needs[2:]


def gradients_of_product(problem: Problem, found: Gradients, needs: tuple[bool, ...]) -> Gradients:
    """The gradients of a problem's tensors from those of with_product(problem)."""
    if not rows_made(problem):
        return found
    count = len(problem.similarity.tensors())
    places = (0, 1, *range(3, 3 + count))  # of q, k and what the function is given
    tensors = problem.tensors()
    with torch.enable_grad():
        own = {n: tensors[n].detach().requires_grad_(needs[n]) for n in places}
        made = _rows(replace(problem, q=own[0], k=own[1]), [own[n] for n in places[2:]])
        pairs = [(t, g) for t, g in zip(made, found, strict=False) if t.requires_grad and g is not None]
        wanted = [n for n in places if needs[n]]
        outputs, cotangents = [t for t, _ in pairs], [g.to(t.dtype) for t, g in pairs]
        pulled: Sequence[Tensor | None] = [None for _ in wanted]
        if pairs:
            pulled = vjp(outputs, [own[n] for n in wanted], cotangents)
    result = [g if need else None for g, need in zip(found, needs, strict=True)]
    for n, g in zip(wanted, pulled, strict=True):
        before = found[n] if n > 2 else None  # what the function does with the product has a gradient too
        terms = [x.to(tensors[n].dtype) for x in (before, g) if x is not None]
        result[n] = sum(terms[1:], start=terms[0]) if terms else torch.zeros_like(tensors[n])
    return tuple(result)


@dataclass(frozen=True)
class OfProduct(Modifier):
    """fn(q, k, *tensors), where it computes what it says of a pair from one product of rows of q and k alone.

    heads, key_heads, widths: of q and k.
    """

    positional: ClassVar[bool] = False
    indexed: ClassVar[bool] = False

    fn: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    heads: int
    key_heads: int
    widths: tuple[int, int]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        def product(q: Rows, k: Rows) -> Tensor:
            if q.factor is None or k.factor is None:
                return s  # the product of rows that were made before
            factor = q.factor * k.factor
            return s if factor == 1.0 else s * factor

        rows: tuple[Any, Any] = _stand_ins(self.heads, self.key_heads, self.widths, product)
        return self.fn(*rows, *self.inputs)
