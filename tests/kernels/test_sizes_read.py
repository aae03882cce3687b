"""Modifiers and masks that read sizes of the tensors that they are given, which are those of a part of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.core.region import Region

pytestmark = needs_kernels

Q = torch.randn(1, 2, 40, 4)


@dataclass(frozen=True)
class Own(rg.Modifier):
    """A function of scores and a region."""

    fn: Callable[[Tensor, Region], Tensor]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.fn(s, at)


DEPEND: dict[str, Callable[[Tensor, Region], Tensor]] = {
    "shape": lambda s, at: s * s.shape[-1],
    "size": lambda s, at: s / s.size(-2),
    "numel": lambda s, at: s + at.j.numel(),
    "len": lambda s, at: s + len(at.j[0]) * 0.5 + at.j.shape[-1],
    "branch": lambda s, at: s * 2 if s.shape[-2] > 2 else s,
    "many": lambda s, at: s * (5.0 if s.shape[-1] > 20 else 1.0),
    "field": lambda s, at: torch.where(at.j >= at.j.shape[-1] - 2, s, s - 1),
}
DO_NOT: dict[str, Callable[[Tensor, Region], Tensor]] = {
    "expand": lambda s, at: s + (at.i - at.j).expand(s.shape),
    "broadcast": lambda s, at: s + torch.broadcast_to(at.i, s.shape),
    "axes": lambda s, at: s * s.dim(),
    "frame": lambda s, at: s * at.frame.nk,
    "filled": lambda s, at: s + torch.full_like(s, 2.0),
    "few": lambda s, at: s if s.shape[-1] == 1 else s * 2,
    "new": lambda s, at: s + s.new_zeros(s.shape) + s.new_full(s.size(), 0.5) * at.j,
    "new number": lambda s, at: torch.where(at.i >= at.j, s, s.new_zeros(())) * s.new_full((), 2.0) - s.new_ones(1),
}


@pytest.mark.parametrize("name", DEPEND)
def test_a_result_that_depends_on_them_is_refused(name: str) -> None:
    score = rg.ScaledDot() >> Own(DEPEND[name])
    with pytest.raises(rg.Unsupported, match=r"at\.frame\.nk"):
        rg.attention(Q, Q, Q, score=score)
    with pytest.raises(rg.Unsupported, match=r"a modifier of the score computes with a size"):
        rg.explain(Q, Q, Q, score=score)


@pytest.mark.parametrize("name", DO_NOT)
def test_a_result_that_does_not_is_a_program(name: str) -> None:
    score = rg.ScaledDot() >> Own(DO_NOT[name])
    assert rg.explain(Q, Q, Q, score=score).backend == rg.Native()
    found, right = (rg.attention(Q, Q, Q, score=score, backend=b) for b in (None, rg.Reference()))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_tensor_as_large_as_a_part_is_computed_in_tiles() -> None:
    score = rg.ScaledDot() >> Own(lambda s, at: s + torch.zeros(s.shape))
    assert rg.explain(Q, Q, Q, score=score).backend == rg.Tiled()
    found, right = (rg.attention(Q, Q, Q, score=score, backend=b) for b in (None, rg.Reference()))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_mask_that_depends_on_them_is_refused() -> None:
    last_two = rg.Where(lambda b, h, i, j: j >= j.shape[-1] - 2)
    with pytest.raises(rg.Unsupported, match=r"the mask computes with a size"):
        rg.attention(Q, Q, Q, mask=last_two)


def test_few_pairs_are_all_pairs() -> None:
    few, score = Q[:, :, :2], rg.ScaledDot() >> Own(DEPEND["shape"])
    found, right = (rg.attention(few, few, few, score=score, backend=b) for b in (None, rg.Reference()))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
