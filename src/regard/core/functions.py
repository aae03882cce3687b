"""What a user's function reads: as a key under which its translation is kept, and as copies that stay as they are."""

from __future__ import annotations

import dis
from collections.abc import Callable, Hashable
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from regard.core.value import number_key

NUMBERS = (int, float, bool, str, type(None), torch.dtype)
_SETTLED = frozenset(("builtins", "math", "regard", "torch", "typing"))  # packages in which nobody changes a number
_DEEPEST = 8  # functions that read functions
_READS_OUTSIDE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # the last in classes, from Python 3.12 on
_READ_ANY_NAME = ("eval", "exec", "globals", "locals", "vars")
_IN_EVERY_MODULE = ("__builtins__", "__name__", "__package__")
Content = Callable[[Tensor], Hashable] | None
_settled_functions: WeakSet[FunctionType] = WeakSet()


class Unknown(Exception):
    """A function reads what no key can hold."""


def function_key(function: FunctionType, content: Content = None, depth: int = 0) -> Hashable:
    """The code of a function and all that it reads: what is kept for a key serves every function that has it.

    content: the key of a tensor; without it, one that reads tensors is Unknown. Raises Unknown.

    >>> def scaled(factor):
    ...     return lambda s: s * factor
    >>> function_key(scaled(2.0)) == function_key(scaled(2.0)), function_key(scaled(2.0)) == function_key(scaled(3.0))
    (True, False)
    """
    if function in _settled_functions:
        return function
    if depth > _DEEPEST:
        raise Unknown
    read = _read_by(function)
    every = *read.cells, *read.outside.values(), *read.defaults, *read.named.values()
    return function.__code__, tuple([_key_of(x, content, depth) for x in every])


def clone(t: Tensor) -> Tensor:
    """A copy of a tensor's numbers, one after the other."""
    return t.detach().clone(memory_format=torch.contiguous_format)


def frozen(function: FunctionType, tensor: Callable[[Tensor], Tensor] = clone, depth: int = 0) -> FunctionType:
    """The same function of copies of all that it reads: nobody changes what it computes. Raises Unknown.

    tensor: the copy of a tensor.
    """
    if function in _settled_functions:
        return function
    if depth > _DEEPEST:
        raise Unknown
    read, around = _read_by(function), function.__globals__
    outside = {name: around[name] for name in _IN_EVERY_MODULE if name in around}
    outside |= {name: _copy_of(x, tensor, depth) for name, x in read.outside.items()}
    cells = tuple([CellType(_copy_of(x, tensor, depth)) for x in read.cells])
    defaults = tuple([_copy_of(x, tensor, depth) for x in read.defaults])
    made = FunctionType(function.__code__, outside, function.__name__, defaults, cells)
    made.__kwdefaults__ = {name: _copy_of(x, tensor, depth) for name, x in read.named.items()}
    return made


def settle(function: FunctionType) -> None:
    """Makes a function known by identity that nobody changes, such as `frozen` returns."""
    _settled_functions.add(function)


def settled(function: Any) -> bool:
    """Whether a function is known by identity."""
    return isinstance(function, FunctionType) and function in _settled_functions


class _Read(NamedTuple):
    """What a function reads that is not given to it: of its cells, its module, and its defaults."""

    cells: tuple[Any, ...]
    outside: dict[str, Any]
    defaults: tuple[Any, ...]
    named: dict[str, Any]


def _read_by(function: FunctionType) -> _Read:
    code, around = function.__code__, function.__globals__
    read = _names_read(code)
    if read is None or function.__dict__.keys() - {"__wrapped__"}:  # whoever calls it may read its attributes
        raise Unknown
    try:
        cells = tuple([cell.cell_contents for cell in function.__closure__ or ()])
    except ValueError:  # a name that has no value yet
        raise Unknown from None
    outside = {name: around[name] for name in read if name in around}
    return _Read(cells, outside, function.__defaults__ or (), function.__kwdefaults__ or {})


@lru_cache(1024)
def _names_read(code: CodeType) -> tuple[str, ...] | None:
    """The names outside of a function that it may read; None where it changes them, asks for all, or imports what may
    change."""
    found: dict[str, None] = {}
    for inner in _codes(code):
        for step in dis.get_instructions(inner):
            changes = step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
            imports = step.opname == "IMPORT_NAME" and step.argval.partition(".")[0] not in _SETTLED
            if changes or imports or step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                return None
            if step.opname in _READS_OUTSIDE:
                if step.argval in _READ_ANY_NAME:
                    return None
                found[step.argval] = None
    return tuple(found)


def _codes(code: CodeType) -> list[CodeType]:
    """The code of a function and of those inside of it."""
    return [code, *(inner for x in code.co_consts if isinstance(x, CodeType) for inner in _codes(x))]


def _is_settled(x: Any) -> bool:
    """Whether nobody changes what a module, a class or a function is: those of Python, torch and regard."""
    if isinstance(x, FunctionType):
        return not x.__closure__ and str(x.__globals__.get("__name__")).partition(".")[0] in _SETTLED
    if not isinstance(x, (ModuleType, type, BuiltinFunctionType)):
        return False
    if not isinstance(getattr(x, "__self__", None), (ModuleType, type, NoneType)):
        return False  # a method of a tensor or a list, which may change
    name = x.__name__ if isinstance(x, ModuleType) else x.__module__
    return (name or "builtins").partition(".")[0] in _SETTLED


def _key_of(x: Any, content: Content, depth: int) -> Hashable:
    if isinstance(x, NUMBERS):
        return number_key(x)
    if type(x) is tuple:
        return tuple([_key_of(part, content, depth) for part in x])  # pyright: ignore[reportUnknownVariableType]
    if _is_settled(x):
        return id(x)
    if isinstance(x, FunctionType):
        return function_key(x, content, depth + 1)
    if content is not None and isinstance(x, Tensor):
        return content(x)
    raise Unknown


def _copy_of(x: Any, tensor: Callable[[Tensor], Tensor], depth: int) -> Any:
    if type(x) is tuple:
        return tuple([_copy_of(part, tensor, depth) for part in x])  # pyright: ignore[reportUnknownVariableType]
    if isinstance(x, NUMBERS) or _is_settled(x):
        return x
    if isinstance(x, FunctionType):
        return frozen(x, tensor, depth + 1)
    if isinstance(x, Tensor):
        return tensor(x)
    raise Unknown
