"""Which kernels a problem's similarity has."""

from __future__ import annotations

from regard.backends.native.additive import AdditiveKernels
from regard.backends.native.elementwise import ElementwiseKernels
from regard.backends.native.families import KernelFamily
from regard.call.problem import Problem
from regard.scores.additive import Additive
from regard.scores.elementwise import Elementwise


def family_of(problem: Problem) -> KernelFamily:
    """The kernels of a problem's similarity."""
    if isinstance(problem.similarity, Elementwise):
        return ElementwiseKernels()
    return AdditiveKernels() if isinstance(problem.similarity, Additive) else KernelFamily()
