"""ring_attention answers on each rank what one process answers for its tokens: values, log-sum-exp, every gradient."""

from __future__ import annotations

import pytest
import torch

from gloo_processes import Group
from ring_cases import MASKS, Case, errors, layouts, scores

SCORES = list(scores(1, 1, 1, torch.float64))
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}


def check(gloo: Group, ranks: int, case: Case, tolerance: float | None = None) -> None:
    worst = [max(of_ranks) for of_ranks in zip(*gloo.run(errors, case, ranks=ranks), strict=True)]
    assert max(worst) <= (tolerance or 10 * TOLERANCE[case.dtype]), dict(
        zip(["out", "lse", "q", "k", "v"], worst, strict=False)
    )


@pytest.mark.parametrize("ranks", [3, 1, 2, 4])
@pytest.mark.parametrize("layout", list(layouts(9, 2)))
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_mask_and_layout(gloo: Group, mask: str, layout: str, ranks: int, dtype: torch.dtype) -> None:
    check(gloo, ranks, Case(layout, mask, dtype=dtype))


@pytest.mark.parametrize("backend", ["None", "Tiled", "Reference"])
@pytest.mark.parametrize("layout", ["zigzag", "ragged", "any"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_score_with_its_gradients(gloo: Group, score: str, layout: str, backend: str, dtype: torch.dtype) -> None:
    check(gloo, 3, Case(layout, "causal", score, dtype, sink=True, backend=backend))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("layout", ["zigzag", "ragged"])
@pytest.mark.parametrize("mask", ["causal", "window", "dense"])
def test_other_queries_than_keys(gloo: Group, mask: str, layout: str, heads: tuple[int, int]) -> None:
    check(gloo, 3, Case(layout, mask, nq=23, heads=heads))


@pytest.mark.parametrize("ranks", [3, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "ragged", "striped"])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "dense"])
@pytest.mark.parametrize("score", ["scaled", "slopes, bias", "additive"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_few_queries_travel(gloo: Group, score: str, mask: str, layout: str, ranks: int, dtype: torch.dtype) -> None:
    """Here these are less than half of the keys and values."""
    check(gloo, ranks, Case(layout, mask, score, dtype, nq=7, heads=(4, 4), sink=True))


@pytest.mark.parametrize("layout", ["contiguous", "striped", "any"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropout_drops_what_one_process_drops(gloo: Group, layout: str, dtype: torch.dtype) -> None:
    check(gloo, 3, Case(layout, "causal", "slopes, bias", dtype, dropout=0.3))


def test_half_precision_on_the_wire(gloo: Group) -> None:
    case = Case("zigzag", "causal", dtype=torch.float32, wire=torch.bfloat16)
    assert 1e-4 < max(max(of_rank) for of_rank in gloo.run(errors, case, ranks=2)) < 5e-2
