"""Facts on the native kernels: which of them regard_facts of native/facts_args.h finds, and how it is asked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.backends.library import Arguments
from regard.backends.lowering import lower
from regard.backends.native import Native
from regard.backends.operation import arguments, library
from regard.inspect.facts import Entropy, Fact, Map, MaxScore, Peak, Received, Top, TopKeys
from regard.problem import Problem
from regard.scores.additive import Additive
from regard.shapes import branchless

MOST_TOP = 64  # REGARD_TOP of native/facts_args.h

Answers = dict[Fact[Any], Any]


class FactArguments(ctypes.Structure):
    """regard_fact_args of native/facts_args.h."""

    _fields_ = (
        ("call", Arguments),
        *((name, ctypes.c_void_p) for name in ("lse", "max_score", "max_key", "entropy")),
        ("top", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("top_weights", "top_keys", "top_rest")),
        *((name, ctypes.c_void_p) for name in ("received", "shares", "most", "map")),
        ("map_rows", ctypes.c_int64),
        ("map_cols", ctypes.c_int64),
    )


@dataclass(frozen=True, eq=False)
class Request:
    """What one fact asks of the kernel: its tensors and numbers by field, and the answer that they make."""

    told: dict[str, Tensor | int]
    answer: Callable[[], Any]


def why_not(problem: Problem, fact: Fact[Any]) -> str | None:
    """Why the kernels do not find a fact of a problem, as a clause; None if they do."""
    if type(fact) not in _REQUESTS:
        return f"it has no kernel for {type(fact).__name__}"
    if isinstance(fact, Top) and fact.k > MOST_TOP:
        return f"it keeps the top {MOST_TOP} keys at most"
    return why_not_problem(problem)


def why_not_problem(problem: Problem) -> str | None:
    """Why the kernels find nothing of a problem, as a clause; None if they find something."""
    if branchless(*problem.tensors()):
        return "values cannot be looked at inside a transform or a graph"
    if 0 in problem.q.shape[:-1] or 0 in problem.k.shape[:-1]:
        return "there are no queries or no keys"
    if isinstance(problem.similarity, Additive):
        return "additive scores have kernels of their own, without facts"
    return Native().why_not(problem, lse=True)


def find(problem: Problem, facts: tuple[Fact[Any], ...]) -> tuple[Tensor, Answers]:
    """The lse (*batch, h, nq), a sink included, and the answers to facts that the kernels have.

    Facts that ask the same field of the kernels' argument, as two maps of different size do, take a sweep each.
    """
    lse = _rows(problem)
    rounds: list[dict[str, Tensor | int]] = [{"lse": lse}]
    requests = {fact: _REQUESTS[type(fact)](fact, problem) for fact in facts}
    for request in requests.values():
        free = next((told for told in rounds if not told.keys() & request.told.keys()), None)
        if free is None:
            rounds.append(free := {})
        free.update(request.told)
    lowered = lower(replace(problem, v=problem.v[..., :0], dropout=None), library().tile)
    call = arguments(lowered, problem.q.new_empty((*lowered.shape, 0), dtype=torch.float32), None)
    for told in rounds:
        given = FactArguments(call=call)
        for name, value in told.items():
            setattr(given, name, value.data_ptr() if isinstance(value, Tensor) else value)
        library().facts(given)
    return lse, {fact: request.answer() for fact, request in requests.items()}


def _rows(problem: Problem, *more: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty((*problem.q.shape[:-1], *more), dtype=dtype)


def _entropy(fact: Entropy, problem: Problem) -> Request:
    found = _rows(problem)
    return Request({"entropy": found}, lambda: found)


def _max_score(fact: MaxScore, problem: Problem) -> Request:
    peak = Peak(_rows(problem), _rows(problem, dtype=torch.int64))
    return Request({"max_score": peak.score, "max_key": peak.key}, lambda: peak)


def _top(fact: Top, problem: Problem) -> Request:
    found = TopKeys(_rows(problem, fact.k, dtype=torch.int64), _rows(problem, fact.k), _rows(problem))
    told = {"top": fact.k, "top_keys": found.keys, "top_weights": found.weights, "top_rest": found.rest}
    return Request(told, lambda: found)


def _received(fact: Received, problem: Problem) -> Request:
    found = torch.empty((*problem.q.shape[:-2], problem.frame.nk))
    return Request({"received": found}, lambda: found)


def _map(fact: Map, problem: Problem) -> Request:
    rows, cols = min(fact.rows, problem.frame.nq), min(fact.cols, problem.frame.nk)
    found = torch.empty((*problem.q.shape[:-2], rows, cols))
    return Request({"map": found, "map_rows": rows, "map_cols": cols}, lambda: found)


# by type, not isinstance: a subclass may mean something else
_REQUESTS: dict[type, Callable[[Any, Problem], Request]] = {
    Entropy: _entropy,
    MaxScore: _max_score,
    Top: _top,
    Received: _received,
    Map: _map,
}
