"""What the tests of the native kernels share."""

from __future__ import annotations

from dataclasses import replace

import torch

from regard import testing


def redrawn(case: testing.Case) -> tuple[testing.Case, ...]:
    """The case three times more, where a gradient of it is a handful of numbers."""
    few = any(t.numel() <= 8 for t in (*case.score.tensors(), *(() if case.sink is None else (case.sink,))))
    return tuple(
        replace(case, q=torch.randn_like(case.q), k=torch.randn_like(case.k), v=torch.randn_like(case.v))
        for _ in range(3 if few else 0)
    )
