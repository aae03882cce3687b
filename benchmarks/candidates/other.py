"""regard as another checkout has it: its process finds that one first (--against)."""

from __future__ import annotations

from benchmarks.candidates.regard import start, ways

__all__ = ["start", "ways"]
