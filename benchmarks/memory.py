"""How much memory a call takes: the growth of this process, at most, as Linux tells it."""

from __future__ import annotations

import ctypes
from pathlib import Path


class Memory:
    """Begins to watch when it is made.

    >>> memory, held = Memory(), bytes(1 << 20)
    >>> _ = memory.grown()
    """

    def __init__(self) -> None:
        try:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
            self._before: int | None = _kilobytes("VmRSS")
        except (OSError, AttributeError):
            self._before = None

    def grown(self) -> int | None:
        """Bytes by which the process was larger at most since then; None where the system does not say."""
        return None if self._before is None else max(0, _kilobytes("VmHWM") - self._before) * 1024


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
