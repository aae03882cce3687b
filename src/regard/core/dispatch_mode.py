"""DispatchMode: what sees every operation of torch while it is open; the arguments of such an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode whose first operation does not import torch's compiler, which takes a second or more.

    torch would import it to leave the method __torch_dispatch__ out of what is compiled; no mode of regard's is open
    where something is compiled.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def mapped(args: Any, fn: Callable[[Any], Any]) -> Any:
    """Arguments of an operation with fn of each; lists stay lists."""
    return type(args)(mapped(x, fn) if isinstance(x, (list, tuple)) else fn(x) for x in args)


def flat(args: Any) -> list[Any]:
    """Arguments of an operation, those in lists too."""
    return [y for x in args for y in (flat(x) if isinstance(x, (list, tuple)) else [x])]
