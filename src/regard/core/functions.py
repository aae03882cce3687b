"""What a user's function reads: as a key under which its translation is kept, and as copies that stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from regard.core.attributes import (
    BARE,
    CALLED,
    SETTLED,
    Copier,
    Unknown,
    Uses,
    is_object,
    key_of_object,
    names_read,
    uses_of,
    writes,
)
from regard.core.value import Value, names, number_key

NUMBERS = (int, float, bool, str, type(None), torch.dtype)
_DEEPEST = 8  # functions that read functions
_IN_EVERY_MODULE = ("__builtins__", "__name__", "__package__")
Content = Callable[[Tensor], Hashable] | None
_Variable = tuple[CodeType, str]  # the code that reads a value, and its name there
_settled_functions: WeakSet[FunctionType] = WeakSet()


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
    values = read.values()
    if not values:
        return function.__code__, ()
    named = zip(values, read.variables(function.__code__), strict=True)
    return function.__code__, tuple([_key_of(x, content, depth, name) for x, name in named])


def callable_key(fn: Callable[..., Any], content: Content) -> Hashable:
    """As function_key, of any callable: a method, a module, an object with __call__, a functools.partial."""
    return _key_of(fn, content, 0, CALLED)


def clone(t: Tensor) -> Tensor:
    """A copy of a tensor's numbers, one after the other."""
    return t.detach().clone(memory_format=torch.contiguous_format)


def frozen(fn: Callable[..., Any], tensor: Callable[[Tensor], Tensor] = clone) -> Callable[..., Any]:
    """The same callable over copies of all that it reads, so that later changes do not reach it. Raises Unknown.

    tensor: the copy of a tensor. Values are copied in the order in which `callable_key` reads them.
    """
    return _Freezer(tensor).copy(fn, 0, CALLED)


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
    copied = () if writes(function.__code__) else (list, dict)
    known[function] = _reading(function, read.mapped(lambda x: _bound_value(x, known, copied)))
    return known[function]


def _bound_value(x: Any, known: dict[FunctionType, FunctionType], copied: tuple[type, ...]) -> Any:
    if isinstance(x, FunctionType):
        return bound(x, known)
    if type(x) is tuple:
        return tuple([_bound_value(part, known, copied) for part in x])  # pyright: ignore[reportUnknownVariableType]
    return copy.copy(x) if type(x) in copied else x


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
    twin = item
    for name in names(type(item)):
        field = getattr(item, name)
        made = with_bound(field) if isinstance(field, (FunctionType, tuple, Value)) else field  # pyright: ignore[reportUnknownArgumentType]
        if made is not field:
            twin = copy.copy(item) if twin is item else twin
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

    def variables(self, code: CodeType) -> list[_Variable]:
        """The code that reads each of `values`, and its name there."""
        last = code.co_argcount
        of_defaults = code.co_varnames[last - len(self.defaults) : last]
        return [(code, name) for name in (*code.co_freevars, *self.outside, *of_defaults, *self.named)]

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
    read = names_read(code)
    if read is None or function.__dict__.keys() - {"__wrapped__"}:  # whoever calls it may read its attributes
        raise Unknown
    try:
        cells = tuple([cell.cell_contents for cell in function.__closure__ or ()])
    except ValueError:  # a name that has no value yet
        raise Unknown from None
    outside = {name: around[name] for name in read if name in around}
    return _Read(cells, outside, function.__defaults__ or (), function.__kwdefaults__ or {})


def _is_settled(x: Any) -> bool:
    """Whether nobody changes what a module, a class or a function is: those of Python, torch and regard."""
    if isinstance(x, FunctionType):
        return not x.__closure__ and str(x.__globals__.get("__name__")).partition(".")[0] in SETTLED
    if not isinstance(x, (ModuleType, type, BuiltinFunctionType)):
        return False
    if not isinstance(getattr(x, "__self__", None), (ModuleType, type, NoneType)):
        return False  # a method of a tensor or a list, which may change
    name = x.__name__ if isinstance(x, ModuleType) else x.__module__
    return (name or "builtins").partition(".")[0] in SETTLED


def _is_number(x: Any) -> bool:
    """Whether a value is a number, a string or None, and has no attributes of its own besides."""
    return isinstance(x, NUMBERS) and not hasattr(x, "__dict__")


def _key_of(x: Any, content: Content, depth: int, read: _Variable | Uses) -> Hashable:
    """The key of a value. read: how its attributes are found out, or which these are."""
    if _is_number(x):
        return number_key(x)
    if type(x) is tuple:
        return tuple([_key_of(part, content, depth, BARE) for part in x])  # pyright: ignore[reportUnknownVariableType]
    if _is_settled(x):
        return x  # not its id, which another has once it is gone
    if isinstance(x, FunctionType):
        return function_key(x, content, depth + 1)
    if isinstance(x, Tensor):
        if content is None or not all(map(_is_number, vars(x).values())):
            raise Unknown
        return content(x), *((name, number_key(own)) for name, own in vars(x).items())  # what somebody set on it
    if type(x) is partial and not vars(x):
        own = [_key_of(one, content, depth + 1, read) for one, read in _held(x)]
        return _key_of(x.func, content, depth + 1, CALLED), tuple(own), len(x.args), tuple(x.keywords)
    if type(x) is MethodType and depth <= _DEEPEST:
        variable = x.__func__.__code__, _first(x)
        return function_key(x.__func__, content, depth + 1), _key_of(x.__self__, content, depth + 1, variable)
    if depth > _DEEPEST or not is_object(x):
        raise Unknown
    return key_of_object(x, _uses(read), lambda y, of: _key_of(y, content, depth + 1, of))


def _held(x: partial[Any]) -> list[tuple[Any, _Variable | Uses]]:
    """The arguments that a functools.partial holds, with the variables that they become."""
    code = x.func.__code__ if type(x.func) is FunctionType else None
    if code is None or len(x.args) > code.co_argcount:
        return [(one, BARE) for one in (*x.args, *x.keywords.values())]
    names = *code.co_varnames[: len(x.args)], *x.keywords
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]  # others go into **kwargs, unseen
    held = zip((*x.args, *x.keywords.values()), names, strict=True)
    return [(one, (code, name) if name in parameters else BARE) for one, name in held]


def _first(method: MethodType) -> str:
    """What a method calls its object. Raises Unknown."""
    if type(method.__func__) is not FunctionType or not method.__func__.__code__.co_argcount:
        raise Unknown
    return method.__func__.__code__.co_varnames[0]


def _uses(read: _Variable | Uses) -> Uses:
    return read if isinstance(read, frozenset) else uses_of(*read)


class _Freezer:
    """Copies what a callable reads, in the order of its key; tensors by a function of each."""

    def __init__(self, tensor: Callable[[Tensor], Tensor]) -> None:
        self.tensor, self.objects = tensor, Copier()

    def copy(self, x: Any, depth: int, read: _Variable | Uses) -> Any:
        """A copy of a value, as _key_of reads it. Raises Unknown."""
        if type(x) is tuple:
            return tuple([self.copy(part, depth, BARE) for part in x])  # pyright: ignore[reportUnknownVariableType]
        if _is_number(x) or _is_settled(x):
            return x
        if isinstance(x, FunctionType):
            return self.function(x, depth + 1)
        if isinstance(x, Tensor):
            made = self.tensor(x)
            vars(made).update(vars(x))
            return made
        if type(x) is partial and not vars(x):
            own = [self.copy(one, depth + 1, read) for one, read in _held(x)]
            fn, named = self.copy(x.func, depth + 1, CALLED), own[len(x.args) :]
            return partial(fn, *own[: len(x.args)], **dict(zip(x.keywords, named, strict=True)))
        if type(x) is MethodType and depth <= _DEEPEST:
            function, variable = self.function(x.__func__, depth + 1), (x.__func__.__code__, _first(x))
            return MethodType(function, self.copy(x.__self__, depth + 1, variable))
        if depth > _DEEPEST or not is_object(x):
            raise Unknown
        return self.objects.copied(x, _uses(read), lambda y, of: self.copy(y, depth + 1, of))

    def function(self, function: FunctionType, depth: int) -> FunctionType:
        """A function that reads copies. Raises Unknown."""
        if function in _settled_functions:
            return function
        if depth > _DEEPEST + 1:
            raise Unknown
        read = _read_by(function)
        variables = iter(read.variables(function.__code__))
        return _reading(function, read.mapped(lambda x: self.copy(x, depth, next(variables))))
