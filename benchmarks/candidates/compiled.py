"""torch.compile of the formulas in eager.py."""

from __future__ import annotations

import torch

from benchmarks.candidates import Unable, Way, eager
from benchmarks.cases import Case
from benchmarks.functions import term_of
from benchmarks.inputs import Inputs
from benchmarks.passes import way

start = eager.start


def ways(case: Case, x: Inputs) -> list[Way]:
    torch._dynamo.reset()
    if case.what == "additive":
        return [way("formula", x, torch.compile(eager.additive, dynamic=False))]
    if term_of(case) is None:
        raise Unable("only where neither SDPA nor FlexAttention has such a score")
    return [way("formula", x, torch.compile(eager.formula(case), dynamic=False))]
