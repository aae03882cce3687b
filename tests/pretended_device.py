"""A device that is the CPU by another name: a tensor there meets no tensor of the CPU, and whoever reads one is heard.

`begin()` makes it, once a process. Its tensors then are `t.to(DEVICE)`, made like those of any device, and `t.cpu()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "pretended"
COPIES = ("aten::_to_copy", "aten::copy_")
READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
FACTORIES = ("arange.default", "arange.start", "arange.start_step")  # which the CPU makes by resizing an empty tensor
LISTENERS: list[Callable[[str], None]] = []  # called with the name of whatever reads numbers of a tensor there
KEPT: list[torch.library.Library] = []


class OtherDevice(AssertionError):
    """An operation has tensors of two devices."""


class Pretended(Tensor):
    """A tensor of that device; its numbers are those of `raw`, on the CPU."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(DEVICE, 0),
        )
        made.raw = raw
        return made

    def __init__(self, raw: Tensor) -> None:
        """All is done in __new__."""

    def __repr__(self) -> str:
        return f"Pretended({self.raw})"

    def tolist(self) -> Any:
        read("tolist")
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, *args, **(kwargs or {}))


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on that device: the CPU's on the raw tensors."""
    name, (flat, shape) = op._schema.name, pytree.tree_flatten((args, kwargs))
    for t in flat:
        if isinstance(t, Tensor) and not isinstance(t, Pretended) and t.dim() and name not in COPIES:
            raise OtherDevice(f"{name} has tensors on {DEVICE} and on {t.device}")
    if name in READS:
        read(name)
    on_cpu = [torch.device("cpu") if isinstance(x, torch.device) else getattr(x, "raw", x) for x in flat]
    raw_args, raw_kwargs = pytree.tree_unflatten(on_cpu, shape)
    out = op(*raw_args, **raw_kwargs)
    to_cpu = name == COPIES[0] and torch.device(kwargs.get("device") or DEVICE).type == "cpu"
    if to_cpu or (name == COPIES[1] and not isinstance(args[0], Pretended)):
        read(name)
        return out if to_cpu else args[0]
    assert all(t.shape == raw.shape for t, raw in zip(flat, on_cpu, strict=True) if isinstance(t, Pretended)), name
    return return_and_correct_aliasing(op, args, kwargs, pytree.tree_map_only(Tensor, Pretended, out))


def read(name: str) -> None:
    for listener in LISTENERS:
        listener(name)


def within(*folders: str) -> bool:
    """Whether a function of regard in one of these folders has called, from however far."""
    frame = sys._getframe()
    while frame is not None:
        if any(f"/regard/{folder}" in frame.f_code.co_filename for folder in folders):
            return True
        frame = frame.f_back
    return False


@cache
def begin() -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(run, "PrivateUse1")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload)
        aten.impl(op, partial(run, op), "PrivateUse1")
    KEPT.extend((every, aten))
    torch.tensor = partial(made_of_numbers, torch.tensor)


def made_of_numbers(on_cpu: Callable[..., Tensor], numbers: Any, device: Any = None, **given: Any) -> Tensor:
    """torch.tensor, which enters no device of Python's from within."""
    made = on_cpu(numbers, device=None if device is None or torch.device(device).type == DEVICE else device, **given)
    return made if device is None else made.to(device)
