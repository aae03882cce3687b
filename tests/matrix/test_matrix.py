"""The derived matrix: every exported mask × score × tile size × dtype, against Reference in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import regard as rg
from kernel_checks import check
from regard import testing
from regard.core.dtypes import FLOATING

FRAME = testing.frame()
MASKS, SCORES = list(testing.masks(FRAME)), list(testing.scores(FRAME))
BACKENDS = (rg.Tiled(rows=7, keys=11), rg.Tiled())


@cache
def drawn() -> tuple[dict[str, rg.Mask], dict[str, rg.Score]]:
    torch.manual_seed(0)
    return testing.masks(FRAME), testing.scores(FRAME)


@pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_and_score(mask: str, score: str, dtype: torch.dtype) -> None:
    masks, scores = drawn()
    call = testing.draw(FRAME, score=scores[score], mask=masks[mask])
    for backend in BACKENDS:
        check(call, dtype, backend)
