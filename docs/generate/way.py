"""The way of q through regard's Python files to the kernels: `python docs/generate/way.py` prints design.md's table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard as rg

SOURCES = Path(rg.__file__).parent


class Way(NamedTuple):
    """What a call does in regard's Python files.

    files  those in which some function had a tensor of q's memory in a variable, in that order: also one in a tuple, a
           list or a dict, which many functions pass on
    calls  how many functions are called. Comprehensions and generator expressions, which Python counts as functions or
           not by its version, are part of the function that they stand in.
    """

    files: list[str]
    calls: int


_PARTS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def way_of(q: Tensor, call: Callable[[], object]) -> Way:
    """What a call does, which has q among its arguments."""
    files: dict[str, None] = {}
    calls = 0
    memory = q.untyped_storage().data_ptr()

    def holds(x: object) -> bool:
        if type(x) in (tuple, list):
            return any(map(holds, x))
        if type(x) is dict:
            return any(map(holds, x.values()))
        return type(x) in (Tensor, Named) and x.untyped_storage().data_ptr() == memory

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(SOURCES):
            return
        calls += event == "call" and frame.f_code.co_name not in _PARTS
        if any(map(holds, frame.f_locals.values())):
            files[path.relative_to(SOURCES).with_suffix("").as_posix()] = None

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Way(list(files), calls)


class Named(Tensor):
    """A subclass of tensors, which may hold its numbers elsewhere: plans do not serve it."""


def near(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """A function may compute something else each time, so that each call lowers it, in a plan too."""
    return i - j < 9


def ways() -> dict[str, Way]:
    """Of calls on the native kernels."""
    q, k, v = (torch.randn(1, 4, 40, 24) for _ in range(3))
    learned = q.clone().requires_grad_()
    causal, function, native = rg.Causal(), rg.Causal() & rg.Where(near), rg.Native()
    subclass = q.clone().as_subclass(Named)
    calls = {
        "the first call of its kind": (q, lambda: rg.attention(q, k, v, mask=causal)),
        "a later call": (q, lambda: rg.attention(q, k, v, mask=causal)),
        "a later call with a gradient": (learned, lambda: rg.attention(learned, k, v, mask=causal)),
        "a later call with `backend=`": (q, lambda: rg.attention(q, k, v, mask=causal, backend=native)),
        "a later call with a function": (q, lambda: rg.attention(q, k, v, mask=function)),
        "a call without a plan": (subclass, lambda: rg.attention(subclass, k, v, mask=function)),
    }
    for _, call in list(calls.values())[2:]:  # the kernels are loaded by the first of all
        call()
    return {name: way_of(tensor, call) for name, (tensor, call) in calls.items()}


def table() -> str:
    """As Markdown."""
    rows = (
        f"| {name} | {way.calls} | {len(way.files)} | {', '.join(f'`{file}`' for file in way.files)} |"
        for name, way in ways().items()
    )
    return "\n".join(("| call | functions called | files | in order |", "| --- | ---: | ---: | --- |", *rows))


if __name__ == "__main__":
    print(table())
