"""A graph of torch's operations as a program: each pair's numbers by instructions, the rest as operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from regard.backends.native.programs.code import Derivative
from regard.backends.native.programs.graph import Graph, Values
from regard.backends.native.programs.handlers import HANDLERS
from regard.backends.native.programs.lowering import Lowering
from regard.backends.native.programs.reverse import bound, derivatives
from regard.core.region import Frame

_FAR = 4.0  # a derivative that is larger multiplies the rounding of weights


@dataclass
class Program:
    """What the kernels read: rows of code, and operands.

    learned: by operand, what autograd recorded of it, in float64
    inputs: the tensors that it recorded
    """

    rows: list[list[int]]
    operands: list[Tensor]
    learned: dict[int, Tensor]
    inputs: list[Tensor]

    def gradients(self, by_operand: dict[int, Tensor]) -> list[Tensor]:
        """The gradients of `inputs` from those of the operands."""
        used = [n for n in self.learned if n in by_operand]
        if not used:
            return [torch.zeros_like(t) for t in self.inputs]
        pairs = [self.learned[n] for n in used], self.inputs, [by_operand[n].double() for n in used]
        found = cast("tuple[Tensor | None, ...]", torch.autograd.grad(*pairs, retain_graph=True, allow_unused=True))
        return [torch.zeros_like(t) if g is None else g for t, g in zip(self.inputs, found, strict=True)]


def lower(graph: Graph, frame: Frame, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Program:
    """The program of a graph of these tensors, with derivatives by those that are wanted. Raises NotLowered."""
    given = [t.detach() for t in tensors]
    with torch.enable_grad():
        exact = [_exact(t, want) for t, want in zip(given, wanted, strict=True)] if any(wanted) else []
        lowering = Lowering(Values(frame, given), HANDLERS, Values(frame, exact) if exact else None)
        result = lowering.as_float(lowering.value(graph.result))
    code, reads = lowering.code, lowering.reads
    found = derivatives(code, result, {0, *reads})
    by_operand = [Derivative(found[n], read, bound(code, found[n]) > _FAR) for n, read in reads.items() if n in found]
    rows = code.rows(result, found.get(0), by_operand)
    used = {one.read.number for one in by_operand}
    learned = {n: t for n, t in lowering.learned.items() if n in used}
    return Program(rows, lowering.operands, learned, [t for t in exact if t.requires_grad])


def _exact(t: Tensor, wanted: bool) -> Tensor:
    return t.to(torch.float64, copy=True).requires_grad_(wanted) if t.is_floating_point() else t
