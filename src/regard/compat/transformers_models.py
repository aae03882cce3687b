"""Which of transformers' models take the name "regard", and what it does in them: some reach it, some cannot.

transformers asks a model whether it can do an implementation (`get_correct_attn_implementation`) when it is built and
when the implementation is set. `install` has it ask here, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from regard.compat.transformers_tensor import Form

# the class of the models that were built on regard, by the class of their configuration
_MODELS: dict[type, type[PreTrainedModel]] = {}


def form_of(config: Any, dtype: torch.dtype) -> Form:
    """How the model of a configuration wants a mask that it computes with; dtype is that of its hidden states."""
    model = _MODELS.get(type(config))
    if model is None:
        return Form()
    return Form(torch.bool if model._supports_sdpa else dtype, model.__name__)  # pyright: ignore[reportPrivateUsage]


def install(name: str) -> None:
    """Has transformers ask here when a model takes the implementation of that name."""
    own = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(own)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        found = own(self, requested_attention, is_init_check)
        if found == name:
            _MODELS[type(self.config)] = type(self)
        return found

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
