"""Running: which modules of a model are running, known by global hooks; the modules themselves get none."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Running:
    """The modules of one model that are at work on this thread, outermost first, while `open` is.

    A module's name is its path in the model, as named_modules gives it; the model's own name is that of its class.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(module): path or type(model).__name__ for path, module in model.named_modules()}
        self.ran = set[str]()  # names
        self._at_work: list[nn.Module] = []
        self._thread = threading.get_ident()

    @contextmanager
    def open(self) -> Generator[None, None, None]:
        """Hooks for all modules there are: hooks on the model's own would take torch's encoder off its fast path."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)  # after an exception too
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._at_work.clear()

    def innermost(self) -> nn.Module | None:
        """The module whose forward runs now, of those of the model; None outside of it."""
        return self._at_work[-1] if self._at_work else None

    def name(self, module: nn.Module | None) -> str | None:
        """The name of a module of the model; None of another."""
        return self.names.get(id(module))

    def _ours(self, module: nn.Module) -> bool:
        if torch.compiler.is_compiling():  # a graph holds no hooks; the call inside it says so
            return False
        return threading.get_ident() == self._thread and id(module) in self.names

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if self._ours(module):
            self._at_work.append(module)
            self.ran.add(self.names[id(module)])

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._ours(module) and any(module is one for one in self._at_work):
            while self._at_work.pop() is not module:
                pass
