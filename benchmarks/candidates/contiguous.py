"""regard without what a case is about: contiguous keys for pages or a shared prefix, a call for each sequence."""

from __future__ import annotations

from benchmarks.candidates import Unable, Way
from benchmarks.candidates.regard import cached, call_each, forget, sliced, start
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.stepping import steps

__all__ = ["start", "ways"]


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what == "pages":
        return [steps("GrowingCache", x, cached, forget)]
    if case.what == "prefix":
        return [steps("the prefix copied to each", x, sliced, forget)]
    if case.what == "mixed":
        return [call_each(x)]
    raise Unable("only where keys are in pages or shared, or sequences in one call")
