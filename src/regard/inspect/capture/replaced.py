"""replaced: an attribute of another library, replaced while a `with` block is open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.Lock()
_NEEDED: dict[tuple[int, str], tuple[int, Any]] = {}
_INHERITED: Any = object()


@contextmanager
def replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Generator[None, None, None]:
    """While it is open, `owner.name` is by(what it was). Several may be open, on many threads: the last one restores.

    >>> import types
    >>> room = types.SimpleNamespace(size=3)
    >>> with replaced(room, "size", lambda was: was + 1), replaced(room, "size", lambda was: was + 1):
    ...     room.size
    4
    >>> room.size
    3
    """
    key = (id(owner), name)
    with _LOCK:
        count, was = _NEEDED.get(key, (0, None))
        if count == 0:
            was = getattr(owner, name) if name in vars(owner) else _INHERITED
            setattr(owner, name, by(getattr(owner, name)))
        _NEEDED[key] = (count + 1, was)
    try:
        yield
    finally:
        with _LOCK:
            count, was = _NEEDED.pop(key)
            if count > 1:
                _NEEDED[key] = (count - 1, was)
            elif was is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, was)
