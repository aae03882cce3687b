"""Every mask under every score, in every frame: gradients of the native kernels against gradients in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import regard as rg
from kernel_checks import calls, check, drawn, frames
from needed import needs_kernels
from regard import testing
from regard.backends.native.backward import why_not_backward

pytestmark = needs_kernels

FRAMES = frames(few=151)
CALLS = calls(FRAMES)
# whose tensors' gradients the kernels do not find, and why
OVER_TILES = {
    "Alibi 2": "its coordinates are learned",
    "Distance": "its scores are distances",
    "Distance 2": "its scores are distances",
    "SoftCap 2": "its soft cap is learned",
}


def why_tiles(case: testing.Case) -> str | None:
    """Why the gradients of a call that runs natively are summed over tiles in PyTorch."""
    problem = case.leaves(torch.float32).problem
    assert rg.Native().why_not(problem, lse=True) is None
    return why_not_backward(problem, tuple(True for _ in problem.tensors()))


@cache
def judged(size: str, score: str) -> bool:
    """Not a tensor of one number: how far that is off is chance. The other sizes have more."""
    return all(t.numel() > 1 for t in testing.scores(FRAMES[size])[score].tensors())


# Custom is refused (test_native.py); additive scores and sums over features have kernels and tests of their own
# (test_native_additive.py, test_native_elementwise.py)
OTHERWISE = "Custom", "Additive", "Elementwise"
NATIVELY = [call for call in CALLS if call[2] not in OVER_TILES and not call[2].startswith(OTHERWISE)]


@pytest.mark.parametrize(("size", "mask", "score"), [call for call in NATIVELY if judged(call[0], call[2])])
def test_every_mask_and_score(size: str, mask: str, score: str) -> None:
    case = drawn(FRAMES[size], mask, score)
    assert why_tiles(case) is None
    check(case)


OTHERS = [call for call in CALLS if call[2] in OVER_TILES]


@pytest.mark.parametrize(("size", "mask", "score"), [call for call in OTHERS if judged(call[0], call[2])])
def test_what_the_kernels_do_not_differentiate_goes_over_tiles(size: str, mask: str, score: str) -> None:
    case = drawn(FRAMES[size], mask, score)
    assert why_tiles(case) == OVER_TILES[score]
    check(case)
