"""What tests of kernels and backends share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from regard import testing
from regard.backends.base import Backend
from regard.backends.native.modifiers.table import STEPS
from regard.core.region import Frame, Region


def frames(few: int) -> dict[str, Frame]:
    """Sizes that reach each kernel; few: the keys of few rows."""
    return {
        "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
        "few rows": testing.frame(nq=2, nk=few, batch=(3,), heads=6),
        "small": testing.frame(),
        "headless": testing.frame(nq=19, nk=23, batch=(5,), heads=1, headed=False),
    }


@dataclass(frozen=True)
class Placed(rg.Modifier):
    """A number for each query, each key and each pair."""

    by_query: Tensor
    by_key: Tensor
    by_pair: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * at.queries(self.by_query) + at.keys(self.by_key) * at.pairs(self.by_pair)


def modifiers(at: Frame, width: int) -> dict[str, rg.Score]:
    """Every example of each modifier that the kernels have, alone after a scaled dot product, with float32 tensors."""
    stages = tuple(step.stage for step in STEPS)
    return {
        name: score.with_tensors(t.float() for t in score.tensors())
        for name, score in testing.scores(at, width).items()
        if len(score.stages) == 2 and isinstance(score.stages[1], stages)
    }


def calls(of: dict[str, Frame]) -> list[tuple[str, str, str]]:
    """Every mask under every score, in every frame: (size, mask, score), what `drawn` knows a call by."""
    kinds = testing.frame()
    return [(size, mask, score) for size in of for mask in testing.masks(kinds) for score in testing.scores(kinds)]


def drawn(at: Frame, mask: str, score: str) -> testing.Case:
    """Drawn from a fixed seed: how far a few sharp rows are off is chance, of which one in a thousand is too far."""
    return _drawn(at)[f"{score} under {mask}"]


@cache
def _drawn(at: Frame) -> dict[str, testing.Case]:
    torch.manual_seed(0)
    return dict(testing.calls(at))


def outcome(case: testing.Case, backend: Backend | None) -> tuple[Tensor, Tensor]:
    """out and lse."""
    given = {"score": case.score, "mask": case.mask, "positions": case.positions, "dropout": case.dropout}
    given |= {"sink": case.sink, "backend": backend}
    out = rg.attention(case.q, case.k, case.v, **given)
    return out, rg.attention_state(case.q, case.k, case.v, **given).finish()[1]


def compare(case: testing.Case, dtype: torch.dtype = torch.float32) -> None:
    """out and lse against float64, within twice the error of a plain evaluation."""
    with torch.no_grad():
        judge(lambda one: _errors(one, dtype), case)


def judge(errors: Callable[[testing.Case], list[tuple[float, float]]], case: testing.Case) -> None:
    """errors(case): how far each result is off, and how far it may be.

    Of a few sharp rows a single draw says little: where one is too far off, it is judged with seven more, by the root
    mean squares of all.
    """
    found = [errors(case)]
    if any(off > allowed for off, allowed in found[0]):
        found += [errors(_other_numbers(case)) for _ in range(7)]
    for pairs in zip(*found, strict=True):
        off, allowed = (math.sqrt(sum(x * x for x in side) / len(pairs)) for side in zip(*pairs, strict=True))
        assert off <= allowed, f"off by {off:.2e}; allowed {allowed:.2e}"


def _errors(case: testing.Case, dtype: torch.dtype) -> list[tuple[float, float]]:
    """How far out and lse are off, and how far they may be."""
    truth, plain = _expected(case.copied(), dtype)
    results = zip(outcome(case.leaves(dtype), Unplanned()), truth, plain, strict=True)
    return [(testing.error(mine, right), testing.tolerance(right, usual)) for mine, right, usual in results]


@lru_cache(maxsize=32)
def _expected(case: testing.Case, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Reference's out and lse in float64 and in the dtype: once, for all instruction sets."""
    with torch.no_grad():
        rounded = case.leaves(dtype)
        return outcome(rounded.leaves(torch.float64), rg.Reference()), outcome(rounded, rg.Reference())


def check(case: testing.Case, dtype: torch.dtype = torch.float32, backend: Backend = Unplanned()) -> None:
    """testing.check; one draw that is too far off is judged with seven more, as in `judge`."""
    try:
        testing.check(case, backend, dtype)
    except AssertionError:
        testing.check(case, backend, dtype, again=tuple(_other_numbers(case) for _ in range(7)))


def _other_numbers(case: testing.Case) -> testing.Case:
    return replace(case, q=torch.randn_like(case.q), k=torch.randn_like(case.k), v=torch.randn_like(case.v))
