"""The struct of a call without what differs from call to call: from it a plan makes the structs of other calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from struct import Struct as Packer
from typing import Any

from torch import Tensor

from regard.backends.native.abi import LEAVES
from regard.backends.native.c_structs import Struct, address_of
from regard.backends.native.ffi import library, parallel

_ADDRESS = Packer("=q")


@dataclass(frozen=True, eq=False)
class CallTemplate:
    """What the calls of a structure share.

    struct  what their kernel reads; it begins with a regard_call
    held    the tensors that it leads to, which were made for the structure
    leaves  the caller's tensors that the kernel reads where they lie: the offset of the address in the struct, and
            which of a call's leaves it is
    entry   the kernel
    """

    struct: Struct
    held: tuple[Tensor, ...]
    leaves: tuple[tuple[int, int], ...]
    entry: Callable[..., int]

    @staticmethod
    def of(struct: Struct, held: tuple[Tensor, ...], offsets: Iterable[int], leaves: Sequence[Tensor]) -> CallTemplate:
        """From the struct of one call, which has addresses of that call's leaves at some of the offsets."""
        addresses = [t.data_ptr() for t in leaves]
        found = [(at, _ADDRESS.unpack_from(struct, at)[0]) for at in offsets]
        lead = tuple((at, addresses.index(address)) for at, address in found if address in addresses)
        return CallTemplate(type(struct).from_buffer_copy(struct), held, lead, library().entry(type(struct)))

    def copy(self) -> Struct:
        """For another call."""
        struct = type(self.struct).from_buffer_copy(self.struct)
        struct.held = self.held
        return struct

    def set_leaves(self, struct: Struct, leaves: Sequence[Tensor]) -> None:
        """Tells a call's struct where that call's leaves lie."""
        for at, n in self.leaves:
            _ADDRESS.pack_into(struct, at, address_of(leaves[n]))

    def leaf_members(self) -> dict[str, Any]:
        """abi.LEAF_MEMBERS: as many of the leaves as they have room for."""
        read, of = self.leaves[:LEAVES], ctypes.c_int64 * LEAVES
        return {"leaves": len(read), "leaf": of(*(n for _, n in read)), "leaf_at": of(*(at for at, _ in read))}


def members_of_entry(entry: Callable[..., int]) -> dict[str, Any]:
    """A kernel, as a plan's struct has it."""
    return {"entry": ctypes.cast(entry, ctypes.c_void_p).value, "parallel": parallel()}  # pyright: ignore[reportArgumentType]
