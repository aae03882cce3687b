"""regard.testing on masks and scores that a person wrote: what they say of themselves must be true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.core.region import Frame, Region, Tiling
from regard.masks.algebra import Cover
from regard.masks.intervals import Interval


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


@dataclass(frozen=True)
class First(rg.Mask):
    positional: ClassVar[bool] = False

    def visible(self, at: Region) -> Tensor:
        return (at.j < 3) & (at.row == at.row)


@dataclass(frozen=True)
class Recent(rg.Modifier):
    positional: ClassVar[bool] = False

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + 0.1 * at.j


def test_what_reads_the_position_of_the_key_alone() -> None:
    with pytest.raises(AssertionError, match="reads positions"):
        testing.check_mask(First())
    with pytest.raises(AssertionError, match="reads positions"):
        testing.check_score(Recent())


@dataclass(frozen=True)
class Last(rg.Mask):
    """Its intervals are of positions, where they must be of indices."""

    n: int

    def visible(self, at: Region) -> Tensor:
        return (at.j <= at.i) & (at.j > at.i - self.n)

    def rows(self, frame: Frame) -> Interval:
        q = frame.positions.q
        return Interval((q - self.n + 1).clamp(min=0)[..., None, :], (q + 1)[..., None, :])


@dataclass(frozen=True)
class Tiles(rg.Mask):
    """Its tiles are found by indices, where keys are seen by position."""

    def visible(self, at: Region) -> Tensor:
        return at.j >= at.i

    def cover(self, at: Tiling) -> Tensor:
        (first, _), (_, last) = at.i, at.col
        return torch.where(last >= first, Cover.SOME, Cover.NONE).to(torch.int8)


@pytest.mark.parametrize(("mask", "said"), [(Last(4), "wrong intervals"), (Tiles(), "wrong cover")], ids=repr)
def test_what_takes_positions_for_indices(mask: rg.Mask, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        testing.check_mask(mask)


@pytest.mark.parametrize("name", list(testing.masks(testing.frame())))
def test_regards_own_masks_pass(name: str) -> None:
    testing.check_mask(testing.masks(testing.frame())[name])


@dataclass(frozen=True)
class ByType(rg.Modifier):
    """With a tensor of whole numbers, and one of booleans."""

    positional: ClassVar[bool] = False
    types: Tensor
    gain: Tensor
    flag: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return torch.where(at.keys(self.flag), s + self.gain[at.keys(self.types)], s)


def test_tensors_of_whole_numbers_and_booleans_stay_what_they_are() -> None:
    gain = torch.randn(3, dtype=torch.float64)
    testing.check_score(ByType(torch.arange(17) % 3, gain, torch.arange(17) % 2 == 0))
