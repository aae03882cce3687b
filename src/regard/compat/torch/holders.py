"""Where functions of torch stand under names of their own: in modules that have imported them."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from regard.core.tracing import loaded

_WITHOUT = ("torch", "regard", "__main__")  # what the packages call is known


class Holder(NamedTuple):
    """A module's name for a function."""

    module: ModuleType
    name: str
    function: str


class _Search(NamedTuple):
    """What was found, and what there was then."""

    modules: list[Any]
    names: list[dict[str, Any]]  # of each module
    sizes: list[int]  # how many names
    references: list[int] | None  # to each function, where no stand-ins had their places
    found: list[Holder]


class Holders:
    """The names that loaded modules have for some functions, or for what stands in for them.

    A search of all names of 4,000 modules takes 20 ms, so a search is repeated only if something may have changed: the
    list of modules, how many names one has, a name that was found, or the number of references to a function, which
    changes where an old name is bound to it. `__main__`, where people bind names anew, is searched each time.

    functions: by name. stand_ins: what a patch puts in their places, by the same names.

    >>> import math, types
    >>> room = types.ModuleType("room")
    >>> sys.modules["room"], room.root = room, math.sqrt
    >>> holders = Holders({"sqrt": math.sqrt}, {}).find(patched=False)
    >>> [(each.name, each.function) for each in holders if each.module is room]
    [('root', 'sqrt')]
    >>> del sys.modules["room"]
    """

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], stand_ins: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._functions = tuple(functions.values())
        self._names = {id(function): name for name, function in (*functions.items(), *stand_ins.items())}
        self._last = _Search([], [], [], None, [])

    def find(self, *, patched: bool) -> list[Holder]:
        """All of them, as they are now. patched: whether stand-ins have the functions' places at this moment."""
        modules: list[Any] = list(sys.modules.values())
        references = None if patched else [sys.getrefcount(function) for function in self._functions]
        last = self._last
        if not self._is_as_before(last, modules, references):
            names = [vars(m) for m in modules if isinstance(m, ModuleType)]
            last = self._last = _Search(modules, names, list(map(len, names)), references, self._everywhere())
        main = loaded("__main__")
        return [*last.found, *(() if main is None else self._of(main))]

    def _is_as_before(self, last: _Search, modules: list[Any], references: list[int] | None) -> bool:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return False  # references are not counted exactly then
        return (
            references in (None, last.references)
            and len(modules) == len(last.modules)
            and all(map(operator.is_, modules, last.modules))
            and list(map(len, last.names)) == last.sizes
            and all(self._names.get(id(vars(m).get(name))) == function for m, name, function in last.found)
        )

    def _everywhere(self) -> list[Holder]:
        """The names of all modules but `__main__`."""
        searched = [m for path, m in list(sys.modules.items()) if path.partition(".")[0] not in _WITHOUT]
        return [holder for module in searched for holder in self._of(module)]

    def _of(self, module: ModuleType) -> list[Holder]:
        if type(module) is not ModuleType:
            return []
        names, held = self._names, list(vars(module).items())
        return [Holder(module, name, names[id(value)]) for name, value in held if id(value) in names]
