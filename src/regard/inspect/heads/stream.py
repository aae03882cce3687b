"""The residual stream: which layers' outputs reach the last norm as they are, added and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.core.dispatch_mode import DispatchMode

aten = torch.ops.aten
_COPIES = {aten.clone.default, aten._to_copy.default, aten.contiguous.default}


class Stream(DispatchMode):
    """While it is open, tensors that are sums with what was `put` in are known, with all that was put in them.

    A view of such a tensor is one, and so are a copy of the same dtype and a sum with another tensor of the same shape.
    Whatever else is made of it (scaled, normed) is none. What is known is kept alive, so that no memory is taken twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, frozenset[int]]] = {}

    def put(self, t: Tensor, number: int) -> None:
        """Lets t stand for itself, under a number."""
        self._known[_storage(t)] = (t, frozenset((number,)))

    def parts(self, t: Tensor) -> frozenset[int]:
        """The numbers of what t is a sum of; there may be other summands. Empty where nothing is known."""
        return self._known.get(_storage(t), (t, frozenset[int]()))[1]

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in args if isinstance(t, Tensor)]
        written = function._schema.is_mutable and tensors
        if function in (aten.add.Tensor, aten.add_.Tensor) and len(tensors) == 2 and not kwargs:
            a, b = tensors
            parts = self.parts(a) | self.parts(b)
            if a.shape == b.shape and a.dtype == b.dtype and parts:
                self._known[_storage(out)] = (out, parts)
                return out
        if written:
            self._known.pop(_storage(tensors[0]), None)
        elif function in _COPIES and tensors and out.dtype == tensors[0].dtype and self.parts(tensors[0]):
            self._known[_storage(out)] = (out, self.parts(tensors[0]))
        return out


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
