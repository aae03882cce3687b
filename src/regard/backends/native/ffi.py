"""The kernels' shared objects: found, chosen for this processor, and called through ctypes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import torch

import regard.backends.native.abi as abi
from regard.backends.native.c_structs import Struct
from regard.core.errors import ShapeError
from regard.core.tracing import constant_in_graphs

_FOLDER = Path(__file__).parent.parent / "kernels"
_ENDING = ".dll" if os.name == "nt" else ".so"
_PYTHON_CALLS = _FOLDER / f"regard_python{_ENDING}"
DTYPE_CODES = {
    torch.float32: abi.DTYPES["REGARD_F32"],
    torch.bfloat16: abi.DTYPES["REGARD_BF16"],
    torch.float16: abi.DTYPES["REGARD_F16"],
}
OPERAND_CODES = DTYPE_CODES | {
    torch.float64: abi.OPERAND_DTYPES["REGARD_F64"],
    torch.int32: abi.OPERAND_DTYPES["REGARD_I32"],
    torch.int64: abi.OPERAND_DTYPES["REGARD_I64"],
    torch.bool: abi.OPERAND_DTYPES["REGARD_BOOL"],
    torch.int8: abi.OPERAND_DTYPES["REGARD_I8"],
}


@dataclass(frozen=True, eq=False)
class Library:
    """One instruction set's kernels."""

    isa: str
    handle: ctypes.CDLL

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.handle.regard_queries(), self.handle.regard_keys()

    @cached_property
    def has_matrix_unit(self) -> bool:
        return self.handle.regard_matrix_parts(None) >= 0

    def matrix_parts(self, struct: Struct) -> int:
        """Of how many bfloat16 numbers a matrix unit multiplies each number in a forward; 0: vectors multiply."""
        return self.handle.regard_matrix_parts(ctypes.byref(struct))

    def count_tiles(self, struct: Struct) -> tuple[int, ...]:
        """What a forward does with its tiles: native/attention/tile_counts.h."""
        counts, count = (ctypes.c_int64 * 4)(), self.handle.regard_count_tiles
        count.argtypes, count.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int32
        if code := count(ctypes.addressof(struct), ctypes.addressof(counts)):
            raise failure(code)
        return tuple(counts)

    def entry(self, struct: type[Struct]) -> Callable[..., int]:
        """The function for such structs; takes the address of one and parallel(); anything but 0 is for failure()."""
        return getattr(self.handle, struct.function)

    def run(self, struct: Struct) -> None:
        """Makes the call that a struct describes, on torch's threads; raises what failure() says."""
        if code := getattr(self.handle, struct.function)(ctypes.addressof(struct), parallel()):
            raise failure(code)


_IS_AN_ERROR = "This is an error of regard: please report it."
_OUT_OF_RANGE = {
    "REGARD_BAD_ARGUMENT": f"it takes no such size, dtype, stride or address. {_IS_AN_ERROR}",
    "REGARD_BAD_INTERVAL": "a query's interval of keys reaches beyond the keys. The numbers of a mask (such as "
    "Lengths.keys) must lie between 0 and the number of keys.",
    "REGARD_BAD_TILE": f"a map of tiles names bits that are not there. {_IS_AN_ERROR}",
    "REGARD_BAD_CELL": "the places of queries and keys differ by more than the buckets of the relative bias say "
    "(DifferenceBuckets.farthest).",
    "REGARD_BAD_PAGE": "a block table names a page that the pool does not have.",
    "REGARD_BAD_POSITION": f"the positions of a sequence do not count up by one. {_IS_AN_ERROR}",
    "REGARD_BAD_GROUP": "a group of keys has a number that is not below the number of groups (Mass.count).",
}
_REASONS = {abi.CODES[name]: reason for name, reason in _OUT_OF_RANGE.items()}


def failure(code: int) -> Exception:
    """What is raised where a kernel returns anything but 0: it has computed nothing."""
    if code in _REASONS:
        return ShapeError(f"regard's native kernel refused a call: {_REASONS[code]}")
    return MemoryError("regard's native kernel could not have its scratch memory; nothing was computed.")


@cache
def parallel() -> ctypes.c_void_p | None:
    """torch's own parallel-for, so that no second pool of threads disturbs it; None (one thread) where it has none."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        if (folder / name).exists():
            symbol = getattr(ctypes.CDLL(str(folder / name)), "torch_parallel_for", None)
            return ctypes.cast(symbol, ctypes.c_void_p) if symbol is not None else None
    return None


def built() -> dict[str, Path]:
    """The shared objects that were installed, by instruction set."""
    return {path.stem.removeprefix("libregard_"): path for path in sorted(_FOLDER.glob(f"libregard_*{_ENDING}"))}


@constant_in_graphs
def why_not_built() -> str:
    """Why there are no kernels, as a clause: what native/build.cmake wrote down."""
    if stale():
        return (
            f"the kernels in {_FOLDER} ({', '.join(stale())}) belong to another version of regard; install it again, "
            "with pip install --force-reinstall --no-deps"
        )
    note, log = _FOLDER / "why_not.txt", _FOLDER / "build.log"
    if not note.exists():
        missing = [name for name in (f"libregard_base{_ENDING}", _PYTHON_CALLS.name) if not (_FOLDER / name).exists()]
        return f"there is no {' and no '.join(missing)} in {_FOLDER}"
    return note.read_text().strip() + (f"; see {log}" if log.exists() else "")


@constant_in_graphs
def runnable() -> tuple[str, ...]:
    """The installed instruction sets that this processor runs, best first."""
    return _runnable()


@cache
def _runnable() -> tuple[str, ...]:
    paths = built()
    if "base" not in paths or not _PYTHON_CALLS.exists() or stale():
        return ()
    name = ctypes.CDLL(str(paths["base"])).regard_runnable  # native/isa/select.h has the list, best first
    name.argtypes, name.restype = (ctypes.c_int64,), ctypes.c_char_p
    able: list[str] = []
    while isa := name(len(able)):
        able.append(isa.decode())
    return tuple(isa for isa in able if isa in paths)


@cache
def stale() -> tuple[str, ...]:
    """The installed objects that read other structs than Python fills: of an older build, or a newer."""
    calls = {"python": _PYTHON_CALLS} if _PYTHON_CALLS.exists() else {}
    return tuple(name for name, path in {**built(), **calls}.items() if _abi(path) != abi.ABI)


def _abi(path: Path) -> int | None:
    handle = ctypes.CDLL(str(path))
    if not hasattr(handle, "regard_abi"):
        return None
    handle.regard_abi.restype = ctypes.c_uint64
    return handle.regard_abi()


@cache
def python_calls() -> ctypes.PyDLL:
    """The object of native/python/, which there is where there are kernels."""
    return ctypes.PyDLL(str(_PYTHON_CALLS))


@cache
def load(isa: str) -> Library:
    """The kernels of one instruction set, which must be runnable."""
    handle = ctypes.CDLL(str(built()[isa]))
    for name in abi.ENTRIES:
        entry = getattr(handle, name)
        entry.argtypes, entry.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int32
    handle.regard_bandwidth.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    handle.regard_bandwidth.restype = ctypes.c_float
    for name in ("regard_queries", "regard_keys", "regard_matrix_parts"):
        getattr(handle, name).restype = ctypes.c_int64
    handle.regard_matrix_parts.argtypes = (ctypes.c_void_p,)
    return Library(isa, handle)


def library() -> Library:
    """The kernels that run here; there must be some."""
    return _library(_environment.get(_ISA))


@cache
def _library(written: Any) -> Library:
    """The same, by what the environment says of REGARD_ISA."""
    isa = chosen()
    assert isa is not None
    return load(isa)


# os.environ.get would take a tenth of a small call: it encodes the name each time
_environment = cast(dict[Any, Any], os.environ._data)  # pyright: ignore
_ISA = os.environ.encodekey("REGARD_ISA")


def isa_written() -> Any:
    """What the environment says of REGARD_ISA, as os.environ keeps it; None: nothing."""
    return _environment.get(_ISA)


def chosen() -> str | None:
    """The best runnable instruction set, or the one that REGARD_ISA names; None if there are no kernels."""
    able, written = runnable(), isa_written()
    if written is None or not able:
        return able[0] if able else None
    named = os.environ.decodevalue(written)
    if named not in able:
        raise ValueError(f"REGARD_ISA={named}: this processor and installation run {', '.join(able)}.")
    return named
