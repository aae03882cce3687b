"""The one place where tensors become what a struct of the kernels leads to: their addresses and how they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from regard.backends.native.abi import OperandPlace
from regard.backends.native.c_structs import Struct
from regard.backends.native.direct import direct
from regard.backends.native.ffi import OPERAND_CODES

_REFERENCED = {  # dtypes of what members that are pointers lead to
    "float*": torch.float32,
    "int32_t*": torch.int32,
    "int64_t*": torch.int64,
    "uint64_t*": torch.int64,
}


def bind(struct: Struct, tensors: Mapping[str, Tensor | None], axes: int = 0) -> None:
    """Fills the members of a struct that belong to tensors, by name; None: the call has no such tensor.

    The struct keeps the tensors. A pointer takes a contiguous tensor of its dtype, a regard_tensor any. axes: how many
    the tensor of a regard_tensor has, heads included, so that one of an axis less has no heads; 0: it has its own.
    """
    given = [t if type(t) is Tensor or t is None else t.as_subclass(Tensor) for t in tensors.values()]
    done = direct().set_operands(ctypes.addressof(struct), axes, places(type(struct), tuple(tensors)), *given)
    if done < len(given):
        name, t = list(tensors.items())[done]
        assert t is not None
        raise ValueError(
            f"the native kernels cannot read {name}, a {type(t).__name__} {tuple(t.shape)} of {t.dtype} with strides "
            f"{t.stride()} on {t.device}: its storage was freed, it holds its numbers elsewhere, or "
            f"{struct.c_name}.{name} leads to other numbers."
        )
    struct.held += tuple([t for t in given if t is not None])


@cache
def places(struct: type[Struct], names: tuple[str, ...]) -> bytes:
    """Where a struct holds what it says of each tensor, as native/python/ reads it: a regard_place each."""
    return b"".join([_place(struct, name) for name in names])


def _place(struct: type[Struct], name: str) -> bytes:
    kind = next(member.type for member in struct.members if member.name == name)
    dtype = -1 if kind == "regard_tensor" else OPERAND_CODES[_REFERENCED[kind.removeprefix("const ")]]
    stride, batch = (struct.offsets.get(f"{name}_{what}", -1) for what in ("stride", "batch"))
    return bytes(OperandPlace(struct.offsets[name], dtype, stride, batch))
