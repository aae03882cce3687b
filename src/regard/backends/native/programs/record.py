"""Scores and masks of a person's, recorded while a graph of torch is made: as the texts that text.py reads.

torch.compile runs no Python of its own while it makes a graph: it follows what Python would do. So a score or a mask is
described by what it consists of (classes, functions, numbers, the dtypes and sizes of tensors), and a function whose
result is a constant to torch.compile builds another one of that and records it: see examples.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from regard.backends.native.programs.examples import CHANGES, NO, Changing, text_of
from regard.backends.native.programs.operations import PROGRAM_OPERANDS
from regard.backends.native.programs.text import RecordedFunction, RecordedMask, RecordedModifier
from regard.core.region import Frame
from regard.core.tracing import constant_in_graphs, expected, loaded, symbolic
from regard.core.value import Value, attributes_of, fields_of
from regard.masks.algebra import Mask
from regard.masks.dense import Where
from regard.scores.algebra import Modifier
from regard.scores.elementwise import Elementwise

_NUMBERS = (bool, int, float, str, type(None))
# Whether functions that a graph makes, and that read no variables around them, are constants to torch.compile.
_CONSTANTS = torch.__version__ >= "2.13"


def record_modifiers(stages: Sequence[Modifier], frame: Frame) -> RecordedModifier | str:
    """All modifiers of a score as one that holds their tensors; or why that cannot be, as a clause."""
    tensors = tuple([t for stage in stages for t in stage.tensors()])
    if len(tensors) > PROGRAM_OPERANDS:
        return f"it holds {len(tensors)} tensors; a node of a graph has room for {PROGRAM_OPERANDS}"
    found = _recorded("modifiers", tuple(stages), frame)
    if found.startswith(NO):
        return found.removeprefix(NO)
    if torch.compiler.is_dynamo_compiling():
        at = frame.region(slice(0, 2), slice(0, 2))  # sizes that may change are 2 at least
        few = min(frame.nq, 2), min(frame.nk, 2)
        s = torch.zeros((*frame.batch, frame.heads, *few), dtype=torch.float32, device="cpu")
        for stage in stages:  # torch.compile guards what it reads on the way; nothing reads the result
            s = cast("Modifier", stage.local(at)).modify(s, at)
        if _numbers_change() or _is_changed():
            return CHANGES
    return RecordedModifier(found, tensors)


def record_mask(mask: Mask, frame: Frame) -> RecordedMask | str:
    """A mask as one that holds its tensors; or why that cannot be, as a clause."""
    found = _recorded("mask", (mask,), frame)
    if found.startswith(NO):
        return found.removeprefix(NO)
    if torch.compiler.is_dynamo_compiling():
        mask.visible(frame.region(slice(0, 2), slice(0, 2)))  # as above
        if _numbers_change() or _is_changed():
            return CHANGES
    return RecordedMask(found, mask.tensors())


def record_features(similarity: Elementwise, heads: int, width: int) -> RecordedFunction | str:
    """The function of an Elementwise; or why it cannot be recorded, as a clause."""
    found = _recorded("features", (similarity,), Frame.of(1, width, batch=(heads,), device="cpu"))
    if found.startswith(NO):
        return found.removeprefix(NO)
    if torch.compiler.is_dynamo_compiling():
        q = torch.zeros(1, heads, 1, 1, width, dtype=torch.float32, device="cpu")
        similarity.fn(q, q, *similarity.aligned(similarity.inputs))  # as above
        if _numbers_change() or _is_changed():
            return CHANGES
    return RecordedFunction(found)


def _recorded(kind: str, items: tuple[Value, ...], frame: Frame) -> str:
    """A text, or NO and why there is none."""
    sizes = frame.nq, frame.nk
    unknown: list[str] = []
    described = tuple([_described(item, sizes, unknown) for item in items])
    if not frame.headed and any(t.dim() > 1 for item in items for t in item.tensors()):
        unknown.append("it holds tensors without the axis of heads that a node of a graph has")
    if unknown:
        return NO + unknown[0]
    at = frame.positions
    around = (
        tuple([_size(n, sizes) for n in frame.batch]),
        _size(frame.heads, sizes),
        *(_size(n, sizes) for n in sizes),
        tuple([_size(n, sizes) for n in at.q.shape[:-1]]),
        tuple([_size(n, sizes) for n in at.k.shape[:-1]]),
        frame.headed,
    )
    return text_of(kind, described, around)


def _described(item: Any, sizes: tuple[int, int], unknown: list[str], arguments: int | None = None) -> Any:
    """What a value consists of, as constants; what is none is added to `unknown`, as a clause.

    arguments: how many a function is called with, where that is known
    """
    if isinstance(item, Tensor):
        return "tensor", item.dtype, tuple([_size(n, sizes) for n in item.shape])
    if isinstance(item, Value):
        if len(attributes_of(item)) > len(fields_of(item)):
            unknown.append(f"a {type(item).__name__} has attributes that are no fields")
        own = 4 if type(item) is Where else None  # b, h, i, j
        if type(item) is Elementwise:
            own = 2 + len(item.inputs)
        fields = [_described(getattr(item, name), sizes, unknown, own) for name in fields_of(item)]
        return "value", type(item), tuple(fields)
    if isinstance(item, tuple):
        return "tuple", None, tuple([_described(part, sizes, unknown) for part in item])  # pyright: ignore
    if isinstance(item, FunctionType):
        if _is_made_in_graph(item, arguments):
            unknown.append("its function is made where the graph is")
        return "constant", None, item
    if isinstance(item, torch.dtype):
        return "constant", None, item
    if not isinstance(item, _NUMBERS):
        unknown.append(f"it holds a {type(item).__name__}")
        return None
    if isinstance(item, (int, float)) and symbolic(item):
        unknown.append(CHANGES)
        return None
    return "constant", None, _constant(item) if type(item) is int else item


def _is_made_in_graph(function: FunctionType, arguments: int | None) -> bool:
    """Whether torch.compile may have made a function while it makes a graph, and it is no constant there.

    It is none if it reads variables around it, or has defaults, which nothing here can ask for: more parameters than
    arguments.
    """
    code = function.__code__
    if not code.co_freevars:
        local = "<locals>" in getattr(code, "co_qualname", "<locals>")  # Python 3.10 has none
        return local and (not _CONSTANTS or code.co_argcount + code.co_kwonlyargcount != arguments)
    if not hasattr(function, "__get__"):  # to torch.compile, those that it makes have no such method
        return True
    try:
        return function.__closure__ is None
    except AttributeError:
        return True


@constant_in_graphs
def _numbers_change() -> bool:
    """Whether the graph that torch.compile is making serves several values of a number that is no size of a tensor.

    A function that reads such a number has no guard for the value that it had while it was recorded.
    """
    context = loaded("torch._guards").TracingContext.try_get()
    known = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if known is None:
        return False
    for symbol, sources in known.var_to_sources.items():
        fixed = known.replacements.get(symbol, symbol).is_number
        if not fixed and any(type(source).__name__ != "TensorPropertySource" for source in sources):
            return True
    return False


@constant_in_graphs
def _is_changed() -> bool:
    """Whether what torch.compile follows has assigned a variable, or written into an object, of the world around it.

    Python sees that only when the graph has run: a function that is recorded meanwhile reads the value from before.
    """
    try:
        effects = loaded("torch._dynamo.symbolic_convert").InstructionTranslator.current_tx().output.side_effects
        changed = effects._get_modified_vars()
    except AttributeError:  # a version of torch that keeps them elsewhere
        return True
    return any(type(var.mutation_type).__name__.endswith("Existing") for var in changed)


def _size(n: int, sizes: tuple[int, int]) -> int | Changing:
    """A size as a constant."""
    if not symbolic(n):
        return _constant(n)
    for name, size in zip(("queries", "keys"), sizes, strict=True):
        if symbolic(size) and n == size:
            return name, expected(n)
    return "others", expected(n)


def _constant(n: int) -> int:
    """A whole number with a fixed value; torch.compile may know it by a guard, and not as a constant."""
    known = expected(n)
    return n if known is None else known
