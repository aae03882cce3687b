"""A graph of torch's operations as a program: each pair's numbers by instructions, the rest as operands."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.backends.native.programs.handlers import HANDLERS
from regard.backends.native.programs.lowering import Lowering
from regard.backends.native.programs.trace import Graph, Values


@dataclass
class Program:
    """What the kernels read: rows of code, and operands."""

    rows: list[list[int]]
    operands: list[Tensor]


def lower(graph: Graph, values: Values) -> Program:
    """The program of a graph. Raises NotLowered."""
    lowering = Lowering(values, HANDLERS)
    result = lowering.as_float(lowering.value(graph.result))
    return Program(lowering.code.rows(result), lowering.operands)
