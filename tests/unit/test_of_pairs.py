"""Functions that look at several queries or keys at once, where a backend calls them for a part of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from own_modifier import OfScores


def largest(s: Tensor) -> Tensor:
    return s.masked_fill(s < s.topk(min(4, s.shape[-1])).values[..., -1:], -torch.inf)


def own(fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {"score": rg.ScaledDot() >> OfScores(fn)}


DEPEND: dict[str, dict[str, Any]] = {
    "largest": own(largest),
    "mean of keys": own(lambda s: 2 * s - s.mean(-1, keepdim=True)),
    "mean of queries": own(lambda s: s - s.mean(-2, keepdim=True)),
    "sum so far": own(lambda s: s.cumsum(-1)),
    "before a cap": {"score": rg.ScaledDot() >> OfScores(largest) >> rg.SoftCap(2.0)},
    "similarity": {"score": rg.Custom(lambda q, k: (q @ k.mT).softmax(-1))},
    "mask": {"mask": rg.Where(lambda b, h, i, j: (j - j.amin(-1, keepdim=True)) % 3 < 2)},
}
DO_NOT: dict[str, dict[str, Any]] = {
    "in float32 alone": {"score": rg.Custom(lambda q, k: (q.float() @ k.float().mT) * torch.ones(1))},
    "of float32": {"score": rg.Custom(lambda q, k: torch.tanh(q @ torch.eye(6) @ k.mT))},
    "rounded": own(lambda s: s.round()),
    "of features": {"score": rg.Custom(lambda q, k: q.softmax(-1) @ k.mT)},
    "distances": {"score": rg.Custom(lambda q, k: -torch.cdist(q, k, p=1))},
    "mask": {"mask": rg.Where(lambda b, h, i, j: (i * j) % 5 < 3)},
}
SMALL = rg.Tiled(rows=8, keys=16)


@pytest.fixture
def q() -> Tensor:
    return torch.randn(2, 3, 40, 6, requires_grad=True)


@pytest.mark.parametrize("name", DEPEND)
def test_are_refused_where_there_are_several_tiles(name: str, q: Tensor) -> None:
    for needs in (True, False):
        with pytest.raises(rg.Unsupported, match="of a pair depends on other pairs"):
            rg.attention(q.detach().requires_grad_(needs), q, q, backend=SMALL, **DEPEND[name])
    with pytest.raises(rg.Unsupported, match="of a pair depends on other pairs"):
        rg.explain(q, q, q, backend=SMALL, **DEPEND[name])


@pytest.mark.parametrize("name", DEPEND)
def test_run_where_there_is_one(name: str, q: Tensor) -> None:
    one, right = (rg.attention(q, q, q, backend=b, **DEPEND[name]) for b in (rg.Tiled(64, 64), rg.Reference()))
    torch.testing.assert_close(one, right)


@pytest.mark.parametrize("name", DO_NOT)
def test_functions_of_single_pairs_run(name: str, q: Tensor) -> None:
    found, right = (rg.attention(q, q, q, backend=b, **DO_NOT[name]) for b in (SMALL, rg.Reference()))
    torch.testing.assert_close(found, right)


def test_random_numbers_are_drawn_as_without_the_check(q: Tensor) -> None:
    drawn, x = list[Tensor](), q.detach()

    def draw(s: Tensor) -> Tensor:
        one = torch.rand(())
        if s.dtype == torch.float32:  # the check computes in float64
            drawn.append(one)
        return s * one

    torch.manual_seed(5)
    rg.attention(x, x, x, score=rg.ScaledDot() >> OfScores(draw), backend=SMALL)
    torch.manual_seed(5)
    assert len(drawn) > 5 * 3 and drawn == [torch.rand(()) for _ in drawn]


@pytest.mark.parametrize(("n", "refused"), [(100, False), (3000, True)])
def test_a_mask_that_is_no_program_is_refused_where_it_is_written_out_in_parts(n: int, refused: bool) -> None:
    x = torch.randn(1, 1, n, 8)
    mask = rg.Where(lambda b, h, i, j: (i - j).abs() < 90 + (i - j).abs().amin(-2, keepdim=True))
    if refused:
        with pytest.raises(rg.Unsupported, match="the mask of a pair depends on other pairs"):
            rg.attention(x, x, x, mask=mask)
    else:
        found, right = (rg.attention(x, x, x, mask=mask, backend=b) for b in (None, rg.Reference()))
        torch.testing.assert_close(found, right)
