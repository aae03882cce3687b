"""Masks and scores of a person's whose answers are not of the pairs that they were asked about, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.backends.base import Backend
from regard.core.region import Region

BACKENDS = [pytest.param(rg.Native(), marks=needs_kernels), rg.Tiled(), rg.Tiled(rows=7, keys=9), rg.Reference()]


@dataclass(frozen=True)
class Answers(rg.Mask):
    fn: Callable[[Region], Any]

    def visible(self, at: Region) -> Tensor:
        return self.fn(at)


@dataclass(frozen=True)
class Changes(rg.Modifier):
    fn: Callable[[Tensor], Tensor]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.fn(s)


def more_axes(at: Region) -> Tensor:
    """A number a head with axes that at.heads adds again: five axes, which broadcast to a larger batch."""
    return (at.i - at.j).abs() <= at.heads(torch.ones(3, 1, 1))


def attend(backend: Backend | None, **given: Any) -> Tensor:
    q, k = torch.randn(2, 4, 40, 16), torch.randn(2, 4, 33, 16)
    return rg.attention(q, k, k, positions=rg.head(40, 33), backend=backend, **given)


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (
            more_axes,
            rg.ShapeError,
            r"mask Answers\(.*visible\(at\) returned shape \(3, 1, 1, .* for pairs of shape \(2, 4",
        ),
        (lambda at: torch.ones(3, 1, 1).bool() & (at.i >= at.j), rg.ShapeError, r"returned shape \(3, "),
        (lambda at: torch.ones(5, 5).bool(), rg.ShapeError, r"visible\(at\) returned shapes? \((1, )?5, 5\)"),
        (lambda at: (at.i >= at.j).float(), TypeError, r"returned torch.float32; expected a boolean tensor"),
        (lambda at: True, TypeError, r"returned bool; expected a boolean tensor"),
    ],
)
def test_masks(fn: Callable[[Region], Any], error: type[Exception], message: str, backend: Backend) -> None:
    for mask in (Answers(fn), Answers(fn) & rg.Causal()):
        with pytest.raises(error, match=message):
            attend(backend, mask=mask)


@pytest.mark.parametrize("backend", [None, *BACKENDS[1:]], ids=repr)
@pytest.mark.parametrize(
    "fn", [lambda s: s[None].repeat(3, 1, 1, 1, 1), lambda s: s.sum(-1, keepdim=True), lambda s: s.mT]
)
def test_scores(fn: Callable[[Tensor], Tensor], backend: Backend | None) -> None:
    with pytest.raises(
        ValueError, match=r"score ScaledDot\(\) >> Changes\(.*gave scores of shape .* for pairs of shape"
    ):
        attend(backend, score=rg.ScaledDot() >> Changes(fn))


@pytest.mark.parametrize("backend", [None, *BACKENDS[1:]], ids=repr)
@pytest.mark.parametrize(("answer", "said"), [(None, "None"), (1.0, "a float"), ((1, 2), "a tuple")])
def test_what_is_no_tensor_of_scores(answer: Any, said: str, backend: Backend | None) -> None:
    with pytest.raises(TypeError, match=rf"^Changes\.modify returned {said}; expected a tensor with the score of each"):
        attend(backend, score=rg.ScaledDot() >> Changes(lambda s: answer))


@pytest.mark.parametrize(
    "score",
    [
        rg.ScaledDot() >> Changes(lambda s: s * (1 + 1j)),
        rg.Custom(lambda q, k: torch.complex(q, q) @ torch.complex(k, -k).mT),
        rg.Elementwise(lambda q, k: q * k * 1j),
    ],
)
@pytest.mark.parametrize("backend", [None, *BACKENDS[1:]], ids=repr)
def test_complex_scores(score: rg.Score, backend: Backend | None) -> None:
    with pytest.raises(TypeError, match=r"gave scores of torch.complex64; expected real numbers"):
        attend(backend, score=score)


def test_a_mask_that_answers_for_all_pairs_where_it_is_asked_about_some() -> None:
    whole = torch.rand(40, 33) < 0.5
    with pytest.raises(
        rg.ShapeError, match=r"returned shape \(40, 33\) for pairs of shape \(2, 4, 7, 9\).*is Dense\(t\)"
    ):
        attend(rg.Tiled(rows=7, keys=9), mask=rg.Where(lambda b, h, i, j: whole))


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
def test_a_tensor_with_a_number_for_other_heads_is_named(backend: Backend) -> None:
    x = torch.randn(2, 4, 5, 8)
    score = rg.Dot() >> Gained(torch.ones(3))
    with pytest.raises(
        rg.ShapeError, match=r"at\.heads\(t\): t has shape \(3,\); expected one number a head, \(4,\)\."
    ):
        rg.attention(x, x, x, score=score)
    with pytest.raises((rg.ShapeError, rg.Unsupported)):
        rg.attention(x, x, x, score=score, backend=backend)


@dataclass(frozen=True)
class Gained(rg.Modifier):
    gain: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * at.heads(self.gain)
