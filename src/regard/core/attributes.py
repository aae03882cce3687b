"""What the code of a function reads: names outside of it, and attributes of objects; and what these are."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as torch_module

_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR")
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "DELETE_FAST", "DELETE_DEREF")
_NOTHING = ("EXTENDED_ARG", "CACHE", "NOP")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


SETTLED = frozenset(("builtins", "math", "regard", "torch", "typing"))  # packages in which nobody changes a number
_READS_OUTSIDE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # the last in classes, from Python 3.12 on
_READ_ANY_NAME = ("eval", "exec", "globals", "locals", "vars")
_WRITERS = frozenset(
    ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update")
)


class Unknown(Exception):
    """A function reads what no key can hold."""


class Use(NamedTuple):
    """What a function does with an object: reads an attribute of it, or of that, and calls what it finds or not."""

    names: tuple[str, ...]
    called: bool


Uses = frozenset[Use]
CALLED: Uses = frozenset((Use((), called=True),))
BARE: Uses = frozenset((Use((), called=False),))  # anything may be read of what is handed on
Key = Callable[[Any, Uses], Hashable]
Copy = Callable[[Any, Uses], Any]


@lru_cache(4096)
def uses_of(code: CodeType, name: str) -> Uses:
    """What a function does with a variable of this name, whose value is an object. Raises Unknown where it writes.

    >>> def scaled(s, at):
    ...     return s * at.config.rate + at.bias(s)
    >>> sorted(uses_of(scaled.__code__, "at"))
    [Use(names=('bias',), called=True), Use(names=('config', 'rate'), called=False)]
    """
    found = set[Use]()
    for inner in codes(code):
        steps = [step for step in dis.get_instructions(inner) if step.opname not in _NOTHING]
        for n, step in enumerate(steps):
            named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if step.opname in ("STORE_ATTR", "DELETE_ATTR") or (step.opname.startswith(_STORES) and name in named):
                raise Unknown
            if step.opname.startswith(_LOADS) and name in named:
                found.add(_use(steps, n) if named[-1] == name and named.count(name) == 1 else Use((), called=False))
    return frozenset(found)


def _use(steps: list[dis.Instruction], n: int) -> Use:
    """What happens to a variable that the n-th step puts on the stack."""
    names = list[str]()
    for step in steps[n + 1 :]:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        names.append(step.argval)
        if step.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and (step.arg or 0) & 1):
            return Use(tuple(names), called=True)
    after = steps[n + 1 + len(names)].opname if n + 1 + len(names) < len(steps) else ""
    of_global = steps[n].opname == "LOAD_GLOBAL" and sys.version_info >= (3, 11) and (steps[n].arg or 0) & 1
    before = n > 0 and steps[n - 1].opname == "PUSH_NULL"
    return Use(tuple(names), called=not names and bool(of_global or before or after == "PUSH_NULL"))


@lru_cache(1024)
def names_read(code: CodeType) -> tuple[str, ...] | None:
    """The names outside of a function that it may read; None where it changes them, asks for all, or imports what may
    change."""
    found: dict[str, None] = {}
    for inner in codes(code):
        for step in dis.get_instructions(inner):
            changes = step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
            imports = step.opname == "IMPORT_NAME" and step.argval.partition(".")[0] not in SETTLED
            if changes or imports or step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                return None
            if step.opname in _READS_OUTSIDE:
                if step.argval in _READ_ANY_NAME:
                    return None
                found[step.argval] = None
    return tuple(found)


@lru_cache(1024)
def writes(code: CodeType) -> bool:
    """Whether a function may write into a list or a dictionary."""
    return any(
        step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
        or (step.opname in ("LOAD_METHOD", "LOAD_ATTR") and step.argval in _WRITERS)
        for inner in codes(code)
        for step in dis.get_instructions(inner)
    )


def codes(code: CodeType) -> list[CodeType]:
    """The code of a function and of those inside of it."""
    return [code, *(inner for x in code.co_consts if isinstance(x, CodeType) for inner in codes(x))]


def as_method(x: Any) -> MethodType:
    """What is called where an object is: its __call__, or a module's forward. Raises Unknown."""
    kind: type = type(x)
    if isinstance(x, Module):
        if has_hooks(x) or hooks_of_all() or kind.__call__ is not Module.__call__:
            raise Unknown
        function: Any = kind.forward
    else:
        function = _of_class(kind, "__call__")
    if type(function) is not FunctionType:
        raise Unknown
    return MethodType(function, x)


def is_object(x: Any) -> bool:
    """Whether a value is an object whose attributes a function may read."""
    kind: type = type(x)
    return not isinstance(x, (Tensor, type, ModuleType)) and (kind.__dictoffset__ != 0 or "__slots__" in vars(kind))


def key_of_object(x: Any, uses: Uses, key: Key) -> Hashable:
    """An object by what is used of it. Raises Unknown."""
    if _is_torchs(x):
        return type(x), tuple([(name, _key_of_state(value, key)) for name, value in _state(x)])
    if uses == CALLED:
        return key(as_method(x), BARE)
    return type(x), tuple([(name, key(value, rest)) for name, value, rest in _used(x, uses)])


class Copier:
    """Objects with copies of what is used of them; each is copied once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by the id of an object, it and its copy

    def copied(self, x: Any, uses: Uses, copy: Copy) -> Any:
        """The copy of an object, which has what is used of it; of one that is called, the method. Raises Unknown."""
        if uses == CALLED and not _is_torchs(x):
            return copy(as_method(x), BARE)
        if id(x) not in self._known:
            self._known[id(x)] = x, object.__new__(type(x))
        twin = self._known[id(x)][1]
        if _is_torchs(x):
            vars(twin).update(vars(Module()), **{name: _copy_of_state(value, copy) for name, value in _state(x)})
            return twin
        for name, value, rest in _used(x, uses):
            own = copy(value, rest)
            try:
                object.__setattr__(twin, name, own)
            except AttributeError:  # of the class of an object with __slots__ alone
                raise Unknown from None
        return twin


def _used(x: Any, uses: Uses) -> Iterator[tuple[str, Any, Uses]]:
    """The attributes of an object that are used, by name, and what is done with each. Raises Unknown."""
    kind: type = type(x)
    if kind.__getattribute__ is not object.__getattribute__ or _of_class(kind, "__getattr__") not in _KNOWN_GETATTR:
        raise Unknown
    rest: dict[str, set[Use]] = {}
    for names, called in uses:
        if not names:  # it is handed on, or called too
            raise Unknown
        rest.setdefault(names[0], set()).add(Use(names[1:], called))
    for name in sorted(rest):
        yield name, _attribute(x, name), frozenset(rest[name])


def _attribute(x: Any, name: str) -> Any:
    """The value of an attribute. Raises Unknown where it is computed."""
    kind: type = type(x)
    known, state = _of_class(kind, name), vars(x) if kind.__dictoffset__ else {}
    if name.startswith("__"):
        raise Unknown
    if isinstance(known, MemberDescriptorType):  # of __slots__
        try:
            return getattr(x, name)
        except AttributeError:  # it has no value yet
            raise Unknown from None
    if _of_class(type(known), "__set__") is not None:  # a property too
        raise Unknown
    if name in state:
        return state[name]
    if isinstance(known, FunctionType):
        return MethodType(known, x)
    if known is not None:
        if _of_class(type(known), "__get__") is not None:
            raise Unknown
        return known
    for table in ("_parameters", "_buffers", "_modules"):
        if isinstance(x, Module) and name in state[table]:
            return state[table][name]
    raise Unknown


def _of_class(kind: type, name: str) -> Any:
    """What a class has under a name, as it stands there; None where nothing does."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


_KNOWN_GETATTR = (None, _of_class(Module, "__getattr__"))
_STATE = ("training", "_parameters", "_buffers", "_modules")


def _is_torchs(x: Any) -> bool:
    """Whether an object is a module whose class is torch's: nobody changes its code."""
    return isinstance(x, Module) and type(x).__module__.startswith("torch.nn.modules.")


def _state(x: Module) -> list[tuple[str, Any]]:
    """All that a module of torch reads. Raises Unknown for one with hooks, and for one that writes into its weights."""
    state, empty = vars(x), vars(Module())
    if has_hooks(x) or hooks_of_all() or state.get("max_norm") is not None:
        raise Unknown
    return [(name, value) for name, value in state.items() if name in _STATE or name not in empty]


def has_hooks(x: Module) -> bool:
    """Whether more than a module's class says what a call of it does, hooks on all modules aside."""
    state = vars(x)
    own = any(state.get(name) for name in _HOOKS) or "forward" in state or state.get("_compiled_call_impl")
    return bool(own)


def hooks_of_all() -> list[Any]:
    """The hooks on all modules."""
    return [hook for name in _GLOBAL_HOOKS for hook in getattr(torch_module, name).values()]


def _key_of_state(value: Any, key: Key) -> Hashable:
    if isinstance(value, dict):
        return tuple([(name, key(one, BARE)) for name, one in value.items()])
    return key(value, BARE)


def _copy_of_state(value: Any, copy: Copy) -> Any:
    return {name: copy(one, BARE) for name, one in value.items()} if isinstance(value, dict) else copy(value, BARE)
