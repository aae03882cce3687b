"""Facts on the native kernels: which of them they find, and how abi.FactArguments are filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.abi import SETS, TOP, FactArguments
from regard.backends.native.args import lower
from regard.backends.native.backend import Native
from regard.backends.native.bind import bind
from regard.backends.native.ffi import library
from regard.backends.native.launch import arguments
from regard.backends.native.lower_mask import lower_mask
from regard.backends.native.modifiers.distance import NOT_NEAR, near
from regard.backends.native.products import with_product
from regard.call.problem import Problem
from regard.core.tracing import data_unavailable, watched
from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.carried import KeyNorms
from regard.inspect.facts.keys import Last, MaxReceived, Readers, Received, placed
from regard.inspect.facts.places import Distance, Mass, Offsets, Within
from regard.inspect.facts.pooled import Histogram, Map
from regard.inspect.facts.quantised import Quantised, quantise
from regard.inspect.facts.rows import Concentration, Entropy, MaxScore, Peak, Top, TopKeys, Visible
from regard.inspect.kept import empty
from regard.scores.additive import Additive
from regard.scores.elementwise import Elementwise

_FAR = (1 << 31) - 1


Fields = dict[str, "Tensor | int"]


@dataclass(frozen=True, eq=False)
class Request:
    """What one fact asks of the kernel: its fields, by what they answer, and how the answer is made when it has run.

    Two requests that ask one field for different things need a sweep each.
    """

    fields: Fields
    answer: Callable[[], Any]


def why_not(problem: Problem, fact: Fact[Any]) -> str | None:
    """Why the kernels do not find a fact of a problem, as a clause; None if they do."""
    if type(fact) not in (*_REQUESTS, *_BANDS):
        return f"it has no {type(fact).__name__}"
    return why_nothing(problem) or _why_not_fact(problem, fact)


def why_nothing(problem: Problem) -> str | None:
    """Why the kernels find no fact of a problem, as a clause; None if they find some."""
    if data_unavailable(*problem.tensors()) or watched():
        return "a transform, a graph or a TorchDispatchMode does not see a kernel"
    if 0 in problem.q.shape[:-1] or 0 in problem.k.shape[:-1]:
        return "there are no queries or no keys"
    if isinstance(problem.similarity, (Additive, Elementwise)):
        return f"scores of {type(problem.similarity).__name__} have no facts"
    return Native().why_not(problem, lse=True)


def _why_not_fact(problem: Problem, fact: Fact[Any]) -> str | None:
    if isinstance(fact, Top) and fact.k > TOP:
        return f"it keeps the top {TOP} keys at most"
    if isinstance(fact, Received) and isinstance(fact.weights, Last):
        return "the last queries alone are a small sweep"
    if isinstance(fact, Mass) and not 0 < fact.count <= SETS:
        return f"it has 1 to {SETS} groups of keys"
    if isinstance(fact, Offsets) and len(fact.offsets) > SETS:
        return f"it has {SETS} offsets at most"
    if isinstance(fact, (Distance, Within, Offsets)) and not near(problem.frame.positions):
        return NOT_NEAR
    return None


def ask(problem: Problem, facts: tuple[Fact[Any], ...]) -> tuple[Tensor, dict[Fact[Any], Any]]:
    """The lse (*batch, h, nq), a sink included, and the answers to facts for which why_not has nothing to say.

    One sweep, and another for each time that one kind of fact is asked again with other arguments.
    """
    lse = _rows(problem)
    requests = {fact: _REQUESTS[type(fact)](fact, problem) for fact in facts if not isinstance(fact, _BANDS)}
    requests |= _bands(tuple(fact for fact in facts if isinstance(fact, _BANDS)), problem)
    sweeps: list[Fields] = [{"lse": lse}]
    for asked in {id(request.fields): request.fields for request in requests.values()}.values():
        fields = next((fields for fields in sweeps if not fields.keys() & asked.keys()), None)
        if fields is None:
            sweeps.append(fields := {})
        fields.update(asked)
    problem = with_product(problem)
    alone = replace(problem, v=problem.v[..., :0].to(problem.q.dtype), dropout=None)  # facts need no values
    args = lower(alone, lower_mask(alone, library().tile))
    call = arguments(args, out=lse[..., :0])
    at = problem.frame.positions
    q_at, k_at = (t.long().expand(*problem.frame.batch, t.shape[-1]).contiguous() for t in (at.q, at.k))
    for fields in sweeps:
        numbers = {name: value for name, value in fields.items() if isinstance(value, int)}
        given = FactArguments(call=call, **numbers)
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        bind(given, {**tensors, "q_at": q_at, "k_at": k_at})
        library().run(given)
    return lse, {fact: request.answer() for fact, request in requests.items()}


def _rows(problem: Problem, *more: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return empty((*problem.q.shape[:-1], *more), dtype)


def _heads(problem: Problem, *more: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return empty((*problem.q.shape[:-2], *more), dtype)


def _single(name: str, make: Callable[[Problem], Tensor]) -> Callable[[Any, Problem], Request]:
    """A fact whose answer is one field."""

    def request(_: Fact[Tensor], problem: Problem) -> Request:
        found = make(problem)
        return Request({name: found}, lambda: found)

    return request


def _max_score(_: MaxScore, problem: Problem) -> Request:
    peak = Peak(_rows(problem), _rows(problem, dtype=torch.int64))
    return Request({"max_score": peak.score, "max_key": peak.key}, lambda: peak)


def _top(fact: Top, problem: Problem) -> Request:
    found = TopKeys(_rows(problem, fact.k, dtype=torch.int64), _rows(problem, fact.k), _rows(problem))
    fields = {"top": fact.k, "top_keys": found.keys, "top_weights": found.weights, "top_rest": found.rest}
    return Request(fields, lambda: found)


def _received(fact: Received, problem: Problem) -> Request:
    fields: Fields = {"received": (found := _heads(problem, problem.frame.nk))}
    if fact.weights is not None:
        assert isinstance(fact.weights, Tensor)
        fields["shares"] = placed(fact.weights, problem).expand(problem.q.shape[:-1]).contiguous()
    return Request(fields, lambda: found)


def _map(fact: Map, problem: Problem) -> Request:
    rows, cols = min(fact.rows, problem.frame.nq), min(fact.cols, problem.frame.nk)
    found = _heads(problem, rows, cols)
    return Request({"map": found, "map_rows": rows, "map_cols": cols}, lambda: found)


def _quantised(fact: Quantised, problem: Problem) -> Request:
    if not fact.fits(problem.frame):
        none = _heads(problem, 0, 0, dtype=torch.uint8)
        return Request({}, lambda: none)
    weights = _map(Map(problem.frame.nq, problem.frame.nk), problem)  # a cell a pair
    return Request(weights.fields, lambda: quantise(weights.answer()))


def _mass(fact: Mass, problem: Problem) -> Request:
    frame = problem.frame
    group = fact.numbers(frame).int().expand(*frame.batch, frame.nk).contiguous()
    found = _rows(problem, fact.count)
    return Request({"groups": fact.count, "group": group, "mass": found}, lambda: found)


_BANDS = (Within, Offsets)  # both are ranges of distance, and any number of them is asked for at once


def _bands(facts: tuple[Within | Offsets, ...], problem: Problem) -> dict[Fact[Any], Request]:
    requests: dict[Fact[Any], Request] = {}
    left = list(facts)
    while left:
        ranges: list[tuple[int, int]] = []
        some: dict[Within | Offsets, slice] = {}
        while left and len(ranges) + len(own := _ranges(left[0])) <= SETS:
            some[left.pop(0)] = slice(len(ranges), len(ranges) + len(own))
            ranges += own
        found, band = _rows(problem, len(ranges)), torch.tensor(ranges, dtype=torch.int32, device="cpu")
        fields: Fields = {"bands": len(ranges), "band": band, "within": found}
        for fact, at in some.items():
            part = found[..., at] if isinstance(fact, Offsets) else found[..., at.start]
            requests[fact] = Request(fields, part.clone)
    return requests


def _ranges(fact: Within | Offsets) -> list[tuple[int, int]]:
    """The least and the greatest i - j of each sum."""
    if isinstance(fact, Offsets):  # an empty range for what no pair has
        return [(-n, -n) if abs(n) < _FAR else (1, 0) for n in fact.offsets]
    low = -_FAR if fact.after is None else -min(fact.after, _FAR)
    return [(low, _FAR if fact.before is None else min(fact.before, _FAR))]


def _histogram(fact: Histogram, problem: Problem) -> Request:
    """A pair counts for bin n where p ≥ edge n and not p ≥ edge n + 1; the last bin has its right end too."""
    level = torch.tensor(fact.edges, dtype=torch.float32, device="cpu")
    level[-1] = torch.inf if fact.edges[-1] >= 1 else torch.nextafter(level[-1], level.new_tensor(torch.inf))
    reached = _heads(problem, len(level), dtype=torch.int64)
    fields: Fields = {"levels": len(level), "level": level, "reached": reached}
    return Request(fields, lambda: reached[..., :-1] - reached[..., 1:])


# by type, not isinstance: a subclass may mean something else
_REQUESTS: dict[type, Callable[[Any, Problem], Request]] = {
    Entropy: _single("entropy", _rows),
    Concentration: _single("concentration", _rows),
    Visible: _single("visible", lambda problem: _rows(problem, dtype=torch.int64)),
    Readers: _single("readers", lambda problem: _heads(problem, problem.frame.nk, dtype=torch.int64)),
    MaxReceived: _single("most", lambda problem: _heads(problem, problem.frame.nk)),
    Distance: _single("distance", _rows),
    MaxScore: _max_score,
    Top: _top,
    Received: _received,
    Map: _map,
    Quantised: _quantised,
    Mass: _mass,
    Histogram: _histogram,
    KeyNorms: lambda fact, problem: Request({}, lambda: placed(fact.norms, problem)),
}
