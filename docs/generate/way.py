"""The way of q through regard's Python files to the kernels: `python docs/generate/way.py` prints design.md's table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import regard as rg

SOURCES = Path(rg.__file__).parent


def way_of(q: Tensor, call: Callable[[], object]) -> list[str]:
    """The files in which some function had a tensor of q's memory in a variable during a call, in that order.

    Also one in a tuple, a list or a dict, which many functions pass on.
    """
    files: dict[str, None] = {}
    memory = q.untyped_storage().data_ptr()

    def holds(x: object) -> bool:
        if type(x) in (tuple, list):
            return any(map(holds, x))
        if type(x) is dict:
            return any(map(holds, x.values()))
        return type(x) is Tensor and x.untyped_storage().data_ptr() == memory

    def see(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event in ("call", "return") and path.is_relative_to(SOURCES) and any(map(holds, frame.f_locals.values())):
            files[path.relative_to(SOURCES).with_suffix("").as_posix()] = None

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(before)
    return list(files)


def near(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """A function may compute something else each time, so that no plan is kept of a call with it."""
    return i - j < 9


def ways() -> dict[str, list[str]]:
    """Of calls on the native kernels."""
    q, k, v = (torch.randn(1, 4, 40, 24) for _ in range(3))
    learned = q.clone().requires_grad_()
    calls = {
        "the first call of its kind": (q, lambda: rg.attention(q, k, v, mask=rg.Causal())),
        "a later call": (q, lambda: rg.attention(q, k, v, mask=rg.Causal())),
        "a later call with a gradient": (learned, lambda: rg.attention(learned, k, v, mask=rg.Causal())),
        "a later call with `backend=`": (q, lambda: rg.attention(q, k, v, mask=rg.Causal(), backend=rg.Native())),
        "a call without a plan": (q, lambda: rg.attention(q, k, v, mask=rg.Causal() & rg.Where(near))),
    }
    rg.attention(learned, k, v, mask=rg.Causal())
    rg.attention(q, k, v, mask=rg.Causal(), backend=rg.Native())
    return {name: way_of(tensor, call) for name, (tensor, call) in calls.items()}


def table() -> str:
    """As Markdown."""
    rows = (f"| {name} | {len(files)} | {', '.join(f'`{file}`' for file in files)} |" for name, files in ways().items())
    return "\n".join(("| call | files | in order |", "| --- | ---: | --- |", *rows))


if __name__ == "__main__":
    print(table())
