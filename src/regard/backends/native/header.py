"""The C header of the kernels' structs: `python -m regard.backends.native.header native/abi/structs.h` writes it."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from regard.backends.native.abi import ABI, CONSTANTS, ENUMS, SIZES
from regard.backends.native.c_structs import STRUCTS
from regard.backends.native.call_operands import OPERANDS


def header() -> str:
    """The C header of all structs."""
    return f"""// Written by src/regard/backends/native/header.py, which tells how to write it again. Do not edit.
#pragma once
#include <stdint.h>

#define REGARD_ABI {ABI:#x}  // what regard_abi() of a shared object answers, for Python to compare

extern "C" {{

{_structs()}

{_not_ragged()}

{_parted()}

typedef void (*regard_body)(int64_t begin, int64_t end, void* context);
typedef int32_t (*regard_parallel)(int64_t begin, int64_t end, int64_t grain, regard_body body, void* context);
}}
"""


def _structs() -> str:
    parts = [_enum(values) for values in (*ENUMS, SIZES)]
    parts.append("\n".join(f"constexpr {kind} {name} = {value!r};" for name, (kind, value) in CONSTANTS.items()))
    for name, struct in STRUCTS.items():
        body = "\n".join(map(str, struct.members))
        size = f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "ctypes lays {name} out in another way");'
        parts.append(f"// {struct.about}\ntypedef struct {{\n{body}\n}} {name};\n{size}")
    return "\n\n".join(parts)


def _enum(values: dict[str, int]) -> str:
    return "enum {\n" + "".join(f"  {name} = {value},\n" for name, value in values.items()) + "};"


def _not_ragged() -> str:
    """A function of C from the operands that are not declared as ragged, so that a new one is refused until it is."""
    found = [operand.given for operand in OPERANDS.values() if not operand.ragged]
    lines = "".join(f" ||\n         {given}" for given in found[1:])
    return (
        "// Whether a call has an operand that sequences of any lengths cannot share.\n"
        f"static inline int32_t regard_not_ragged(const regard_call* c) {{\n  return {found[0]}{lines};\n}}"
    )


def _parted() -> str:
    """A function of C that leads to the operands of which each sequence of a ragged call has a part."""
    found = [operand.name for operand in OPERANDS.values() if operand.parted]
    lines = "".join(f"    &c->{name},\n" for name in found)
    return (
        "// The n-th of the operands of which each sequence of a ragged call has a part; null after the last.\n"
        "static inline regard_tensor* regard_parted(regard_call* c, int n) {\n"
        f"  regard_tensor* const all[] = {{\n{lines}  }};\n"
        f"  return n < {len(found)} ? all[n] : nullptr;\n}}"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(header())
