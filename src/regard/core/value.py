"""Value: what masks, scores and their parts are. Frozen dataclasses that compare, hash, print and pickle by content,
and whose tensors can be listed and exchanged, so that autograd sees each of them."""

from __future__ import annotations

import copy
import inspect
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self


class Value:
    """Base of regard's immutable descriptions. Subclasses are frozen dataclasses.

    Fields may hold numbers, tensors, other Values and tuples of these. Two values are equal when their classes and
    fields are; tensors are equal when dtype, device, shape and content are.

    >>> from regard.masks.positional import Causal, Window
    >>> Window(before=2, after=0) == Window(before=2, after=0), Causal() == Window(before=None, after=0)
    (True, False)

    argument: the name under which `attention` takes such a value; "" where it takes none.
    _follow: for a method, other methods that answer the same question: a class that redefines the first does not
             inherit a parent's redefinition of the others
    """

    argument: ClassVar[str] = ""
    _follow: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method, others in cls._follow.items():
            _drop_inherited(cls, method, others)
        # @dataclass keeps what stands in the class already; its own versions cannot compare or print tensors.
        for name in ("__eq__", "__hash__", "__repr__"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls, name))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Value) or type(self) is not type(other):
            return NotImplemented
        return all(_same(a, b) for a, b in zip(_items(self), _items(other), strict=True))

    def __hash__(self) -> int:
        return hash((type(self), *(_key(item) for item in _items(self))))

    def __repr__(self) -> str:
        if torch.compiler.is_compiling():  # dynamo prints no tensors; a graph has no use for the text
            return type(self).__name__
        shown = (f"{name}={_show(item)}" for name, item in _given(self))
        return f"{type(self).__name__}({', '.join(shown)})"

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor held here, depth first, in the order of the fields."""
        found: list[Tensor] = []
        left: list[Any] = [self]
        while left:
            item = left.pop()
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, tuple):
                left += item[::-1]
            elif isinstance(item, Value):
                left += _items(item)[::-1]
        return tuple(found)

    def with_tensors(self, tensors: Iterator[Tensor]) -> Self:
        """The same value around other tensors, taken from the iterator in the order of `tensors()`."""
        return _exchange(self, tensors)


def _drop_inherited(cls: type, method: str, others: tuple[str, ...]) -> None:
    """Gives a class the first definitions of `others` where those that it inherits belong to another `method` than its
    own.
    """
    defined = [kind for kind in cls.__mro__ if method in vars(kind)]
    if not defined:  # the class that declares them is being made
        return
    first = getattr(defined[-1], method)
    for name in others:
        found = [kind for kind in cls.__mro__ if name in vars(kind)]
        belongs = getattr(found[0], method, first)
        if belongs is not first and belongs is not getattr(cls, method):
            setattr(cls, name, vars(found[-1])[name])


def is_regards_own(kind: type) -> bool:
    """Whether a class comes with regard, and is none that a person wrote.

    >>> is_regards_own(Value), is_regards_own(int)
    (True, False)
    """
    return kind.__module__.startswith("regard.")


def calls_functions_of_others(item: Any) -> bool:
    """Whether what a value computes may follow from code that is not regard's: a class of others, or a function."""
    left: list[Any] = [item]
    while left:
        item = left.pop()
        if isinstance(item, Value) and not is_regards_own(type(item)):
            return True
        if isinstance(item, tuple):
            left += item
        elif isinstance(item, Value):
            left += _items(item)
        elif callable(item):
            return True
    return False


def written(kind: type) -> str:
    """How a value of a class is written: Causal(), or Prefix(...) where something has to be said.

    >>> from regard.masks.positional import Causal, Prefix
    >>> written(Causal), written(Prefix)
    ('Causal()', 'Prefix(...)')
    """
    parameters = inspect.signature(kind).parameters.values()
    required = any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    return f"{kind.__name__}({'...' if required else ''})"


def names(kind: type) -> tuple[str, ...]:
    """The fields of a class of values, in order."""
    found = NAMES.get(kind)
    if found is None:  # dataclasses.fields looks through all of them each time
        found = NAMES[kind] = tuple(f.name for f in fields(kind))
    return found


NAMES: dict[type, tuple[str, ...]] = {}  # of the classes that were asked for


def number_key(number: Any) -> Any:
    """A number as a key of a cache, which says its type and its bits: 0.0 is not -0.0, and NaN is NaN.

    >>> number_key(-0.0) == number_key(0.0), number_key(float("nan")) == number_key(float("nan"))
    (False, True)
    """
    return type(number), struct.pack("=d", number) if type(number) is float else number


def described(value: Value) -> str:
    """The fields of a value that are no defaults, a tensor's with its least and largest number.

    >>> from regard.scores.modifiers import Alibi
    >>> described(Alibi(torch.tensor([0.5, 0.25])))
    'slopes = float32[2], 0.25 to 0.5'
    """
    return "; ".join(f"{name} = {_show(item)}{_range(item)}" for name, item in _given(value))


def _given(value: Value) -> Iterator[tuple[str, Any]]:
    """The fields that are not the default."""
    pairs = ((f, getattr(value, f.name)) for f in fields(value))  # type: ignore[arg-type]
    return ((f.name, item) for f, item in pairs if not _same(item, f.default))


def _range(item: Any) -> str:
    if not isinstance(item, Tensor) or not item.dim() or not item.numel() or item.dtype.is_complex:
        return ""
    if item.dtype == torch.bool:
        return f", {int(item.sum()):,} of {item.numel():,} true"
    return ", {:.3g} to {:.3g}".format(*(bound.item() for bound in item.detach().aminmax()))


def _items(value: Value) -> list[Any]:
    known = None if torch.compiler.is_compiling() else NAMES.get(type(value))
    return [getattr(value, name) for name in (fields_of(value) if known is None else known)]


def fields_of(value: Value) -> tuple[str, ...]:
    """The fields of a value, in order, in a graph too."""
    if torch.compiler.is_compiling():  # dynamo follows `fields` of an instance, not of a class
        return tuple(f.name for f in fields(value))  # type: ignore[arg-type]
    return names(type(value))


def attributes_of(value: Value) -> Mapping[str, Any]:
    """What was set on a value: its fields, and what its class may set besides; none of a class with __slots__."""
    return getattr(value, "__dict__", {})


def with_shapes(name: str, held: Mapping[str, Any]) -> str:
    """A class and its fields in a line: dtype and shape of each tensor; fields that are None are left out.

    >>> with_shapes("Pair", {"x": torch.zeros(2, 3), "y": None})
    'Pair(x=float32[2, 3])'
    """
    return f"{name}({', '.join(f'{field}={_show(item)}' for field, item in held.items() if item is not None)})"


def _exchange(item: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(item, Tensor):
        return next(tensors)
    if isinstance(item, tuple):
        return tuple([_exchange(part, tensors) for part in item])  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(item, Value) or not item.tensors():
        return item
    twin = copy.copy(item)
    for name in fields_of(item):
        # The class is frozen and already validated: the exchanged tensors stand for the same quantities.
        object.__setattr__(twin, name, _exchange(getattr(item, name), tensors))
    return twin


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))  # pyright: ignore[reportUnknownArgumentType]
    return type(a) is type(b) and bool(a == b)


def _key(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.dtype, tuple(item.shape)
    if isinstance(item, tuple):
        return tuple(_key(part) for part in item)  # pyright: ignore[reportUnknownVariableType]
    return item


def _show(item: Any) -> str:
    if isinstance(item, Tensor) and item.dim():
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    if isinstance(item, tuple):
        shown = [_show(part) for part in item]  # pyright: ignore[reportUnknownVariableType]
        return f"({', '.join(shown)}{',' * (len(shown) == 1)})"
    if isinstance(item, nn.Module):
        return type(item).__name__
    return item.__name__ if isinstance(item, FunctionType) else repr(item)
