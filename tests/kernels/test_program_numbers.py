"""Numbers that programs are kept for are compared by their bits: 0.0 is not -0.0, and NaN is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.backends.native.programs import lower as lowering
from regard.backends.native.programs import structure
from regard.backends.native.programs.trace import trace
from regard.core.region import Region
from regard.runtime import plan_cache

pytestmark = needs_kernels


@dataclass(frozen=True, eq=False)
class Held(rg.Modifier):
    """Doubles scores where the number is no negative zero."""

    number: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return torch.where(1 / (s.abs() * self.number) < 0, s, s * 2)


@dataclass(frozen=True)
class Field(rg.Modifier):
    number: float

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return torch.where(1 / (s.abs() * self.number) < 0, s, s * 2)


@dataclass(frozen=True)
class BothZeros(rg.Modifier):
    def modify(self, s: Tensor, at: Region) -> Tensor:
        far = s.abs()
        return torch.where(1 / (far * 0.0) < 0, s, s * 2) + torch.where(1 / (far * -0.0) < 0, s, s * 3)


@dataclass(frozen=True)
class Sees(rg.Mask):
    number: float

    def visible(self, at: Region) -> Tensor:
        return 1 / ((at.i + at.j + 1) * self.number) < at.i


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()
    structure._graphs.clear()


def drawn() -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 2, 19, 8) for _ in "qkv")


def compare(score: rg.Score | None = None, mask: rg.Mask | None = None) -> None:
    given, more = (
        drawn(),
        {"score": rg.ScaledDot() if score is None else score, "mask": rg.Everything() if mask is None else mask},
    )
    right = rg.attention(*given, **more, backend=rg.Reference())
    torch.testing.assert_close(rg.attention(*given, **more), right, equal_nan=True)


@pytest.mark.parametrize("of", [lambda x: Held(torch.tensor(x)), Field], ids=["held", "field"])
def test_zeros_of_both_signs_are_two_numbers(of: type[Field]) -> None:
    for number in (0.0, -0.0, 0.0):
        compare(rg.ScaledDot() >> of(number))
        compare(mask=Sees(number))


def test_zeros_of_both_signs_inside_of_a_function() -> None:
    compare(rg.ScaledDot() >> BothZeros())


def test_a_program_of_nan_is_found_again() -> None:
    with patch.object(lowering, "_rows", side_effect=lowering._rows) as programs:
        for _ in range(5):
            compare(rg.ScaledDot() >> Held(torch.tensor(math.nan)))
            compare(rg.ScaledDot() >> Held(torch.tensor(1.0)))
    assert programs.call_count == 2


def test_a_field_of_nan_is_traced_once_and_planned_once() -> None:
    with patch.object(structure, "trace", side_effect=trace) as traced:
        for _ in range(5):
            compare(rg.ScaledDot() >> Field(float("nan")))
            compare(rg.ScaledDot(float("nan")))
    assert traced.call_count == 1
    assert len(plan_cache.plans()) == 2
