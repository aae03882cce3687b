"""What a user's function reads: as a key under which its translation is kept, and as copies that stay as they are."""

from __future__ import annotations

import copy
import dis
from collections.abc import Callable, Hashable
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from regard.core.value import Value, names, number_key

NUMBERS = (int, float, bool, str, type(None), torch.dtype)
_SETTLED = frozenset(("builtins", "math", "regard", "torch", "typing"))  # packages in which nobody changes a number
_DEEPEST = 8  # functions that read functions
_READS_OUTSIDE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # the last in classes, from Python 3.12 on
_READ_ANY_NAME = ("eval", "exec", "globals", "locals", "vars")
_WRITERS = frozenset(
    ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update")
)
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
    return function.__code__, tuple([_key_of(x, content, depth) for x in _read_by(function).values()])


def clone(t: Tensor) -> Tensor:
    """A copy of a tensor's numbers, one after the other."""
    return t.detach().clone(memory_format=torch.contiguous_format)


def frozen(function: FunctionType, tensor: Callable[[Tensor], Tensor] = clone, depth: int = 0) -> FunctionType:
    """The same function over copies of all that it reads, so that later changes do not reach it. Raises Unknown.

    tensor: the copy of a tensor. Values are copied in the order in which `function_key` reads them.
    """
    if function in _settled_functions:
        return function
    if depth > _DEEPEST:
        raise Unknown
    return _reading(function, _read_by(function).mapped(lambda x: _copy_of(x, tensor, depth)))


def bound(function: FunctionType, known: dict[FunctionType, FunctionType] | None = None) -> FunctionType:
    """The same function over the values that its variables have now: a loop that assigns others does not reach it.

    Lists and dictionaries are copied, unless the function may write into them; other values are not. A function that
    assigns variables outside of it, or asks for them by name, stays as it is.

    known: functions that are bound already; one that reads itself, by way of others too, reads the original there.

    >>> functions = [bound(lambda x: x + n) for n in (1, 2)]
    >>> [function(10) for function in functions]
    [11, 12]
    """
    known = {} if known is None else known
    if function in _settled_functions or function in known:
        return known.get(function, function)
    known[function] = function
    try:
        read = _read_by(function)
    except Unknown:
        return function
    if all(map(_is_settled, read.values())):
        return function
    copied = () if _writes(function.__code__) else (list, dict)

    def kept(x: Any) -> Any:
        if isinstance(x, FunctionType):
            return bound(x, known)
        if type(x) is tuple:
            return tuple([kept(part) for part in x])  # pyright: ignore[reportUnknownVariableType]
        return copy.copy(x) if type(x) in copied else x

    known[function] = _reading(function, read.mapped(kept))
    return known[function]


def with_bound(item: Any) -> Any:
    """A value, or a tuple of values, whose functions are `bound`; the same one where it holds none.

    A backward computes scores and masks again: it must read what the forward read.
    """
    if isinstance(item, FunctionType):
        return bound(item)
    if isinstance(item, tuple):
        made = tuple([with_bound(part) for part in item])  # pyright: ignore[reportUnknownVariableType]
        return made if any(a is not b for a, b in zip(made, item, strict=True)) else item  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(item, Value):
        return item
    fields = {name: getattr(item, name) for name in names(type(item))}
    changed = {name: made for name, field in fields.items() if (made := with_bound(field)) is not field}
    if not changed:
        return item
    twin = copy.copy(item)
    for name, made in changed.items():
        object.__setattr__(twin, name, made)  # the class is frozen; the function computes the same
    return twin


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

    def values(self) -> tuple[Any, ...]:
        return *self.cells, *self.outside.values(), *self.defaults, *self.named.values()

    def mapped(self, fn: Callable[[Any], Any]) -> _Read:
        """The same names with fn of each value, called in the order of `values`."""
        found = iter([fn(x) for x in self.values()])
        return _Read(
            tuple([next(found) for _ in self.cells]),
            {name: next(found) for name in self.outside},
            tuple([next(found) for _ in self.defaults]),
            {name: next(found) for name in self.named},
        )


def _reading(function: FunctionType, read: _Read) -> FunctionType:
    """The function of the same code that reads these values."""
    around = function.__globals__
    outside = {name: around[name] for name in _IN_EVERY_MODULE if name in around} | read.outside
    made = FunctionType(
        function.__code__, outside, function.__name__, read.defaults, tuple([CellType(x) for x in read.cells])
    )
    made.__kwdefaults__ = read.named
    return made


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


@lru_cache(1024)
def _writes(code: CodeType) -> bool:
    """Whether a function may write into a list or a dictionary."""
    return any(
        step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
        or (step.opname in ("LOAD_METHOD", "LOAD_ATTR") and step.argval in _WRITERS)
        for inner in _codes(code)
        for step in dis.get_instructions(inner)
    )


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
