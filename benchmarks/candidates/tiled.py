"""regard without its kernels: functions of a pair, tile by tile in PyTorch."""

from __future__ import annotations

import regard as rg
from benchmarks.candidates import Way
from benchmarks.candidates.regard import of_region, start
from benchmarks.cases import Case
from benchmarks.inputs import Inputs

__all__ = ["start", "ways"]


def ways(case: Case, x: Inputs) -> list[Way]:
    return [of_region("Modifier, Where", x, rg.Tiled())]
