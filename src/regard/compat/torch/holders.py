"""Where functions of torch stand under names of their own: in modules that have imported them."""

from __future__ import annotations

import operator
import sys
import sysconfig
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

_WITHOUT = ("torch", "regard")  # what these packages call is known
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


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
    own: list[Any]  # modules that are of no installed package
    found: list[Holder]  # in the others


class Holders:
    """The names that loaded modules have for some functions, or for what stands in for them.

    A search of all names of 4,000 modules takes 20 ms, so the modules of Python and of installed packages are searched
    again only if the list of modules, the number of a module's names, or a name that was found has changed. All others,
    `__main__` among them, are searched each time: there people bind old names anew.

    functions: by name. stand_ins: what a patch puts in their places, by the same names.

    >>> import math, types
    >>> room = types.ModuleType("room")
    >>> sys.modules["room"], room.root = room, math.sqrt
    >>> [(each.name, each.function) for each in Holders({"sqrt": math.sqrt}, {}).find() if each.module is room]
    [('root', 'sqrt')]
    >>> del sys.modules["room"]
    """

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], stand_ins: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._names = {id(function): name for name, function in (*functions.items(), *stand_ins.items())}
        self._last = _Search([], [], [], [], [])

    def find(self) -> list[Holder]:
        """All of them, as they are now."""
        modules: list[Any] = list(sys.modules.values())
        last = self._last
        if not self._is_as_before(last, modules):
            last = self._last = self._search(modules)
        return [*last.found, *(holder for module in last.own for holder in self._of(module))]

    def _is_as_before(self, last: _Search, modules: list[Any]) -> bool:
        return (
            len(modules) == len(last.modules)
            and all(map(operator.is_, modules, last.modules))
            and list(map(len, last.names)) == last.sizes
            and all(self._names.get(id(vars(m).get(name))) == function for m, name, function in last.found)
        )

    def _search(self, modules: list[Any]) -> _Search:
        names = [vars(m) for m in modules if isinstance(m, ModuleType)]
        sizes = list(map(len, names))
        own, found = list[Any](), list[Holder]()
        for path, module in list(sys.modules.items()):
            if path.partition(".")[0] in _WITHOUT:
                continue
            if _is_installed(module):
                found += self._of(module)
            else:
                own.append(module)
        return _Search(modules, names, sizes, own, found)

    def _of(self, module: Any) -> list[Holder]:
        if type(module) is not ModuleType:
            return []
        names, held = self._names, list(vars(module).items())
        return [Holder(module, name, names[id(value)]) for name, value in held if id(value) in names]


def _is_installed(module: Any) -> bool:
    """Whether a module is of Python or of an installed package."""
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if spec is None or origin is None:
        return spec is not None and getattr(spec, "submodule_search_locations", None) is not None
    return origin in ("built-in", "frozen") or str(origin).startswith(_LIBRARIES)
