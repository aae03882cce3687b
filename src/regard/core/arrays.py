"""Arrays in, the same kind out: NumPy and other DLPack arrays on the CPU, taken without a copy where torch can."""

from __future__ import annotations

import operator
from collections.abc import Callable
from numbers import Integral
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from regard.core.deferred import DeferredRows
from regard.core.shapes import FARTHEST
from regard.core.tracing import data_unavailable, loaded, unwrapped_if_dead
from regard.core.wrong_calls import instead_of, kind_of


class SupportsDLPack(Protocol):
    """NumPy's arrays, and others that can hand over their memory."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...


Array = TypeVar("Array", bound=SupportsDLPack)


def tensor(x: Any, name: str) -> Tensor:
    """x as a tensor over the same memory; TypeError, naming the argument, if it is no array."""
    if isinstance(x, Tensor):
        if x.is_nested:
            raise TypeError(
                f"{name} is a nested tensor; regard.attention alone takes these, all of q, k and v with "
                "layout=torch.jagged. Elsewhere pass pack(x).values, and mask=pack(x).mask."
            )
        return in_memory(x.written_out() if isinstance(x, DeferredRows) else x, name)
    if is_numpy(x):
        return _from_numpy(x, name)
    if hasattr(x, "__dlpack__"):
        return torch.from_dlpack(x)
    raise TypeError(
        f"{name} is {kind_of(x)}; expected a torch tensor or an array (NumPy, or any with __dlpack__){_instead_of(x)}."
    )


def _instead_of(x: Any) -> str:
    """What to write for a list, or for what holds tensors."""
    if not isinstance(x, (list, tuple)):
        return instead_of(x)
    if any(isinstance(t, Tensor) for t in cast("list[Any]", x)):
        return ": write torch.stack(...), or p = pack(...) and p.values, p.mask for sequences of unequal lengths"
    return ": write torch.tensor(...)"


def any_nested(*tensors: Any) -> bool:
    """Whether one of them is a nested tensor of torch."""
    return any(isinstance(t, Tensor) and t.is_nested for t in tensors)


def of_numbers(x: Any, dtype: torch.dtype) -> Tensor:
    """A tensor as it is. Numbers, which have neither dtype nor device, in this dtype on the CPU."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device="cpu")


def plain_tensor(x: Any, name: str) -> Tensor:
    """`tensor`, for masks and what a score holds; TypeError also for a class that may give its numbers another meaning.

    Those of torch.nn.attention.bias.CausalBias mean nothing, of torch.masked.MaskedTensor some do. Such classes take
    part in torch's functions (`__torch_function__`); Parameters, and classes that change the operations below them
    (fake tensors, DTensors), do not. As q, k and v they are served: what they do with regard.attention is theirs to
    say.
    """
    kind: Any = type(x)
    if isinstance(x, Tensor) and kind is not Tensor and kind.__torch_function__ is not _NO_TORCH_FUNCTION:
        way = _WAYS.get(kind.__name__, "pass x.as_subclass(torch.Tensor) if it stands for these")
        raise TypeError(
            f"{name} is a {kind.__name__}, a subclass of torch.Tensor that may stand for something else than its "
            f"numbers; expected a torch.Tensor: {way}."
        )
    return tensor(x, name)


_NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage]
_WAYS = {
    "CausalBias": "as a mask of regard's it is Causal(), at head(nq, nk) for causal_upper_left and at tail(nq, nk) for "
    "causal_lower_right",
    "MaskedTensor": "pass x.get_data(), and x.get_mask() in mask=Dense(...)",
}


def in_memory(t: Tensor, name: str) -> Tensor:
    """The tensor with its numbers at its address; TypeError for layouts without strides."""
    if t.layout is not torch.strided:
        raise TypeError(f"{name} has the layout {t.layout}; expected a dense tensor, torch.strided: pass x.to_dense().")
    if t.is_quantized:
        raise TypeError(f"{name} is quantized, {t.dtype}; expected numbers as they are: pass x.dequantize().")
    if not torch.compiler.is_compiling():
        t = unwrapped_if_dead(t)
        if t._is_zerotensor():  # which autograd makes: zeros without memory
            return t.clone()
    return t.resolve_neg()  # of a lazily negated view (x.conj().imag) the memory holds the opposite


def integers(x: Any, name: str, of_booleans: str = "") -> Tensor:
    """x as int64; TypeError if it holds anything else. `of_booleans`: what the error advises if x holds booleans."""
    return as_int64(_of_integers(x, name, of_booleans), name)


def labels(x: Any, name: str, of_booleans: str = "") -> Tensor:
    """The same of integers that are only compared with each other for equality: a uint64 keeps its bits."""
    return _of_integers(x, name, of_booleans).long()


def _of_integers(x: Any, name: str, of_booleans: str) -> Tensor:
    t = plain_tensor(x, name)
    if t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool:
        hint = of_booleans if t.dtype == torch.bool else ""
        raise TypeError(f"{name} has dtype {t.dtype}; expected integers.{hint}")
    return t


def as_int64(t: Tensor, name: str) -> Tensor:
    """A tensor of integers as int64; ValueError for a uint64 of 2^63 or more, where it can be read."""
    found = t.long()
    if t.dtype == torch.uint64 and not data_unavailable(found) and bool((found < 0).any()):
        raise ValueError(
            f"{name} holds {2**64 + int(found[found < 0].max())}, a uint64; expected integers below 2^63: pass "
            "torch.int64, with torch.iinfo(torch.int64).max for a number beyond all others."
        )
    return found


def whole_number(x: Any, name: str) -> int:
    """x as an int, of whatever is one integer; TypeError, naming the argument, if it is anything else.

    >>> whole_number(torch.tensor(3), "length")
    3
    """
    try:
        return operator.index(x)
    except TypeError:
        came = kind_of(x) if isinstance(x, Tensor) and x.numel() > 1 else repr(x)
        raise TypeError(f"{name} is {came}; expected an integer.") from None


def size(x: Any, name: str, least: int = 0) -> int:
    """x as an int; TypeError, naming the argument, where it is no integer, ValueError where it is no possible size."""
    n = whole_number(x, name)
    if not least <= n < FARTHEST:
        raise ValueError(f"{name} is {n}; expected {f'{least} or more' if n < least else 'less than 2^62'}.")
    return n


def numbers(x: list[Any] | tuple[Any, ...], name: str) -> tuple[int, ...]:
    """The integers in a list; an error, naming the argument, if it holds anything else: TypeError, or ValueError for
    one of more than 64 bits."""
    kinds = set(map(type, x))
    if not kinds <= {int}:
        if bool not in kinds and all(isinstance(n, Integral) for n in x):
            return numbers([int(n) for n in x], name)
        raise TypeError(f"{name} is {x!r}; expected integers: a list of numbers, or a tensor.")
    far = [n for n in x if not -(2**63) <= n < 2**63]
    if far:
        raise ValueError(f"{name} holds {far[0]}; expected integers of 64 bits.")
    return tuple(x)


def indices(x: Any, name: str) -> Tensor:
    """x, an array or a list, as indices (r,), int64; TypeError if it is something else."""
    if isinstance(x, str):
        raise TypeError(f"{name} is a str; expected integers, (r,).")
    try:
        t = x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=None, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {kind_of(x)}; expected integers, (r,): a tensor, a list or a range.") from None
    t = t if t.numel() else t.long()  # [] has torch's default dtype
    if t.dim() != 1 or t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {t.dtype}, shape {tuple(t.shape)}; expected integers, (r,).")
    return as_int64(t, name)


def existing(index: Tensor, n: int, name: str, things: str) -> Tensor:
    """Indices of n things, counted from 0: negative ones count from the end. IndexError for one that does not exist."""
    if bool(((index < -n) | (index >= n)).any()):
        raise IndexError(f"{name} holds {index.tolist()}; there are {n} {things}.")
    return index % max(n, 1)


def answer_like(x: Any) -> Callable[[Tensor], Any]:
    """How to turn a result into the kind of array that x is."""
    if isinstance(x, Tensor):
        return lambda out: out
    if is_numpy(x):
        return lambda out: out.detach().numpy()
    return lambda out: x.__array_namespace__().from_dlpack(out.detach())


def is_numpy(x: Any) -> bool:
    """Whether x is an array, or a number, of NumPy's."""
    numpy = loaded("numpy")
    return numpy is not None and isinstance(x, (numpy.ndarray, numpy.generic))


def _from_numpy(x: Any, name: str) -> Tensor:
    import numpy as np

    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be lost; pass its data, and the mask as mask=Dense(...)."
        )
    x = np.asarray(x)  # a scalar (np.generic) has an address while it is asked for it only
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
