"""Which of transformers' models take the name "regard", and what it does in them: some reach it, some cannot.

transformers asks a model whether it can do an implementation (`get_correct_attn_implementation`) when it is built and
when the implementation is set. `install` has it ask here, too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from regard.compat.transformers.warnings import warn_once
from regard.compat.transformers.written_out import Form

NAME = "regard"  # of the implementation
# Types of models whose layers append keys that they make of several tokens each, and append to the mask which queries
# see these, where the mask is a torch.Tensor.
APPENDING_KEYS = frozenset({"deepseek_v4"})
# Types of models whose decoder reads all keys that a layer with a window keeps, besides its own, and gives no mask.
READING_ALL_KEPT = frozenset({"diffusion_gemma_text"})
# Types of models whose attention modules say that they are causal, which look both ways and ask for no mask then.
SAYING_CAUSAL = frozenset({"phi4_multimodal_vision"})

# the class of the models that were built on regard, by the class of their configuration
_MODELS: dict[type, type[PreTrainedModel]] = {}


def form_of(config: Any, dtype: torch.dtype) -> Form:
    """How the model of a configuration wants a mask that it computes with; dtype is that of its hidden states."""
    model = _MODELS.get(type(config))
    if model is None:
        return Form()
    return Form(torch.bool if model._supports_sdpa else dtype, model.__name__)  # pyright: ignore[reportPrivateUsage]


def install(prepare: Callable[[type[PreTrainedModel]], None]) -> None:
    """Has transformers ask here when a model takes the implementation "regard"; prepare: gets the class of each that
    does."""
    own = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(own)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        found = own(self, requested_attention, is_init_check)
        if found != NAME:
            return found
        table = _table_without(type(self))
        if table is None:
            prepare(type(self))
            _MODELS[type(self.config)] = type(self)
            FirstForward().watch(self)
            return NAME
        classes = getattr(sys.modules[type(self).__module__], table)
        # the classes are chosen when the model is built; later it keeps those that it has
        config: Any = self.config
        wanted = own(self, None, is_init_check) if is_init_check else config._attn_implementation
        instead: str = wanted if wanted in classes else "eager"
        warn_once(
            table,
            f"{type(self).__name__} takes its attention from a table of its own ({table}), which has no {NAME!r}: it "
            f"runs with its {instead!r}, and regard computes nothing in it. Pass "
            f'attn_implementation="{instead}" to have the same without this warning.',
        )
        return instead

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def eager_alone(config: Any) -> bool:
    """Whether the model that was built on regard from a configuration was written for eager attention alone."""
    model = _MODELS.get(type(config))
    return model is not None and not model._supports_sdpa  # pyright: ignore[reportPrivateUsage]


class FirstForward:
    """Hooks on a model that took the name, for one forward: whether attention came to regard in it, or a warning.

    A model without modules that are named attention (Mamba) is not reported; of models in each other the innermost is.
    """

    # calls of attention that came to regard so far, and warnings, so that the models around are silent
    reached: ClassVar[int] = 0

    def watch(self, model: PreTrainedModel) -> None:
        self.before = 0
        self.hooks = model.register_forward_pre_hook(self.begin), model.register_forward_hook(self.end)

    def begin(self, model: nn.Module, arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self.before = FirstForward.reached

    def end(self, model: nn.Module, arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for hook in self.hooks:
            hook.remove()
        name = type(model).__name__
        config: Any = model.config
        if config._attn_implementation != NAME:  # it was given another one before it ran
            return
        if FirstForward.reached > self.before or not any("Attention" in type(m).__name__ for m in model.modules()):
            return
        FirstForward.reached += 1
        warn_once(
            f"forward of {name}",
            f'{name} took attn_implementation="regard", and no call of attention came to regard in its first forward: '
            "its modules compute attention by themselves, exactly as without regard. Pass "
            'attn_implementation="eager" to have the same without this warning.',
        )


def _table_without(model: type[PreTrainedModel]) -> str | None:
    """What the module of a class calls its table from implementations to classes, where that lacks "regard"."""
    for attribute, table in vars(sys.modules[model.__module__]).items():
        if not isinstance(table, dict) or "eager" not in table or NAME in table:
            continue
        if all(isinstance(entry, type) and issubclass(entry, nn.Module) for entry in table.values()):
            return attribute
    return None
