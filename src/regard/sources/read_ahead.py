"""ReadAhead: a thread that reads the next parts while the caller computes with the last one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any

import torch

from regard.sources.source import Part, named_errors

Loaded = tuple[Part, Any, Any]  # a part, its keys, its values


class ReadAhead:
    """Parts that a thread reads, at most `ahead` of them besides the one in use; with 0 the caller's thread reads.

    A context manager that is iterated once. When its block ends, also by an error, the thread has ended and `parts` is
    closed. An error that `parts` or a read raises is raised by the iteration. name: what messages call the source.
    recorded: the grad mode in which the thread reads, since each thread has one of its own.

    >>> part = Part(0, 2, torch.arange(2), lambda: (torch.zeros(2, 4), torch.ones(2, 3)))
    >>> with ReadAhead((p for p in [part]), 2, "of an example") as read:
    ...     [k.shape for part, k, v in read]
    [torch.Size([2, 4])]
    """

    def __init__(self, parts: Generator[Part, None, None], ahead: int, name: str, recorded: bool = False) -> None:
        self._parts, self._ahead, self._name, self._recorded = parts, ahead, name, recorded
        self._ready: deque[Loaded] = deque()
        self._changed = threading.Condition()
        self._stopped = self._done = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="regard-read-ahead", daemon=True) if ahead else None

    def __enter__(self) -> ReadAhead:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            self._parts.close()
            return
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __iter__(self) -> Iterator[Loaded]:
        if self._thread is None:
            yield from self._read()
            return
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._done)
                if not self._ready:
                    break
                loaded = self._ready.popleft()
                self._changed.notify_all()
            yield loaded
            del loaded
        if self._error is not None:
            raise self._error

    def _read(self) -> Iterator[Loaded]:
        while True:
            with torch.set_grad_enabled(self._recorded):
                part = next(self._parts, None)
                if part is None:
                    return
                with named_errors(f"keys {part.first} to {part.first + part.count - 1} of the source {self._name}"):
                    k, v = part.read()
            yield part, k, v
            del k, v

    def _room(self) -> bool:
        """Waits until one more part may be read; False where no more are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._ahead)
            return not self._stopped

    def _run(self) -> None:
        try:
            with closing(self._parts):
                read = self._read()
                while self._room():
                    loaded = next(read, None)
                    if loaded is None:
                        break
                    with self._changed:
                        self._ready.append(loaded)
                        self._changed.notify_all()
                    del loaded
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._done = True
                if self._stopped:
                    self._ready.clear()
                self._changed.notify_all()
