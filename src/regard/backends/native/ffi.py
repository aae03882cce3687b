"""The kernels' shared objects: found, chosen for this processor, and called through ctypes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.core.errors import ShapeError

AXES = 4  # batch axes that a call can have; as in native/args.h
# Of the kernels: each is given the address of a struct, and torch's parallel-for.
ENTRIES = (
    *("regard_forward", "regard_backward", "regard_additive_forward", "regard_additive_backward"),
    "regard_facts",
)
# By how many addresses they take: a struct, torch's parallel-for, and tensors.
AGAIN = {
    **{"regard_again": 11, "regard_backward_again": 16},
    **{"regard_additive_again": 12, "regard_additive_backward_again": 18},
}
# From the most particular to the one that every processor of the kind runs.
ISAS = ("avx512bf16", "avx512", "avx2", "base")
_FOLDER = Path(__file__).parent.parent / "kernels"
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Operand(ctypes.Structure):
    """regard_tensor of native/args.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((f"batch_{n}", ctypes.c_int64) for n in range(AXES)),  # int64_t batch[AXES] there
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("col", ctypes.c_int64),
    )


class Struct(ctypes.Structure):
    """A struct that holds addresses of tensors. It keeps them, and those that a struct copied into it keeps."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.held: list[Tensor] = []
        for part in (*given, *named.values()):
            if isinstance(part, Struct):
                self.held += part.held

    def hold(self, t: Tensor) -> Tensor:
        """The same tensor, which lives as long as the struct."""
        self.held.append(t)
        return t


class Arguments(Struct):
    """regard_call of native/args.h."""

    _fields_ = (
        ("batch", ctypes.c_int64 * AXES),
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "nq", "nk", "dk", "dv")),
        *((name, ctypes.c_int32) for name in ("dtype", "bias_dtype", "out_dtype", "threads")),
        *((name, Operand) for name in ("q", "k", "v", "out", "lse")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("cap_last", ctypes.c_int32),
        ("caps", ctypes.c_void_p),
        ("cap_stride", ctypes.c_int64),
        *((name, Operand) for name in ("start", "stop", "bias", "allowed", "tiles")),
        ("bits", ctypes.c_void_p),
        ("bit_count", ctypes.c_int64),
        ("slopes", ctypes.c_void_p),
        ("slope_stride", ctypes.c_int64),
        ("points_of_q", ctypes.c_void_p),
        ("points_of_k", ctypes.c_void_p),
        ("dims", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("offset_stride", ctypes.c_int64),
        ("offset_count", ctypes.c_int64),
        ("q_cell", ctypes.c_void_p),
        ("k_cell", ctypes.c_void_p),
        ("q_cell_batch", ctypes.c_int64 * AXES),
        ("k_cell_batch", ctypes.c_int64 * AXES),
        ("q_at", ctypes.c_void_p),
        ("k_at", ctypes.c_void_p),
        ("q_at_batch", ctypes.c_int64 * AXES),
        ("k_at_batch", ctypes.c_int64 * AXES),
        ("seed", ctypes.c_uint64),
        ("threshold", ctypes.c_uint32),
        ("keep", ctypes.c_float),
        ("invariant", ctypes.c_int32),
        ("sink", Operand),
        ("norm", Operand),
    )


@dataclass(frozen=True, eq=False)
class Library:
    """One instruction set's kernels."""

    isa: str
    handle: ctypes.CDLL

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.handle.regard_queries(), self.handle.regard_keys()

    def again(self, entry: str) -> Callable[..., int]:
        """One of AGAIN: a call like one before, its tensors elsewhere; anything but 0 is for failure()."""
        return getattr(self.handle, entry)

    def run(self, entry: str, arguments: ctypes.Structure) -> None:
        """One of ENTRIES on torch's threads; raises what failure() says."""
        if code := getattr(self.handle, entry)(ctypes.byref(arguments), parallel()):
            raise failure(code)


# What is out of range, by what a kernel returns: REGARD_BAD_ARGUMENT of native/args.h and what follows.
_OUT_OF_RANGE = {
    2: "it takes no such size, dtype, stride or address. This is an error of regard: please report it.",
    3: "a query's interval of keys reaches beyond the keys. The numbers of a mask (such as Lengths.keys) must lie "
    "between 0 and the number of keys.",
    4: "a map of tiles names bits that are not there. This is an error of regard: please report it.",
    5: "the places of queries and keys differ by more than the buckets of the relative bias say "
    "(DifferenceBuckets.farthest).",
    6: "a group of keys has a number that is not below the number of groups (Mass.count).",
}


def failure(code: int) -> Exception:
    """What is raised where a kernel returns anything but 0: it has computed nothing."""
    if code in _OUT_OF_RANGE:
        return ShapeError(f"regard's native kernel refused a call: {_OUT_OF_RANGE[code]}")
    return MemoryError("regard's native kernel could not have its scratch memory; nothing was computed.")


@cache
def parallel() -> ctypes.c_void_p | None:
    """torch's own parallel-for, so that no second pool of threads disturbs it; None (one thread) where it has none."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            symbol = getattr(ctypes.CDLL(str(folder / name)), "torch_parallel_for", None)
            return ctypes.cast(symbol, ctypes.c_void_p) if symbol is not None else None
    return None


def built() -> dict[str, Path]:
    """The shared objects that were installed, by instruction set."""
    found = {isa: _FOLDER / f"libregard_{isa}.so" for isa in ISAS}
    return {isa: path for isa, path in found.items() if path.exists()}


@torch.compiler.assume_constant_result
def why_not_built() -> str:
    """Why there are no kernels, as a clause: what native/build.cmake wrote down."""
    note, log = _FOLDER / "why_not.txt", _FOLDER / "build.log"
    if not note.exists():
        return f"there is nothing in {_FOLDER}"
    return note.read_text().strip() + (f"; see {log}" if log.exists() else "")


@torch.compiler.assume_constant_result
def runnable() -> tuple[str, ...]:
    """The installed instruction sets that this processor runs, best first."""
    return _runnable()


@cache
def _runnable() -> tuple[str, ...]:
    paths = built()
    if "base" not in paths:
        return ()
    base = ctypes.CDLL(str(paths["base"]))
    return tuple(isa for isa in paths if base.regard_runs(isa.encode()))


@cache
def load(isa: str) -> Library:
    """The kernels of one instruction set, which must be runnable."""
    handle = ctypes.CDLL(str(built()[isa]))
    for name in ENTRIES:
        entry = getattr(handle, name)
        entry.argtypes, entry.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int32
    for name, count in AGAIN.items():
        entry = getattr(handle, name)
        entry.argtypes, entry.restype = (ctypes.c_void_p,) * count, ctypes.c_int32
    handle.regard_bandwidth.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    handle.regard_bandwidth.restype = ctypes.c_float
    for name in ("regard_queries", "regard_keys"):
        getattr(handle, name).restype = ctypes.c_int64
    return Library(isa, handle)


def chosen() -> str | None:
    """The best runnable instruction set, or the one that REGARD_ISA names; None if there are no kernels."""
    able, named = runnable(), os.environ.get("REGARD_ISA")
    if named is None or not able:
        return able[0] if able else None
    if named not in able:
        raise ValueError(f"REGARD_ISA={named}: this processor and installation run {', '.join(able)}.")
    return named
