"""The ends of scales, where a diverged model may have computed NaN."""

from __future__ import annotations

from torch import Tensor


def largest_finite(*values: Tensor) -> float:
    """The largest of the numbers that are finite; 0 where none is above.

    >>> import torch
    >>> largest_finite(torch.tensor([2.0, torch.nan]), torch.tensor([])), largest_finite(torch.tensor([torch.inf]))
    (2.0, 0.0)
    """
    return max([0.0, *(float(t.nan_to_num(0, posinf=0, neginf=0).max()) for t in values if t.numel())])
