"""Runs one call on regard and on the oracle, and says what differs."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

import regard as rg

from . import build, oracle
from .call import Call
from .compare import Expected
from .draw import draw
from .gradients import Dress, Tensors, leaves_of, with_gradients
from .laws import laws
from .reach import cleaned, reached
from .roundings import UNROUNDED, Roundings, Unrounded
from .surroundings import draw_surroundings
from .tensors import Source
from .ways import ADDED, WAYS, Way, halves

# What the documentation refuses because it can be read in two ways.
REFUSED = re.compile("its first axis may be either|backend .* cannot run this call")
SAMPLES = 240  # evaluations with random roundings, as many as are needed: the largest errors are rare


@dataclass
class Outcome:
    """What came of a call: whether regard refused it, and what is wrong."""

    refused: str | None = None
    findings: list[str] = field(default_factory=list)


def run(seed: int, plain: bool = True) -> Outcome:
    """The call of a seed, drawn and checked."""
    return check(draw(seed), seed, plain)


def check(call: Call, seed: int, plain: bool = True) -> Outcome:
    """One call, in a few ways that its seed chooses; plain: not only in its surroundings."""
    outcome, s = Outcome(), Source.of(seed + 1)
    before = [(t, _memory(t)) for t in call.tensors().values()]
    try:
        with instructions(build.isa(call)), warnings.catch_warnings():
            # a mask of two axes that might have been meant otherwise is told of, and taken as documented
            warnings.filterwarnings("ignore", message=".*Dense", category=UserWarning)
            warnings.filterwarnings("ignore", message=".*MaskedTensor", category=UserWarning)  # "a prototype"
            for way in ways_of(s, call) if plain else ():
                outcome.findings += _checked(call, way, s)
            found = surrounded(call, Source.of(seed + 4))
            outcome.findings += found.findings
            outcome.refused = None if plain else found.refused
    except (rg.Unsupported, rg.ShapeError) as refusal:
        if not REFUSED.search(str(refusal)):
            outcome.findings.append(f"refused: {refusal}")
        outcome.refused = str(refusal)
    except Exception as error:
        outcome.findings.append(f"raised {type(error).__name__}: {error}")
    if any(not torch.equal(_memory(t), was) for t, was in before):
        outcome.findings.append("an input was written")
    return outcome


def ways_of(s: Source, call: Call) -> Iterator[Way]:
    """Attention, one or two of the other ways to ask, and then some of the added ones."""
    others = [way for way in WAYS[1:] if way.suits(call)]
    chances = [way.chance for way in others]
    yield from (WAYS[0], *dict.fromkeys(s.choice.choices(others, chances, k=s.choice.choice((0, 1, 1, 2)))))
    yield from (way for way in ADDED if s.maybe(way.chance) and way.suits(call))


@dataclass(frozen=True, eq=False)
class _Oracle:
    """The oracle on one call, asked in one way: what results and gradients should be."""

    call: Call
    way: Way
    seed: int
    cotangents: Tensors

    def answers(self, dtype: torch.dtype | None, r: Unrounded = UNROUNDED) -> Tensors:
        """Everything in that dtype; None: tensors as the call has them, computed in its accumulation dtype."""
        own, leaves = leaves_of(self.call, dtype)
        acc = accumulator(self.call.q.dtype) if dtype is None else dtype
        results = self.way.oracle(own, oracle.attend(own, acc, r), Source.of(self.seed))
        if dtype is None and not self.way.wide:
            results = {name: t.to(self.call.q.dtype) for name, t in results.items()}
        return with_gradients(results, leaves, self.cotangents)

    def perturbed(self) -> Iterator[Tensors]:
        """In float64 with random roundings, as large as those of the call: a few times."""
        for n in range(SAMPLES):
            random = torch.Generator().manual_seed(self.seed + n)
            unit = torch.finfo(accumulator(self.call.q.dtype)).eps
            # the native product of bfloat16 weights and values rounds the weights once, to nearest
            halved = self.call.q.dtype == torch.bfloat16 and self.call.backend in (
                None,
                ("native", False),
                ("native", True),
            )
            weights = torch.finfo(torch.bfloat16).eps / 4 if halved else unit
            yield self.answers(torch.float64, Roundings(unit, weights, random))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _checked(call: Call, way: Way, s: Source) -> list[str]:
    """What is wrong with one way to ask: its results, its gradients, and those of the same call again."""
    seed = s.choice.randrange(1 << 40)
    call = replace(call, needs=()) if not way.differentiable else call
    own, leaves = leaves_of(call, None)
    results = way.regard(own, Source.of(seed))
    cotangents = {name: s.normal(*t.shape).to(t.dtype) for name, t in results.items()}
    found = with_gradients(results, leaves, cotangents)
    complaints = _compared(call, way, seed, found, cotangents)
    if way.repeated:
        again = with_gradients(way.regard(own, Source.of(seed)), leaves, cotangents)
        complaints += [_differs(name, t, again[name]) for name, t in found.items()]
    return [f"{way.name}: {what}" for what in complaints if what is not None]


def surrounded(call: Call, s: Source) -> Outcome:
    """What came of the call in random surroundings, asked about in one way."""
    around, call = draw_surroundings(s, call)
    ways = [way for way in (*WAYS, *ADDED) if way.suits(call)]
    chances = [5.0 if way is WAYS[0] else way.chance for way in ways]
    way, seed = s.choice.choices(ways, chances)[0], s.choice.randrange(1 << 40)
    call = replace(call, needs=()) if not way.differentiable else call
    before = [(t, _memory(t)) for t in call.tensors().values()]

    def ask(each: Call, dress: Dress) -> Tensors:
        own, leaves = leaves_of(each, None, dress)
        results = way.regard(own, Source.of(seed))
        return with_gradients(results, leaves, _cotangents(results, seed))

    refused: str | None = None
    try:
        found = around.ask(call, ask)
        results = {name: t for name, t in found.items() if not name.startswith("gradient of ")}
        complaints = _compared(call, way, seed, found, _cotangents(results, seed))
    except (rg.Unsupported, rg.ShapeError) as refusal:
        refused = str(refusal)
        complaints = [] if REFUSED.search(refused) else [f"refused: {refused}"]
    except Exception as error:
        complaints = [f"raised {type(error).__name__}: {error}"]
    if any(not torch.equal(_memory(t), was) for t, was in before):
        complaints.append("an input was written")
    return Outcome(refused, [f"{way.name} in {around}: {what}" for what in complaints if what is not None])


def _cotangents(results: Tensors, seed: int) -> Tensors:
    """Of each result by its name, whoever asks: several threads do."""
    named = {name: Source.of(seed + sum(name.encode())) for name in results}
    return {name: named[name].normal(*t.shape).to(t.dtype) for name, t in results.items()}


def _compared(call: Call, way: Way, seed: int, found: Tensors, cotangents: Tensors) -> list[str | None]:
    """What is wrong with what regard found, results and gradients."""
    if not found:
        return []  # regard refused, as it may
    right = _Oracle(cleaned(call) if call.poisoned else call, way, seed, cotangents)
    exact, plain, samples = right.answers(torch.float64), right.answers(None), _Kept(right.perturbed())
    free, must = _reached(call, right.call) if call.poisoned else ({}, None)
    scales = _cancelled(right, exact)
    complaints = [
        Expected(
            exact[name],
            plain[name],
            partial(samples.each, name),
            _free(call, way, name, t, free),
            way.parts if name.startswith("gradient of ") else 1,
            scales.get(name, 0.0),
            _terms(call, name, t),
        ).complaint(name, t)
        for name, t in found.items()
    ]
    return complaints + laws(call, way.name, found, cotangents, exact, must)


def _terms(call: Call, name: str, t: Tensor) -> int:
    """The terms of the sum that a result or gradient is, where it is to be compared by these.

    In float64 what is exact is no more exact than a plain evaluation. Equal weights on a key round alike.
    """
    if not name.startswith("gradient of "):
        return call.nq if name == "received" else 1
    pairs = math.prod((*call.batch, call.heads, call.nq, call.nk))
    return max(1, pairs // max(1, t.numel())) if t.dtype == torch.float64 else 1


def _cancelled(right: _Oracle, exact: Tensors) -> dict[str, float]:
    """How large the numbers may have been whose sum a result is, each rounded to the result's dtype.

    Second derivatives: as large as any of them, times what q, k and v multiply it by. Keys in two parts: as the
    gradient that either part gives. What a batch shares: as the gradient that each of its elements gives.
    """
    call = right.call
    if right.way.name == "twice":
        factor = max(1.0, *(_largest(getattr(call, name).nan_to_num(0, 0, 0)) for name in "qkv"))
        return dict.fromkeys(exact, factor * max((_largest(t) for t in exact.values()), default=0.0))
    whole = replace(call, **{name: _of_each(call, getattr(call, name)) for name in "qkv"})
    if right.way.name != "merged":
        same = all(getattr(call, name) is getattr(whole, name) for name in "qkv")
        found = {} if same else replace(right, call=whole).answers(torch.float64)
        return {name: _largest(t.nan_to_num(0)) for name, t in found.items() if name.startswith("gradient")}
    (one, ones), (two, twos) = (leaves_of(whole, torch.float64) for _ in range(2))
    (a, _), (_, b) = (halves(own, Source.of(right.seed)) for own in (one, two))
    first, second = (oracle.attend(part, torch.float64) for part in (a, b))
    lse = torch.logaddexp(first.lse, second.lse)
    out = sum(part.out * (part.lse - lse).exp()[..., None] for part in (first, second))
    leaves = {**ones, **{f"second {name}": t for name, t in twos.items()}}
    found = with_gradients({"out": out, "lse": lse}, leaves, right.cotangents)
    both = {name: (f"gradient of {name}", f"gradient of second {name}") for name in ones}
    return {f: max(_largest(found[f].nan_to_num(0)), _largest(found[g].nan_to_num(0))) for f, g in both.values()}


def _of_each(call: Call, t: Tensor) -> Tensor:
    """A tensor that the batch shares, once for each element."""
    lead = t.dim() - len(t.shape[-3 if call.headed else -2 :])
    return t if t.shape[:lead] == call.batch else t.expand(*call.batch, *t.shape[lead:]).clone()


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


@dataclass(frozen=True, eq=False)
class _Kept:
    """Answers that are computed when they are first asked for."""

    rest: Iterator[Tensors]
    known: list[Tensors] = field(default_factory=list)

    def each(self, name: str) -> Iterator[Tensor]:
        yield from (answers[name] for answers in self.known)
        for answers in self.rest:
            self.known.append(answers)
            yield answers[name]


def _reached(call: Call, clean: Call) -> tuple[dict[str, Tensor], Tensor]:
    seen = oracle.visible(clean.mask, clean).expand(*clean.batch, clean.heads, clean.nq, clean.nk)
    scores = oracle.scores(clean, torch.float64, UNROUNDED).detach().expand(seen.shape)
    return reached(call, seen, scores)


def _free(call: Call, way: Way, name: str, like: Tensor, free: Tensors) -> Tensor | None:
    """Where a result may hold anything. The gradient of a tensor in two roles: where either may."""
    if not free:
        return None
    of = name.removeprefix("gradient of ")
    if of == name:
        return way.free(name, like, free)
    roles = [role for role in ("q", "k", "v") if of in ("q", "k", "v") and getattr(call, role) is getattr(call, of)]
    return torch.stack([free[role] for role in roles]).any(0) if roles else free["rest"]


def _differs(name: str, first: Tensor, second: Tensor) -> str | None:
    same = torch.equal(first.nan_to_num(1.5), second.nan_to_num(1.5))
    return None if same else f"{name} is not the same, bit by bit, when the call is made again"


def _memory(t: Tensor) -> Tensor:
    """All bytes behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).clone()


@contextmanager
def instructions(name: str | None) -> Iterator[None]:
    """The native kernels of one instruction set."""
    before = os.environ.get("REGARD_ISA")
    if name is not None and before is None:
        os.environ["REGARD_ISA"] = name
    try:
        yield
    finally:
        if name is not None and before is None:
            del os.environ["REGARD_ISA"]
