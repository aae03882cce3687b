"""regard without the feature that a case is about: contiguous keys in the place of pages, or of a shared prefix."""

from __future__ import annotations

from benchmarks.candidates import Unable, Way
from benchmarks.candidates.regard import cached, forget, sliced, start
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.stepping import steps

__all__ = ["start", "ways"]


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what == "pages":
        return [steps("GrowingCache", x, cached, forget)]
    if case.what == "prefix":
        return [steps("the prefix copied to each", x, sliced, forget)]
    raise Unable("only where keys are in pages, or shared")
