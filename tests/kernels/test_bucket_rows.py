"""Buckets of a person's own: rows that the table lacks are refused by name, and places of any size are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.runtime import plan_cache
from regard.scores.buckets import DifferenceBuckets

pytestmark = needs_kernels

NQ, NK, HEADS = 5, 9, 3
BACKENDS = [rg.Reference(), rg.Tiled(), None]


@dataclass(frozen=True)
class OfPairs(rg.Buckets):
    """Row 0, and another one where the query stands where the key does."""

    count: ClassVar[int] = 4
    other: int

    def index(self, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i == j, self.other, 0)


@dataclass(frozen=True)
class OfDifferences(DifferenceBuckets):
    count: ClassVar[int] = 4
    other: int

    def between(self, ahead: Tensor) -> Tensor:
        return torch.where(ahead == 0, self.other, 0)


def drawn(learned: bool) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(2, HEADS, NQ, 8), *(torch.randn(2, HEADS, NK, 8) for _ in range(2))
    return q, k, v, torch.randn(4, HEADS, requires_grad=learned)


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("other", [-1, -4, -5, 4, 1 << 40])
@pytest.mark.parametrize("kind", [OfPairs, OfDifferences])
def test_a_row_that_the_table_lacks(kind: type, other: int, learned: bool, backend: rg.Backend | None) -> None:
    q, k, v, table = drawn(learned)
    least, most = min(other, 0), max(other, 0)
    said = rf"RelativeBias.buckets: {kind.__name__}.* returns rows {least} to {most}; its table has the rows 0 to 3"
    for buckets in (kind(2), kind(other), kind(2), kind(other)):  # with a plan, and without
        score = rg.ScaledDot() >> rg.RelativeBias(table, buckets)
        for at in (rg.tail(NQ, NK), rg.Positions(torch.arange(NQ), torch.arange(NK).flip(0))):
            if buckets.other == 2:
                rg.attention(q, k, v, score=score, positions=at, backend=backend)
                continue
            with pytest.raises(IndexError, match=said):
                rg.attention(q, k, v, score=score, positions=at, backend=backend)
            with pytest.raises(IndexError, match=said):
                rg.attention_scores(q, k, score=score, positions=at)


def test_a_row_of_a_difference_that_no_pair_has() -> None:
    """Even positions have no odd difference, for which these buckets return no row of the table."""

    @dataclass(frozen=True)
    class Even(DifferenceBuckets):
        count: ClassVar[int] = 4

        def between(self, ahead: Tensor) -> Tensor:
            return torch.where(ahead % 2 == 0, ahead.abs().clamp(max=3), -1)

    q, k, v, table = drawn(True)
    given = {"score": rg.ScaledDot() >> rg.RelativeBias(table, Even())}
    given["positions"] = rg.Positions(2 * torch.arange(NQ), 2 * torch.arange(NK))
    (g,), (exact,) = (
        torch.autograd.grad(rg.attention(q, k, v, **given, backend=backend).sin().sum(), table)
        for backend in (None, rg.Reference())
    )
    torch.testing.assert_close(g, exact)
    with pytest.raises(rg.Unsupported, match="returns rows -1 to 3; its table has the rows 0 to 3"):
        rg.attention(q, k, v, **given, backend=rg.Native())


@pytest.mark.parametrize("start", [0, (1 << 31) - 6, (1 << 32) - 6, 1 << 40, -(1 << 31) - 3])
def test_places_of_any_size(start: int) -> None:
    """The table holds their differences; only these are 32-bit numbers."""

    @dataclass(frozen=True)
    class Near(DifferenceBuckets):
        count: ClassVar[int] = 4
        farthest: ClassVar[int] = 20

        def between(self, ahead: Tensor) -> Tensor:
            return ahead.abs().clamp(max=3)

    q, k, v, table = drawn(False)
    q_at, k_at = torch.randperm(NQ) + start, torch.randperm(NK) + start
    given = {"score": rg.ScaledDot() >> rg.RelativeBias(table, Near()), "positions": rg.Positions(q_at, k_at)}
    out = rg.attention(q, k, v, **given, backend=rg.Native())
    torch.testing.assert_close(out, rg.attention(q, k, v, **given, backend=rg.Reference()))
