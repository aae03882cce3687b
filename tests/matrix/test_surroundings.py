"""The caller's default dtype, and a device as a context, change no bit: models are built under both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fact_checks
import regard as rg
import regard.runtime.plan_cache as plan_cache
from needed import needs_kernels
from regard import testing
from regard.backends.base import Backend
from selection import few

FRAME = testing.frame((2,), 4, 5, 11)
MASKS, SCORES = list(testing.masks(FRAME)), list(testing.scores(FRAME))
CALLS = [("Causal", score) for score in SCORES] + [(mask, "ScaledDot") for mask in MASKS]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default float16": lambda: default_dtype(torch.float16),
    "default float64": lambda: default_dtype(torch.float64),
    "on meta": lambda: torch.device("meta"),
}


@cache
def drawn(mask: str, score: str) -> testing.Case:
    torch.manual_seed(0)
    masks, scores = testing.masks(FRAME), testing.scores(FRAME)
    return testing.draw(FRAME, mask=masks[mask], score=scores[score])


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        assert (found[name].dtype, found[name].device) == (t.dtype, t.device), name
        assert torch.equal(found[name].nan_to_num(7), t.nan_to_num(7)), f"{name} has other bits"


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("backend", [pytest.param(None, marks=needs_kernels), rg.Tiled(rows=4, keys=3), rg.Reference()])
@pytest.mark.parametrize(("mask", "score"), CALLS)
def test_answers_are_the_same(mask: str, score: str, backend: Backend | None, surrounding: str) -> None:
    call = drawn(mask, score)
    plan_cache.clear()
    expected = testing.answers(call, backend, torch.float32)
    plan_cache.clear()  # plans are made inside
    with SURROUNDINGS[surrounding]():
        for _ in range(2):
            found = testing.answers(call, backend, torch.float32)
    same(found, expected)


@needs_kernels
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], torch.float32))
def test_states_are_the_same(surrounding: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 7, 8, dtype=dtype) for _ in range(3))

    def parts() -> dict[str, Tensor]:
        state = rg.attention_state(q, k, v, mask=rg.Causal())
        return {"m": state.m, "l": state.l, "o": state.o}

    plan_cache.clear()
    expected = parts()
    plan_cache.clear()
    with SURROUNDINGS[surrounding]():
        for _ in range(3):
            same(parts(), expected)


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_kernels), False], ids=["native", "tiles"])
def test_facts_are_the_same(surrounding: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call, wanted = drawn("Causal", "ScaledDot").leaves(torch.float32), fact_checks.every(FRAME)
    if not native:
        fact_checks.tiles(monkeypatch, 4, 3)

    def numbers() -> dict[str, Tensor]:
        found = fact_checks.looked(call, wanted)
        leaves = {"lse": found.lse, **{str(n): t for n, t in enumerate(tree_leaves([found[f] for f in wanted]))}}
        return {name: t.detach() for name, t in leaves.items() if isinstance(t, Tensor)}

    expected = numbers()
    with SURROUNDINGS[surrounding]():
        same(numbers(), expected)
