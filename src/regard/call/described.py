"""What the values of a call consist of, as constants, and examples of such values.

torch.compile runs no Python of its own while it makes a graph: it follows what Python would do. So a score or a mask is
described by what it consists of (classes, functions, numbers, the dtypes and sizes of tensors), and a function whose
result is a constant to torch.compile builds another one of that and runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from regard.core.positions import Positions
from regard.core.region import Frame
from regard.core.tracing import expected, fixed, symbolic
from regard.core.value import Value, attributes_of, fields_of
from regard.masks.dense import Where
from regard.scores.elementwise import Elementwise

CHANGES = "a number that it reads may change from call to call"
# A size that may change: "queries", "keys" or "others", and what it is in the call that is traced, if torch says so.
Changing = tuple[str, "int | None"]

_NUMBERS = (bool, int, float, str, type(None))
# Whether functions that a graph makes, and that read no variables around them, are constants to torch.compile.
_CONSTANTS = torch.__version__ >= "2.13"


def described(item: Any, sizes: tuple[int, int], unknown: list[str], arguments: int | None = None) -> Any:
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
        fields = [described(getattr(item, name), sizes, unknown, own) for name in fields_of(item)]
        return "value", type(item), tuple(fields)
    if isinstance(item, tuple):
        return "tuple", None, tuple([described(part, sizes, unknown) for part in item])  # pyright: ignore
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
    return "constant", None, fixed(item) if type(item) is int else item


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


def described_frame(frame: Frame) -> tuple[Any, ...]:
    """A frame, as constants: batch, heads, queries, keys, the leading axes of both positions, and Frame.headed."""
    sizes = frame.nq, frame.nk
    at = frame.positions
    return (
        tuple([_size(n, sizes) for n in frame.batch]),
        _size(frame.heads, sizes),
        *(_size(n, sizes) for n in sizes),
        tuple([_size(n, sizes) for n in at.q.shape[:-1]]),
        tuple([_size(n, sizes) for n in at.k.shape[:-1]]),
        frame.headed,
    )


def _size(n: int, sizes: tuple[int, int]) -> int | Changing:
    """A size as a constant."""
    if not symbolic(n):
        return fixed(n)
    for name, size in zip(("queries", "keys"), sizes, strict=True):
        if symbolic(size) and n == size:
            return name, expected(n)
    return "others", expected(n)


class Sizes:
    """What sizes that may change are in an example: as in the call that is traced, if no others are given.

    changing: whether there are any
    """

    def __init__(self, queries: int | None = None, keys: int = 0, others: int = 0) -> None:
        self._named = None if queries is None else {"queries": queries, "keys": keys, "others": others}
        self.changing = False

    def __call__(self, size: int | Changing) -> int:
        if isinstance(size, int):
            return size
        self.changing = True
        name, traced = size
        if self._named is None:
            return _IF_UNKNOWN[name] if traced is None else traced
        return self._named[name]

    def most_elements(self, part: Any) -> int:
        """Of all tensors that `part` describes."""
        what, _, held = part
        if what == "tensor":
            return prod(map(self, held))
        return 0 if what == "constant" else max(map(self.most_elements, held), default=0)


_IF_UNKNOWN = {"queries": 37, "keys": 41, "others": 43}


def example(
    values: tuple[Any, ...], frame: tuple[Any, ...], size: Sizes, tensor: Callable[..., Tensor]
) -> tuple[tuple[Any, ...], Frame]:
    """Values and a frame, made of what describes them. tensor: one of a dtype and a shape."""
    batch, heads, nq, nk, q_lead, k_lead, headed = frame
    positions = [
        torch.arange(size(count), dtype=torch.int64, device="cpu").expand([*map(size, lead), size(count)])
        for count, lead in ((nq, q_lead), (nk, k_lead))
    ]
    made_frame = Frame(tuple(map(size, batch)), size(heads), size(nq), size(nk), Positions(*positions), headed)
    return tuple([_made(part, lambda dtype, shape: tensor(dtype, [*map(size, shape)])) for part in values]), made_frame


def _made(part: Any, tensor: Callable[..., Tensor]) -> Any:
    """What a part is a description of."""
    what, of, held = part
    if what == "tensor":
        return tensor(of, held)
    if what == "constant":
        return held
    own = tuple([_made(one, tensor) for one in held])
    if what == "tuple":
        return own
    item = object.__new__(of)
    for name, field in zip(fields_of(item), own, strict=True):
        object.__setattr__(item, name, field)
    return item
