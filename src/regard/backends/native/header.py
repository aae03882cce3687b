"""Writes the C headers of the kernels' structs and modifiers: `python -m regard.backends.native.header native/abi`."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from regard.backends.native.abi import ABI, CONSTANTS, ENUMS, SIZES
from regard.backends.native.c_structs import STRUCTS
from regard.backends.native.call_operands import OPERANDS
from regard.backends.native.modifiers.program import Programs
from regard.backends.native.modifiers.table import MODIFIERS, STEPS

_WRITTEN = "// Written by src/regard/backends/native/header.py, which tells how to write it again. Do not edit."


def headers() -> dict[str, str]:
    """The files of native/abi/: their text by their names."""
    return {"structs.h": _structs_header(), "modifiers.h": _modifiers_header()}


def _structs_header() -> str:
    return f"""{_WRITTEN}
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


def _modifiers_header() -> str:
    """The list of the modifiers in C++: in the order of the table; those that may come last; the program for others."""
    steps = [*(one.step for one in STEPS), *(one.last_step for one in STEPS if one.last_step), Programs.step]
    listed = ",\n".join(f"    {step}" for step in steps)
    includes = "\n".join(f'#include "steps/{name}"' for name in sorted({one.header for one in MODIFIERS}))
    return f"""{_WRITTEN}
#pragma once
{includes}

namespace regard {{

// The modifiers of the kernels in the order in which they are applied: that of STEPS in modifiers/table.py.
using Modifiers = ModifierList<
{listed}>;

}}  // namespace regard
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
    for name, text in headers().items():
        (Path(sys.argv[1]) / name).write_text(text)
