"""Arrays in, the same kind out: NumPy and other DLPack arrays on the CPU, taken without a copy where torch can."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def tensor(x: Any, name: str) -> Tensor:
    """x as a tensor over the same memory; TypeError, naming the argument, if it is no array."""
    if isinstance(x, Tensor):
        return x.resolve_neg()  # of a lazily negated view (x.conj().imag) the memory holds the opposite
    if _is_numpy(x):
        return _from_numpy(x, name)
    if hasattr(x, "__dlpack__"):
        return torch.from_dlpack(x)
    raise TypeError(
        f"{name} is a {type(x).__name__}; expected a torch tensor or an array (NumPy, or any with __dlpack__)."
    )


def answer_like(x: Any) -> Callable[[Tensor], Any]:
    """How to turn a result into the kind of array that x is."""
    if isinstance(x, Tensor):
        return lambda out: out
    if _is_numpy(x):
        return lambda out: out.detach().numpy()
    return lambda out: x.__array_namespace__().from_dlpack(out.detach())


def _is_numpy(x: Any) -> bool:
    numpy = sys.modules.get("numpy")  # whoever holds an array of it has loaded it
    return numpy is not None and isinstance(x, (numpy.ndarray, numpy.generic))


def _from_numpy(x: Any, name: str) -> Tensor:
    import numpy as np

    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be lost; pass its data, and the mask as mask=Dense(...)."
        )
    if any(stride < 0 or stride % x.itemsize for stride in x.strides) or not x.flags.aligned or not x.dtype.isnative:
        x = np.array(
            x, dtype=x.dtype.newbyteorder("=")
        )  # torch has no such strides or byte orders: the one case of a copy
    if not x.flags.writeable:
        x = np.asarray(_Writeable(x))  # never written: regard does not write to its inputs
    try:
        return torch.from_numpy(x)
    except TypeError as error:
        raise TypeError(f"{name} has NumPy dtype {x.dtype}, which torch does not know.") from error


class _Writeable:
    """The same memory, without NumPy's read-only flag, about which torch warns."""

    def __init__(self, x: Any) -> None:
        self._x = x  # keeps the memory alive
        self.__array_interface__ = {**x.__array_interface__, "data": (x.__array_interface__["data"][0], False)}
