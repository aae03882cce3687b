"""What to write for a score where something else was passed."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.core.value import Value, written


def way_to_score(x: Any) -> str | None:
    """What to write where x is passed for a score, or joined to one; None where nothing is known.

    >>> way_to_score(lambda s, b, h, i, j: s)
    'call regard.compat.torch.flex_attention for a score_mod; a similarity fn(q, k) is Custom(fn)'
    """
    if hasattr(x, "dtype"):
        return "numbers that are added to the scores are ScaledDot() >> Bias(tensor)"
    if isinstance(x, type):
        return f"write {written(x)}" if issubclass(x, Value) else None
    if isinstance(x, Value):
        return f"pass it as {x.argument}=" if x.argument not in ("", "score") else None
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return f"a factor is ScaledDot(scale), and Temperature({x}) divides the scores by {x}"
    if x is None:
        return "leave it out"
    if isinstance(x, nn.Module):
        return "a module that makes a score is called: score=module(); a similarity fn(q, k) is Custom(fn)"
    if callable(x):
        return "call regard.compat.torch.flex_attention for a score_mod; a similarity fn(q, k) is Custom(fn)"
    return None
