"""A graph of torch's operations as a program: each pair's numbers by instructions, the rest as operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.backends.native.programs.code import Derivative, NoRoom, NotLowered
from regard.backends.native.programs.graph import Graph, Values
from regard.backends.native.programs.handlers import EXACT_HANDLERS, HANDLERS
from regard.backends.native.programs.lowering import Lowering
from regard.backends.native.programs.operations import OPERATIONS, PROGRAM_OPERANDS
from regard.backends.native.programs.reads import Range, Read, broadcasts, extent, number_of
from regard.backends.native.programs.reverse import bound, derivatives
from regard.core.positions import Positions
from regard.core.region import Frame
from regard.core.tracing import seen_by_autograd
from regard.core.value import number_key
from regard.core.vjp import vjp

_MOST = 8  # programs of a graph that are kept for the same gradients: of other numbers, or longer sequences
_FAR = 4.0  # a derivative that is larger multiplies the rounding of weights


@dataclass(frozen=True, eq=False)
class Program:
    """What the kernels read: rows of code, as int32, and operands.

    learned: by operand, what autograd recorded of it, in float64
    inputs: the tensors that it recorded
    function: as in Graph
    """

    rows: Tensor
    operands: list[Tensor]
    learned: dict[int, Tensor]
    inputs: list[Tensor]
    function: str | None = None

    @property
    def own_derivative(self) -> str | None:
        """Why its derivative is not that of what it computes, as a clause; None where it is."""
        return self.function and f"{self.function}, a torch.autograd.Function, has a backward of its own"

    def gradients(self, by_operand: dict[int, Tensor]) -> list[Tensor]:
        """The gradients of `inputs` from those of the operands."""
        used = [n for n in self.learned if n in by_operand]
        if not used:
            return [torch.zeros_like(t) for t in self.inputs]
        outputs, cotangents = [self.learned[n] for n in used], [by_operand[n].double() for n in used]
        found = vjp(outputs, self.inputs, cotangents, retain_graph=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(self.inputs, found, strict=True)]


@dataclass(frozen=True, eq=False)
class _Kept:
    """The rows of a program, and what they follow from besides what its key says.

    operands  what is read, and `shapes`, those of tables: elsewhere only whether a size is 1
    extents   the ranges in which whole numbers must lie
    numbers   those in the code
    learned   the operands that have gradients
    """

    rows: Tensor
    operands: list[Read]
    shapes: list[tuple[int | bool, ...]]
    extents: dict[int, Range]
    numbers: list[tuple[Read, bool | int | float]]
    learned: list[int]

    @staticmethod
    def of(lowering: Lowering, rows: Tensor, learned: list[int]) -> _Kept:
        shapes = [read.shape(t) for read, t in zip(lowering.operands, lowering.tensors, strict=True)]
        return _Kept(rows, lowering.operands, shapes, lowering.extents, lowering.numbers, learned)

    def program(self, values: Values, exact: Values | None, inputs: list[Tensor]) -> Program | None:
        """The program of other tensors; None where it has other rows."""
        numbers = [(read.elements(values), one) for read, one in self.numbers]
        if any(t.numel() != 1 or number_key(number_of(t)) != number_key(one) for t, one in numbers):
            return None
        elements = [read.elements(values) for read in self.operands]
        for read, t, known in zip(self.operands, elements, self.shapes, strict=True):
            if read.shape(t) != known or not (read.table or broadcasts(t, values.frame)):
                return None
        for n, (low, high) in self.extents.items():
            found = extent(elements[n])
            if found is None or found[0] < low or found[1] > high:
                return None
        operands = [read.operand(t) for read, t in zip(self.operands, elements, strict=True)]
        learned = {} if exact is None else {n: self.operands[n].elements(exact) for n in self.learned}
        return Program(self.rows, operands, learned, inputs)


Rows = tuple[Tensor, dict[int, Tensor]]  # code, and the operands by which it has a derivative, as autograd has them


def lower(
    graph: Graph,
    frame: Frame,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    kind: type[Lowering] = Lowering,
    rows_of: Callable[[Lowering, int], Rows] | None = None,
) -> Program:
    """The program of a graph of these tensors, with derivatives by those that are wanted. Raises NotLowered.

    kind, rows_of: how the graph's operations, and its result with the derivatives, become code; of scores by default.
    """
    given = [t.detach() for t in tensors]
    # what is kept has derivatives, also if this call needs none: a graph's operator, or a call in inference mode, whose
    # tensors autograd takes as copies alone
    with torch.inference_mode(False), torch.enable_grad():
        exact = [_exact_copy(t, want) for t, want in zip(given, wanted, strict=True)] if any(wanted) else []
        recorded = Values(_exact_frame(frame), exact) if exact else None
    values, inputs = Values(frame, given), [t for t in exact if t.requires_grad]

    def made(lasting: bool, of_pairs: bool) -> tuple[Program, _Kept]:
        lowering = kind(values, HANDLERS, recorded, lasting, of_pairs)
        rows, learned = (rows_of or _rows)(lowering, lowering.as_float(lowering.value(graph.result)))
        return Program(rows, lowering.tensors, learned, inputs), _Kept.of(lowering, rows, list(learned))

    with torch.inference_mode(False), torch.enable_grad(), seen_by_autograd() if exact else nullcontext():
        return replace(_kept_or_made(graph, values, recorded, inputs, tuple(wanted), made), function=graph.function)


def lower_mask_graph(graph: Graph, frame: Frame, tensors: Sequence[Tensor]) -> Program:
    """The program of a mask's graph, whose operands are numbered from the last of all down. Raises NotLowered."""
    values, last = Values(frame, [t.detach() for t in tensors]), PROGRAM_OPERANDS - 1

    def made(lasting: bool, of_pairs: bool) -> tuple[Program, _Kept]:
        lowering = Lowering(values, EXACT_HANDLERS, None, lasting, of_pairs)
        code = lowering.code.mask_rows(lowering.as_bool(lowering.value(graph.result)))
        reads = [*lowering.operands, *(read for read, _ in lowering.numbers)]
        if any(read.elements(values).dtype == torch.float64 for read in reads):
            raise NotLowered("it compares numbers of float64")
        numbered = [
            [*row[:-1], last - row[-1] if OPERATIONS[row[0]] in ("LOAD", "GATHER") else row[-1]] for row in code
        ]
        rows = torch.tensor(numbered, dtype=torch.int32, device="cpu")
        return Program(rows, lowering.tensors, {}, []), _Kept.of(lowering, rows, [])

    with torch.inference_mode(False):  # autograd saves the code that is kept
        return _kept_or_made(graph, values, None, [], (), made)


def _kept_or_made(
    graph: Graph,
    values: Values,
    exact: Values | None,
    inputs: list[Tensor],
    wanted: tuple[bool, ...],
    made: Callable[[bool, bool], tuple[Program, _Kept]],
) -> Program:
    """A program that serves these values among those that are kept, or a new one: for other lengths too if possible."""
    frame = values.frame
    key = tuple([n > 1 for n in frame.shape]), frame.positions.q.shape[:-1], frame.positions.k.shape[:-1], wanted
    known: list[_Kept] = graph.kept.setdefault(key, []) if graph.fixed else []
    for one in known:
        found = one.program(values, exact, inputs)
        if found is not None:
            return found
    try:
        program, kept = _first_that_fits(lambda of_pairs: made(True, of_pairs))
    except NotLowered:
        program, kept = _first_that_fits(lambda of_pairs: made(False, of_pairs))
    known.insert(0, kept)
    del known[_MOST:]
    return program


def _first_that_fits(made: Callable[[bool], tuple[Program, _Kept]]) -> tuple[Program, _Kept]:
    """A program; one that computes more for each pair where it would read too many tensors."""
    try:
        return made(False)
    except NoRoom:
        return made(True)


def _rows(lowering: Lowering, result: int) -> Rows:
    """The code of a score and its derivatives."""
    code, reads = lowering.code, lowering.reads
    found = derivatives(code, result, {0, *reads})
    by_operand = [Derivative(found[n], read, bound(code, found[n]) > _FAR) for n, read in reads.items() if n in found]
    rows = torch.tensor(code.rows(result, found.get(0), by_operand), dtype=torch.int32, device="cpu")
    used = {one.read.number for one in by_operand}
    return rows, {n: t for n, t in lowering.learned.items() if n in used}


def _exact_copy(t: Tensor, wanted: bool) -> Tensor:
    """A tensor in float64, of which autograd records what is computed where its gradient is wanted."""
    return t.to(torch.float64, copy=True).requires_grad_(wanted) if t.is_floating_point() else _ordinary(t)


def _exact_frame(frame: Frame) -> Frame:
    at = frame.positions
    if not (at.q.is_inference() or at.k.is_inference()):
        return frame
    return replace(frame, positions=Positions(_ordinary(at.q), _ordinary(at.k)))


def _ordinary(t: Tensor) -> Tensor:
    """The same numbers in a tensor that autograd can save, which it cannot do with one that inference mode made."""
    return t.clone() if t.is_inference() else t
