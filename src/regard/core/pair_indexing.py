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
            if any(isinstance(one, Tensor) for one in given) and all(map(_is_index, given)):
                return torch.ops.aten.index.Tensor(args[0], _indices(given, args[0]))
        return func(*args, **(kwargs or {}))


def _is_index(x: Any) -> bool:
    if isinstance(x, slice):
        return x.start is x.stop is x.step is None
    return isinstance(x, Tensor) or type(x) is int or x is Ellipsis


def _indices(given: list[Any], of: Tensor) -> list[Tensor | None]:
    """Tensors; None for an axis that is not indexed, as t[:, i] and t[..., i] leave some."""
    found: list[Tensor | None] = []
    for x in given:
        if x is Ellipsis:
            found += [None] * (of.dim() - len(given) + 1)
        elif isinstance(x, slice):
            found.append(None)
        else:
            found.append(x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64, device=of.device))
    return found
