"""A mask as the kernels read it, held from a forward to its backward, so that it is lowered once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.backends.native.args import KernelArgs
from regard.backends.native.call_operands import NUMBERS, OF_MASK


def save_mask(lowered: KernelArgs) -> tuple[Tensor, ...]:
    """What lower_mask said, for saved_mask; nothing of a mask that takes more memory than queries and keys.

    Nor of a program, whose operands are modifiers' too.
    """
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    made = sum(t.nbytes for name, t in lowered.operands.items() if name in ("tiles", "bits"))
    if made > lowered.q.nbytes + lowered.k.nbytes or "mask_code" in lowered.operands:
        return (nothing,) * len(OF_MASK)
    found = [lowered.number(name) if name in NUMBERS else lowered.operands.get(name) for name in OF_MASK]
    return tuple(
        nothing if x is None else torch.tensor([x], dtype=torch.int64, device="cpu") if isinstance(x, int) else x
        for x in found
    )


def saved_mask(held: tuple[Tensor, ...]) -> dict[str, Any] | None:
    """What lower_mask said; None where nothing was held."""
    found = {name: t for name, t in zip(OF_MASK, held, strict=True) if t.numel()}
    return {name: int(t) if name in NUMBERS else t for name, t in found.items()} or None
