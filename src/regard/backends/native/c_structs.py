"""Structs that Python fills and C++ reads, described member by member: what abi.py writes its table with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

AXES = 4  # batch axes that a call can have
TILE = 128  # keys whose weighted values are summed before they are added to a row's
SATURATED = 3.4027e38  # a score of this size or more, in base 2, stands for all larger ones
_NUMBERS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}


def address_of(t: Tensor) -> int:
    """Where the numbers of a tensor lie. ValueError where it has numbers and no memory: null would mean no operand."""
    at = t.data_ptr()
    if not at and t.numel():
        raise ValueError(
            f"a {type(t).__name__} {tuple(t.shape)} has no memory that the native kernels could read: its storage was "
            "freed, or it holds its numbers elsewhere."
        )
    return at


@dataclass(frozen=True)
class Member:
    """One member of a struct. type: as C writes it, a number, a pointer or an earlier struct; count: of an array."""

    type: str
    name: str
    about: str = ""
    count: int = 0

    @property
    def ctype(self) -> Any:
        one = ctypes.c_void_p if self.type.endswith("*") else (_NUMBERS.get(self.type) or STRUCTS[self.type])
        return one * self.count if self.count else one

    def __str__(self) -> str:
        array = f"[{self.count}]" if self.count else ""
        return f"  {self.type} {self.name}{array};" + (f"  // {self.about}" if self.about else "")


def members(type: str, names: str, about: str = "", count: int = 0) -> tuple[Member, ...]:
    """A member for each name."""
    return tuple(Member(type, name, about, count) for name in names.split())


STRUCTS: dict[str, Any] = {}  # by their names in C


class Struct(ctypes.Structure):
    """A struct of the kernels.

    offsets  of its members, in bytes
    held     the tensors that it leads to, which live as long as it does; those too that a struct in it holds
    """

    c_name: ClassVar[str]
    function: ClassVar[str] = ""  # the function of the kernels that is given one
    about: ClassVar[str]
    members: ClassVar[tuple[Member, ...]]
    offsets: ClassVar[dict[str, int]]
    held: tuple[Tensor, ...] = ()  # also of a struct that is made of bytes, or in the memory of another

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for part in (*given, *named.values()):
            self.held += getattr(part, "held", ())


S = TypeVar("S", bound=Struct)


def laid_out(struct: type[S]) -> type[S]:
    """The struct with its members, known by its name in C."""
    struct._fields_ = [(member.name, member.ctype) for member in struct.members]
    struct.offsets = {member.name: getattr(struct, member.name).offset for member in struct.members}
    STRUCTS[struct.c_name] = struct
    return struct
