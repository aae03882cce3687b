"""Biases, which reach the kernels as their sum: native/steps/bias.h."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.modifiers.base import KernelModifier, total
from regard.backends.native.operands import BATCH, HEAD, KEY, QUERY, KernelOperand, full
from regard.call.problem import Problem
from regard.core.dtypes import HALF
from regard.core.shapes import broadcast_shape
from regard.scores.finite import finite_in, plus
from regard.scores.modifiers import Bias


class Biases(KernelModifier[Bias]):
    """Biases, which reach the kernels as their sum."""

    stage = Bias
    step, header = "Bias", "bias.h"
    operands = (
        KernelOperand(
            *("bias", None, (BATCH, HEAD, QUERY, KEY), "added to the scores"),
            strided=True,
            leaf=True,
            of_lengths=True,
            ragged=True,
            learned="bias",
        ),
    )
    repeats = True

    @classmethod
    def why_not(cls, problem: Problem, stage: Bias) -> str | None:
        biases = [_lifted(problem, part.bias) for part in problem.score.parts if isinstance(part, Bias)]
        shape = broadcast_shape(*(b.shape for b in biases))
        held = any(b.shape == shape for b in biases)
        return None if held else "the sum of its biases would be larger than each of them"

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[Bias]) -> dict[str, Any]:
        biases = [_lifted(problem, stage.bias) for stage in stages]
        if len(biases) == 1 and biases[0].dtype in (torch.float32, *HALF):
            return {"bias": biases[0]}
        return {"bias": reduce(plus, (finite_in(b, torch.float32) for b in biases))}

    @classmethod
    def empty_gradient(cls, name: str, operand: Tensor, heads: int) -> Tensor:
        shared = 1 in operand.shape[-2:]
        return torch.zeros(operand.shape, dtype=torch.float64 if shared else torch.float32, device="cpu")

    @classmethod
    def stage_gradient(cls, problem: Problem, t: Tensor, g: Tensor) -> Tensor:
        """The gradient of one bias from that of the sum of all: over the axes along which it is shared."""
        shape = _lifted(problem, t).shape
        for axis, size in enumerate(shape[::-1], 1):
            if size == 1 != g.shape[-axis]:  # 0 too: an empty sum
                g = total(g.movedim(-axis, -1))[..., None].movedim(-1, -axis)
        for _ in range(g.dim() - len(shape)):
            g = total(g.movedim(0, -1))
        return g


def _lifted(problem: Problem, bias: Tensor) -> Tensor:
    """A bias with an axis of heads at least."""
    return full(problem.frame.lift(bias))
