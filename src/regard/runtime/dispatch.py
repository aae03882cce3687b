"""Which backend runs a call, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import regard.core.html as html
from regard.backends.base import Backend
from regard.backends.flex import Flex
from regard.backends.native.backend import Native
from regard.backends.reference import Reference
from regard.backends.sdpa.backend import Sdpa
from regard.backends.streaming.tiled import Tiled
from regard.call.problem import Problem
from regard.core.deferred import DeferredRows
from regard.core.errors import Unsupported
from regard.core.int8_rows import Int8Rows
from regard.core.shapes import count_of
from regard.core.value import written

BACKENDS: tuple[Backend, ...] = (Native(), Sdpa(), Flex(), Tiled(), Reference())
_INT8 = "read as it is, widened in registers, or a tile at a time for many queries"


@dataclass(frozen=True)
class Explanation:
    """What `explain` answers; printing it shows the backend, why the others were passed over, and what it will cost."""

    backend: Backend
    reasons: tuple[tuple[Backend, str], ...]
    facts: tuple[tuple[str, str], ...]

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """What is printed, a heading and a text each."""
        passed_over = ((f"not {backend!r}", why) for backend, why in self.reasons)
        return (("backend", repr(self.backend)), *self.facts, *passed_over)

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in self.rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.panel("How this call runs", html.table(self.rows))


def choose(problem: Problem, backend: Backend | None, lse: bool) -> Backend:
    """The named backend, or the first that can run the call; Unsupported if it cannot."""
    if backend is None:
        for able in BACKENDS:
            if able.why_not(problem, lse) is None:
                return able
        raise AssertionError("Reference runs every call")
    if not isinstance(backend, Backend):  # pyright: ignore[reportUnnecessaryIsInstance]
        if isinstance(backend, type) and issubclass(backend, Backend):
            raise TypeError(
                f"backend is the class {backend.__name__}, not one of its values; write backend={written(backend)}."
            )
        raise TypeError(f"backend is {backend!r}; expected a Backend, such as Tiled(), or None to choose.")
    why = backend.why_not(problem, lse)
    if why is not None:
        others = ", ".join(repr(b) for b in BACKENDS if b.why_not(problem, lse) is None)
        raise Unsupported(
            f"backend {backend!r} cannot run this call: {why}.\n"
            f"  {others} can; leave backend=None to choose. explain(...) shows the rest."
        )
    return backend


def readable(problem: Problem, backend: Backend) -> Problem:
    """The problem as the backend reads it: the one place where keys and values are written out as ordinary tensors."""
    deferred = isinstance(problem.k, DeferredRows) or isinstance(problem.v, DeferredRows)
    if not deferred or backend.why_gathers(problem) is None:
        return problem
    return problem.written_out()


def _kept_as(chosen: Backend, problem: Problem) -> list[tuple[str, str]]:
    """What happens to keys and values that are kept in another form than a tensor's."""
    read = [t for t in (problem.k, problem.v) if isinstance(t, DeferredRows)]
    if not read:
        return []
    why, facts = chosen.why_gathers(problem), list[tuple[str, str]]()
    if any(isinstance(t, Int8Rows) for t in read):
        wide = str(problem.accumulate).removeprefix("torch.")
        facts.append(("int8", _INT8 if why is None else f"widened to {wide}: {why}"))
    if any(t.in_pages for t in read):
        facts.append(("pages", "read where they lie" if why is None else f"gathered into contiguous tensors: {why}"))
    return facts


def explanation(problem: Problem, backend: Backend | None, lse: bool) -> Explanation:
    """How a call would run."""
    chosen = choose(problem, backend, lse)
    why_not = {b: b.why_not(problem, lse) for b in BACKENDS if b != chosen}  # some ask whether gradients are recorded
    with torch.no_grad():
        details = chosen.details(problem)
    otherwise = "another was named" if backend is not None else f"{chosen!r} is preferred"
    reasons = tuple((other, why or otherwise) for other, why in why_not.items())
    frame = problem.frame
    call = (
        f"{count_of(frame.nq, 'query')} × {count_of(frame.nk, 'key')}, batch {frame.batch}, "
        f"{count_of(frame.heads, 'head')} on {problem.key_heads}, {str(problem.dtype).removeprefix('torch.')} on "
        f"{frame.device}"
    )
    facts = [
        ("call", call),
        ("score", repr(problem.score)),
        ("mask", repr(problem.mask)),
        *details.items(),
    ]
    facts += _kept_as(chosen, problem)
    return Explanation(chosen, reasons, tuple(facts))
