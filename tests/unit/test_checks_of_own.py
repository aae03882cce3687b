"""regard.testing on masks and scores that a person wrote: what they say of themselves must be true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import Tensor

import regard as rg
from regard import testing
from regard.core.region import Region


@dataclass(frozen=True)
class Far(rg.Modifier):
    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s - (at.i - at.j).abs()


@dataclass(frozen=True)
class FarInSilence(Far):
    positional: ClassVar[bool] = False


@dataclass(frozen=True)
class Halved(rg.Modifier):
    positional: ClassVar[bool] = False

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s / 2


@dataclass(frozen=True)
class Before(rg.Mask):
    def visible(self, at: Region) -> Tensor:
        return at.i >= at.j

    def compares_positions(self) -> bool:
        return False


@pytest.mark.parametrize("score", [Far(), Halved(), rg.Dot() >> Halved() >> Far()], ids=repr)
def test_scores_that_say_what_they_read(score: rg.Score) -> None:
    testing.check_score(score)


@pytest.mark.parametrize("score", [FarInSilence(), rg.Dot() >> Halved() >> FarInSilence()], ids=repr)
def test_a_score_that_reads_positions_and_says_that_it_does_not(score: rg.Score) -> None:
    with pytest.raises(AssertionError, match="reads positions: leave out `positional = False`"):
        testing.check_score(score)


def test_a_mask_that_reads_positions_and_says_that_it_does_not() -> None:
    with pytest.raises(AssertionError, match="Before\\(\\) reads positions"):
        testing.check_mask(Before())
    testing.check_mask(rg.Causal() & rg.Dense(rg.Causal().dense(13, 17, positions=rg.head(13, 17))))
