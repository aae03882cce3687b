"""A graph of torch's operations as a program: each pair's numbers by instructions, the rest as operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from regard.backends.native.programs.code import Derivative, NotLowered
from regard.backends.native.programs.graph import Graph, Values
from regard.backends.native.programs.handlers import EXACT_HANDLERS, HANDLERS
from regard.backends.native.programs.lowering import Lowering
from regard.backends.native.programs.operations import OPERATIONS, PROGRAM_OPERANDS
from regard.backends.native.programs.reads import Range, Read, extent, number_of
from regard.backends.native.programs.reverse import bound, derivatives
from regard.core.region import Frame

_MOST = 16  # programs of a graph that are kept: of as many sizes, and sets of gradients
_FAR = 4.0  # a derivative that is larger multiplies the rounding of weights


@dataclass(frozen=True, eq=False)
class Program:
    """What the kernels read: rows of code, as int32, and operands.

    learned: by operand, what autograd recorded of it, in float64
    inputs: the tensors that it recorded
    """

    rows: Tensor
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


@dataclass(frozen=True, eq=False)
class _Kept:
    """The rows of a program, and what they follow from besides shapes: numbers in them, and ranges of whole numbers."""

    rows: Tensor
    operands: list[Read]
    extents: dict[int, Range]
    numbers: list[tuple[Read, bool | int | float]]
    learned: list[int]

    def program(self, values: Values, exact: Values | None, inputs: list[Tensor]) -> Program | None:
        """The program of other tensors; None where it has other rows."""
        if not all(_same(number_of(read.elements(values)), one) for read, one in self.numbers):
            return None
        elements = [read.elements(values) for read in self.operands]
        if any(extent(elements[n]) != known for n, known in self.extents.items()):
            return None
        operands = [read.operand(t) for read, t in zip(self.operands, elements, strict=True)]
        learned = {} if exact is None else {n: self.operands[n].elements(exact) for n in self.learned}
        return Program(self.rows, operands, learned, inputs)


def lower(graph: Graph, frame: Frame, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Program:
    """The program of a graph of these tensors, with derivatives by those that are wanted. Raises NotLowered."""
    given = [t.detach() for t in tensors]
    exact = [_exact(t, want) for t, want in zip(given, wanted, strict=True)] if any(wanted) else []
    values, recorded = Values(frame, given), Values(frame, exact) if exact else None
    inputs = [t for t in exact if t.requires_grad]
    key = frame.shape, frame.positions.q.shape, frame.positions.k.shape, tuple(wanted)
    known = graph.kept.get(key)
    with torch.enable_grad():
        found = None if known is None else cast(_Kept, known).program(values, recorded, inputs)
        if found is not None:
            return found
        lowering = Lowering(values, HANDLERS, recorded)
        result = lowering.as_float(lowering.value(graph.result))
    rows, learned = _rows(lowering, result)
    _keep(graph, key, _Kept(rows, lowering.operands, lowering.extents, lowering.numbers, list(learned)))
    return Program(rows, lowering.tensors, learned, inputs)


def lower_mask_graph(graph: Graph, frame: Frame, tensors: Sequence[Tensor]) -> Program:
    """The program of a mask's graph, whose operands are numbered from the last of all down. Raises NotLowered."""
    values = Values(frame, [t.detach() for t in tensors])
    key = frame.shape, frame.positions.q.shape, frame.positions.k.shape
    known = graph.kept.get(key)
    found = None if known is None else cast(_Kept, known).program(values, None, [])
    if found is not None:
        return found
    lowering = Lowering(values, EXACT_HANDLERS)
    code = lowering.code.mask_rows(lowering.as_bool(lowering.value(graph.result)))
    reads = [*lowering.operands, *(read for read, _ in lowering.numbers)]
    if any(read.elements(values).dtype == torch.float64 for read in reads):
        raise NotLowered("it compares numbers of float64")
    last = PROGRAM_OPERANDS - 1
    rows = [[*row[:-1], last - row[-1] if OPERATIONS[row[0]] in ("LOAD", "GATHER") else row[-1]] for row in code]
    made = torch.tensor(rows, dtype=torch.int32, device="cpu")
    _keep(graph, key, _Kept(made, lowering.operands, lowering.extents, lowering.numbers, []))
    return Program(made, lowering.tensors, {}, [])


def _keep(graph: Graph, key: Any, kept: _Kept) -> None:
    if graph.fixed:
        if len(graph.kept) >= _MOST:
            graph.kept.clear()
        graph.kept[key] = kept


def _rows(lowering: Lowering, result: int) -> tuple[Tensor, dict[int, Tensor]]:
    """The code of a result and its derivatives, and the operands by which there is one, as autograd recorded them."""
    code, reads = lowering.code, lowering.reads
    found = derivatives(code, result, {0, *reads})
    by_operand = [Derivative(found[n], read, bound(code, found[n]) > _FAR) for n, read in reads.items() if n in found]
    rows = torch.tensor(code.rows(result, found.get(0), by_operand), dtype=torch.int32, device="cpu")
    used = {one.read.number for one in by_operand}
    return rows, {n: t for n, t in lowering.learned.items() if n in used}


def _exact(t: Tensor, wanted: bool) -> Tensor:
    return t.to(torch.float64, copy=True).requires_grad_(wanted) if t.is_floating_point() else t


def _same(a: float, b: float) -> bool:
    """Whether two numbers have the same bits."""
    return a == b and math.copysign(1, a) == math.copysign(1, b)
