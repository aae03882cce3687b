"""explain_over: what it says of a call is what attention_over does."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels


class Counted(rg.sources.Source):
    """Parts of 4 keys, and the first keys of those that were read."""

    keys = 19

    def __init__(self) -> None:
        self.k, self.v, self.read = torch.randn(2, 19, 8), torch.randn(2, 19, 5), list[int]()

    def parts(self) -> Iterator[rg.sources.Part]:
        for first in range(0, 19, 4):
            at = slice(first, min(first + 4, 19))
            yield rg.sources.Part(first, at.stop - first, torch.arange(first, at.stop), lambda at=at: self.loaded(at))

    def loaded(self, at: slice) -> tuple[Tensor, Tensor]:
        self.read.append(at.start)
        return self.k[:, at], self.v[:, at]


@dataclass(frozen=True)
class Half(rg.Modifier):
    positional = False

    def modify(self, s: Tensor, at: Any) -> Tensor:
        return s / 2


@dataclass(frozen=True)
class Bent(Half):
    """An operation that programs do not have."""

    def modify(self, s: Tensor, at: Any) -> Tensor:
        return torch.special.i0e(s)


Q, AT = torch.randn(2, 3, 8), torch.arange(9, 12)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (rg.Everything(), "5 read (19 keys)"),
        (rg.Causal(), "3 read (12 keys), 2 skipped (7 keys): the mask hides all of them"),
        (rg.Window(before=1, after=3), "2 read (8 keys), 3 skipped (11 keys): the mask hides all of them"),
        (~rg.Everything(), "1 read (4 keys), 4 skipped (15 keys): the mask hides all of them"),
    ],
    ids=repr,
)
def test_the_parts_that_are_read(mask: rg.Mask, said: str) -> None:
    source = Counted()
    plan = rg.explain_over(Q, source, mask=mask, positions=AT)
    assert dict(plan.facts)["parts"] == said
    assert len(source.read) == 1  # it looks at one part
    source.read.clear()
    rg.attention_over(Q, source, mask=mask, positions=AT)
    assert said.startswith(f"{len(source.read)} read")


def test_the_bytes_that_are_held() -> None:
    held = dict(rg.explain_over(Q, Counted(), ahead=1).facts)["held"]
    assert held == f"{2 * 4 * 13 * 4} bytes of keys and values a part, 2 parts at a time: {2 * 2 * 4 * 13 * 4}"


@needs_kernels
def test_the_backend_of_a_part_and_why_not_another() -> None:
    assert rg.explain_over(Q, Counted()).backend == rg.Native()
    plan = rg.explain_over(Q, Counted(), score=rg.ScaledDot() >> Half())
    assert plan.backend == rg.Native() and "a program of" in dict(plan.facts)["modifiers as"]
    plan = rg.explain_over(Q, Counted(), score=rg.ScaledDot() >> Bent())
    assert plan.backend == rg.Tiled()
    assert "Bent()" in dict(plan.reasons)[rg.Native()]
    assert "not Native()" in str(plan)
    with pytest.raises(rg.Unsupported, match="Bent"):
        rg.explain_over(Q, Counted(), score=rg.ScaledDot() >> Bent(), backend=rg.Native())


def test_an_iterator_is_refused_and_not_used_up() -> None:
    parts = iter([(torch.randn(2, 3, 8), torch.randn(2, 3, 8))])
    with pytest.raises(ValueError, match="would use it up"):
        rg.explain_over(Q, parts)
    assert rg.attention_over(Q, parts).shape == (2, 3, 8)


def test_parts_are_not_kept() -> None:
    """A function may make each part anew: all of them together may be more than memory holds."""
    alive, most = weakref.WeakSet[Tensor](), list[int]()

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(20):
            most.append(len(alive))
            k, v = torch.randn(2, 4, 8), torch.randn(2, 4, 5)
            alive.update((k, v))
            yield k, v

    plan = rg.explain_over(Q, parts)
    assert dict(plan.facts)["parts"] == "20 read (80 keys)"
    assert max(most) <= 3 * 2
