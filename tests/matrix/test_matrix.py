"""The derived matrix: every exported mask × score × backend × dtype, against Reference in float64.

Sdpa and Flex, which take less and have no gradients on a CPU, have tests of their own (tests/integrations).
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

import regard as rg
from fuzz.build import Unplanned
from kernel_checks import check
from needed import needs_kernels
from regard import testing
from regard.backends.base import Backend
from regard.core.dtypes import FLOATING

FRAME = testing.frame()
MASKS, SCORES = list(testing.masks(FRAME)), list(testing.scores(FRAME))
NATIVE, *TILED = Unplanned(), rg.Tiled(rows=7, keys=11), rg.Tiled()

CASES = [pytest.param(*case) for case in product(MASKS, SCORES, TILED, FLOATING)]
# the kernels refuse float64 and scores that are somebody's function (tests/kernels/test_native.py)
SCORES_IN_CPP = [score for score in SCORES if score != "Custom"]
DTYPES_IN_CPP = [dtype for dtype in FLOATING if dtype != torch.float64]
CASES += [pytest.param(*case, marks=needs_kernels) for case in product(MASKS, SCORES_IN_CPP, [NATIVE], DTYPES_IN_CPP)]


@cache
def drawn() -> tuple[dict[str, rg.Mask], dict[str, rg.Score]]:
    torch.manual_seed(0)
    return testing.masks(FRAME), testing.scores(FRAME)


@pytest.mark.each_backend
@pytest.mark.parametrize(("mask", "score", "backend", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_every_mask_and_score(mask: str, score: str, backend: Backend, dtype: torch.dtype) -> None:
    masks, scores = drawn()
    check(testing.draw(FRAME, score=scores[score], mask=masks[mask]), dtype, backend)
