"""What torch.jit.script compiles where a program calls a function of regard's that has torch's name: torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def scripts_as(function: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """From here on torch.jit.script compiles `theirs` where it finds `function`.

    A TorchScript program runs where regard may not be, and cannot call Python: it holds torch's operations, as a trace
    of regard's functions does. `theirs` is an operation of torch, or a function that torch.jit.script compiles.
    """
    builtins: Any = torch.jit._builtins  # pyright: ignore
    operation = builtins._find_builtin(theirs)
    if operation is not None:
        builtins._register_builtin(function, operation)
        return
    # As torch.jit.script_if_tracing marks its wrappers. The mark is there, which torch.jit.script looks for, and false:
    # where it is true, torch.compile reads the other function too.
    vars(function).update({"__script_if_tracing_wrapper": False, "__original_fn": theirs})
