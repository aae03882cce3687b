"""Tensors indexed by the indices of one pair, which are tensors without axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PairIndexing(TorchFunctionMode):
    """While it is open, t[h, i - j] with such indices is an operation of torch, recorded, batched and differentiated as
    any other; otherwise Python would read the numbers of the indices.

    >>> with PairIndexing():
    ...     torch.vmap(lambda i: torch.arange(10)[i])(torch.tensor([3, 5]))
    tensor([3, 5])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            given = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
            if any(isinstance(one, Tensor) for one in given) and all(_is_index(one) for one in given):
                index = [_tensor(one, args[0]) for one in given]
                return torch.ops.aten.index.Tensor(args[0], index)
        return func(*args, **(kwargs or {}))


def _is_index(x: Any) -> bool:
    return isinstance(x, Tensor) or type(x) is int


def _tensor(x: Tensor | int, of: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64, device=of.device)
